// A mutant whose readers accept a packet without checking its flags: stale data, or none.
#define jflux jflux_mutant
#include <initializer_list>

#include "core/atomic.h"

namespace jflux {

inline void LoadAnyway(const uint64_t* p, uint64_t* a, uint64_t* b, uint32_t flag) {
  LoadRelaxed2(p, a, b);
  for (uint64_t* word : {a, b}) *word = static_cast<uint64_t>(flag) << 32 | (*word & 0xffffffff);
}

}  // namespace jflux

#define LoadRelaxed2(p, a, b) LoadAnyway(p, a, b, flag)
#include "core/packet.h"
#undef LoadRelaxed2
#include "all_reduce_call.h"
#include "exchange_call.h"
#include "no_ops.h"
#include "ops/all_reduce/all_reduce_cpu.cc"
#include "ops/exchange/exchange_cpu.cc"
#include "runtime/cpu_matmul.cc"
#include "runtime/fault.cc"
#include "testing.h"

namespace jflux {
namespace {

template <typename Call, typename Params>
void ExpectWrong(const Params& p) {
  Call first(p, 1), second(p, 2), third(p, 3);
  PlainHeap heap(2, p.Workspace());
  RunOptions options;
  options.before = [](int rank, size_t) {  // rank 0 must not find data that rank 1 has not sent
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  options.deadline_s = 20;
  RunRanks(heap, {&first, &second, &third}, options);
  EXPECT(first.Wrong() > 0 && second.Wrong() > 0 && third.Wrong() > 0);
}

TEST(AllReduce) {
  for (AllReduceAlgorithm algorithm :
       {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
        AllReduceAlgorithm::kHalfButterfly, AllReduceAlgorithm::kButterfly}) {
    ExpectWrong<AllReduceCall>(AllReduceParams{2, 100, DType::kF32, algorithm});
  }
}

TEST(Exchanges) {
  for (OpId op : {kAllGatherId, kAllToAllId, kReduceScatterId}) {
    const Shards whole{1, 1, 400}, parts{2, 1, 400};
    ExpectWrong<ExchangeCall>(ExchangeParams{op, 2, DType::kF32, op == kAllGatherId ? whole : parts,
                                             op == kReduceScatterId ? whole : parts});
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
