// From one 32-bit number of calls to the next, on memory that nobody clears from outside: words of
// the first calls are still there when their numbers' low 32 bits come again.
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "all_reduce_call.h"
#include "exchange_call.h"
#include "matmul_reduce_scatter_call.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr uint64_t kWrap = uint64_t{1} << 32, kScrub = uint64_t{1} << kScrubPeriodBits;

// Makes `count` calls from `first_epoch` on. Rank 0 is early, so it would find what is left of
// earlier calls. Returns how many results are wrong.
template <typename MakeCall>
int64_t Wrong(PlainHeap& heap, uint64_t first_epoch, int count, MakeCall&& make) {
  std::vector<std::unique_ptr<AnyCall>> calls;
  // Other numbers in each of these groups of calls.
  const auto seed = static_cast<uint32_t>(first_epoch >> 30) * 100;
  for (int i = 0; i < count; ++i) calls.push_back(make(seed + i + 1));
  RunOptions options;
  options.first_epoch = first_epoch;
  options.poison = false;
  options.deadline_s = 20;
  options.before = [](int rank, size_t) {
    if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  };
  const std::string error = Join(RunRanks(heap, Pointers(calls), options));
  EXPECT(error.empty()) << error;
  int64_t wrong = 0;
  for (const auto& call : calls) wrong += call->Wrong();
  return wrong;
}

// Large calls, whose words stay where small ones have none; then small calls across 2^31 and 2^32,
// unless they are left out; then large calls with the numbers, in 32 bits, of the first ones.
template <typename MakeLarge, typename MakeSmall>
int64_t WrongAfterTheWrap(PlainHeap heap, bool with_small, MakeLarge&& large, MakeSmall&& small) {
  int64_t wrong = Wrong(heap, 2, 10, large);
  if (with_small) {
    wrong += Wrong(heap, kScrub - 2, 12, small);
    wrong += Wrong(heap, kWrap - 3, 11, small);
  }
  EXPECT_EQ(wrong, 0);
  return Wrong(heap, kWrap + 10, 2, large);
}

// `shrink` makes a small call of a large one.
template <typename Call, typename Params, typename Shrink>
void CheckPackets(Params p, Shrink&& shrink) {
  const auto large = [p](uint32_t seed) { return std::make_unique<Call>(p, seed); };
  const PlainHeap fresh(3, p.Workspace(), /*first_epoch=*/1, /*poison=*/false);
  shrink(&p);
  const auto small = [p](uint32_t seed) { return std::make_unique<Call>(p, seed); };
  EXPECT_EQ(WrongAfterTheWrap(fresh, /*with_small=*/true, large, small), 0);
  EXPECT(WrongAfterTheWrap(fresh, /*with_small=*/false, large, small) > 0) << "not noticed";
}

TEST(PacketsOfAllReduce) {
  for (AllReduceAlgorithm algorithm :
       {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
        AllReduceAlgorithm::kHalfButterfly, AllReduceAlgorithm::kButterfly}) {
    CheckPackets<AllReduceCall>(AllReduceParams{3, 300, DType::kF32, algorithm},
                                [](AllReduceParams* p) { p->count = 6; });
  }
}

TEST(PacketsOfExchanges) {
  const Shards whole{1, 1, 400}, parts{3, 1, 400};
  const auto shrink = [](ExchangeParams* p) { p->x.inner = p->y.inner = 8; };
  CheckPackets<ExchangeCall>(ExchangeParams{kAllGatherId, 3, DType::kF32, whole, parts}, shrink);
  CheckPackets<ExchangeCall>(ExchangeParams{kReduceScatterId, 3, DType::kF32, parts, whole},
                             shrink);
}

TEST(Signals) {
  const auto call = [](int64_t n) {
    return [n](uint32_t seed) {
      return std::make_unique<MatmulReduceScatterCall>(
          MatmulReduceScatterParams{Rows{3, 1, 16}, 8, n, DType::kF32, DType::kF32, false},
          ScatterTiling{8, 8}, seed);
    };
  };
  const PlainHeap fresh(3, call(32)(1)->Workspace());
  for (bool with_small : {false, true}) {
    EXPECT_EQ(WrongAfterTheWrap(fresh, with_small, call(32), call(8)), 0);
  }
}

// One clearing reaches every packet once, in the half that the call does not use.
TEST(AClearingReachesEveryPacket) {
  for (int64_t half = PacketLayout::kMinHalfBytes; half <= 16 << 20; half *= 4) {
    const PacketLayout layout{half};
    for (uint64_t period : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{300}}) {
      std::set<int64_t> slices;
      uint64_t epoch = period * kScrub - 4;
      const int64_t calls = 2 * half / kScrubBytes;
      for (int64_t i = 0; i < calls + 8; ++i, epoch = NextEpoch(epoch)) {
        const int64_t offset = layout.ScrubOffset(epoch);
        if (offset < 0) continue;
        const int64_t other = layout.PacketOffset(epoch + 1);
        EXPECT(other <= offset && offset + kScrubBytes <= other + half) << half << " " << epoch;
        EXPECT(slices.insert(offset).second) << half << " " << epoch;
      }
      EXPECT_EQ(static_cast<int64_t>(slices.size()), calls) << half;
    }
    for (uint64_t epoch = 1; epoch < 5000; ++epoch) EXPECT(layout.ScrubOffset(epoch) < 0);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
