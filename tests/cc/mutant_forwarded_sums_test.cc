// A mutant that goes on after a failed wait, and sends its sums as if they were right. The schedule
// of staggered.h must show it: another rank's call succeeds with wrong numbers.
#define jflux jflux_mutant
#include "core/signal.h"

namespace jflux {

inline bool WaitAndGoOn(const Signal* word, Signal expected, int32_t peer, int64_t tile,
                        const WaitContext& ctx) {
  WaitSignal(word, expected, peer, tile, ctx);
  return true;
}

}  // namespace jflux

#define WaitSignal WaitAndGoOn
#include "ops/matmul_all_reduce/matmul_all_reduce_cpu.cc"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_cpu.cc"
#include "runtime/cpu_matmul.cc"
#include "runtime/fault.cc"
#undef WaitSignal

#include "matmul_all_reduce_call.h"
#include "no_ops.h"
#include "staggered.h"
#include "testing.h"

namespace jflux {
namespace {

TEST(AnotherRankTakesStaleSumsForRight) {
  const Rows rows{3, 1, 16};
  const MatmulAllReduceParams p{{rows, 8, 8, DType::kF32, DType::kF32, false}};
  MatmulAllReduceCall call(p, ScatterTiling{8, 8}, 1);
  bool rank_1_is_stale = false;
  for (int trial = 0; trial < 10 && !rank_1_is_stale; ++trial) {  // a busy host may miss it
    PlainHeap heap(3, call.Workspace());
    for (int64_t rank : RunStaggered(heap, call).stale_ranks) rank_1_is_stale |= rank == 1;
  }
  EXPECT(rank_1_is_stale);
}

}  // namespace
}  // namespace jflux

// Going on after a failed wait is a data race as well. The numbers alone decide here.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "report_bugs=0";
}

int main() { return jflux::RunAll(); }
