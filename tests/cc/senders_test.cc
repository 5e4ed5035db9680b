// gpu/senders.h: how many CTAs send at a time.
#include "gpu/senders.h"

#include "testing.h"

namespace jflux {
namespace {

constexpr Machine kH200{132}, kTwice{264};

TEST(ShortProductsNeedMoreStoreWarps) {
  int32_t last = 1 << 20;
  for (int64_t k : {384, 1024, 2048, 4096, 5504, 7168, 14336, 24576, 1 << 20}) {
    const int32_t warps = SendingStoreWarps(2 * k, 1, kH200);
    EXPECT(1 <= warps && warps <= last) << k;
    last = warps;
  }
  // Choices for an H200. Measured best: 15 to 20, 20, and 8 to 12.
  EXPECT_EQ(SendingStoreWarps(2 * 7168, 1, kH200), 16);
  EXPECT_EQ(SendingStoreWarps(2 * 5504, 1, kH200), 20);
  EXPECT_EQ(SendingStoreWarps(2 * 24576, 1, kH200), 8);
}

// With few k-blocks, a consumer may wait for peers while the other has staged its part of the next
// tile.
TEST(ShortKTakesNoTickets) {
  for (int64_t bytes : {1, 128, 640}) EXPECT_EQ(SendingStoreWarps(bytes, 1, kH200), 0);
  EXPECT(SendingStoreWarps(641, 1, kH200) > 0);
}

TEST(StoreWarpsGoByWhatTheySend) {
  for (int64_t k : {16384, 32768, 49152}) {
    for (double copies : {1.0, 2.0, 3.0, 7.0}) {
      EXPECT_EQ(SendingStoreWarps(k, 2 * copies, kH200), SendingStoreWarps(k, copies, kTwice)) << k;
      EXPECT_EQ(SendingStoreWarps(2 * k, 2 * copies, kH200), SendingStoreWarps(k, copies, kH200))
          << k;
      EXPECT(SendingStoreWarps(k, copies, kH200) <= SendingStoreWarps(k, copies + 1, kH200)) << k;
    }
  }
}

TEST(AThirdOfTheSmsSendAGathersRowsOrMore) {
  EXPECT_EQ(SendingCtas(2, 24576, kH200), 44);
  EXPECT_EQ(SendingCtas(2, 5120, kH200), 44);
  for (int world = 2; world <= 8; ++world) {
    int32_t last = kH200.sm_count;
    for (int64_t n : {8, 512, 1024, 2560, 12288, 49152}) {
      const int32_t senders = SendingCtas(world, n, kH200);
      EXPECT(kH200.sm_count / 3 <= senders && senders <= last)
          << world << " ranks, " << n << " columns";
      last = senders;
    }
    // If sending takes as long as the product, all of them.
    EXPECT_EQ(SendingCtas(world, 512, kH200), kH200.sm_count);
  }
  EXPECT(SendingCtas(2, 8, Machine{1}) >= 1 && SendingCtas(2, 1 << 20, Machine{2}) >= 1);
}

// No more than fill the link, and one at least. Links of NVLink are as they were.
TEST(SlowLinksTakeFewSenders) {
  constexpr double kPcie4 = 22, kPcie5 = 45, kNvlinkOfH100 = 270;
  const auto with = [](double gbps, int32_t sms = 132) { return Machine{sms, gbps}; };
  for (int64_t k : {1024, 7168, 24576}) {
    EXPECT_EQ(SendingStoreWarps(2 * k, 1, with(kNvlinkOfH100)), SendingStoreWarps(2 * k, 1, kH200));
    EXPECT_EQ(SendingStoreWarps(2 * k, 1, with(kPcie5)), 5) << k;
    EXPECT_EQ(SendingStoreWarps(2 * k, 1, with(kPcie4)), 2) << k;
    EXPECT_EQ(SendingStoreWarps(2 * k, 1, with(1)), 1) << k;
  }
  for (int64_t bytes : {128, 640}) EXPECT_EQ(SendingStoreWarps(bytes, 1, with(kPcie4)), 0);
  for (int world = 2; world <= 8; ++world) {
    for (int64_t n : {512, 4096, 49152}) {
      EXPECT_EQ(SendingCtas(world, n, with(kNvlinkOfH100)), SendingCtas(world, n, kH200));
      EXPECT_EQ(SendingCtas(world, n, with(kPcie4)), 12) << world << " ranks, " << n;
      EXPECT_EQ(SendingCtas(world, n, with(kPcie5)), 24) << world << " ranks, " << n;
      EXPECT(1 <= SendingCtas(world, n, with(.1, 8)) && SendingCtas(world, n, with(.1, 8)) <= 8);
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
