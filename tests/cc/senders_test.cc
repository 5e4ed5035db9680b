// gpu/senders.h: how many CTAs send at a time.
#include "gpu/senders.h"

#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 132;

TEST(ShortProductsNeedMoreStorers) {
  int32_t last = 1 << 20;
  for (int64_t k : {384, 1024, 2048, 4096, 5504, 7168, 14336, 24576, 1 << 20}) {
    const int32_t storers = SendingStorers(k, 1, kSms);
    EXPECT(1 <= storers && storers <= last) << k;
    last = storers;
  }
  // Those of an H200, of which the fastest were 15 to 20, 20 and 8 to 12.
  EXPECT_EQ(SendingStorers(7168, 1, kSms), 16);
  EXPECT_EQ(SendingStorers(5504, 1, kSms), 20);
  EXPECT_EQ(SendingStorers(24576, 1, kSms), 8);
}

// A consumer may wait for peers while the other one has staged its part of the next tile.
TEST(ShortKTakesNoTickets) {
  for (int64_t k : {1, 64, 320}) EXPECT_EQ(SendingStorers(k, 1, kSms), 0);
  EXPECT(SendingStorers(321, 1, kSms) > 0);
}

TEST(StorersGoByWhatTheySend) {
  for (int64_t k : {8192, 16384, 24576}) {
    for (double copies : {1.0, 2.0, 3.0, 7.0}) {
      EXPECT_EQ(SendingStorers(k, 2 * copies, kSms), SendingStorers(k, copies, 2 * kSms)) << k;
      EXPECT_EQ(SendingStorers(2 * k, 2 * copies, kSms), SendingStorers(k, copies, kSms)) << k;
      EXPECT(SendingStorers(k, copies, kSms) <= SendingStorers(k, copies + 1, kSms)) << k;
    }
  }
}

TEST(AThirdOfTheSmsSendAGathersRowsOrMore) {
  EXPECT_EQ(SendingGatherers(2, 24576, kSms), 44);
  EXPECT_EQ(SendingGatherers(2, 5120, kSms), 44);
  for (int world = 2; world <= 8; ++world) {
    int32_t last = kSms;
    for (int64_t n : {8, 512, 1024, 2560, 12288, 49152}) {
      const int32_t senders = SendingGatherers(world, n, kSms);
      EXPECT(kSms / 3 <= senders && senders <= last) << world << " ranks, " << n << " columns";
      last = senders;
    }
    // Where sending takes as long as the product, all of them.
    EXPECT_EQ(SendingGatherers(world, 512, kSms), kSms);
  }
  EXPECT(SendingGatherers(2, 8, 1) >= 1 && SendingGatherers(2, 1 << 20, 2) >= 1);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
