// A rank that has given up passes nothing on: bodies that send what they have computed from what
// they waited for.
#include "staggered.h"

#include <cstring>
#include <functional>

#include "all_reduce_call.h"
#include "jflux/shmem.h"
#include "matmul_all_reduce_call.h"
#include "testing.h"

namespace jflux {
namespace {

template <typename Call>
void ExpectNothingStale(PlainHeap heap, Call& call) {
  const Staggered result = RunStaggered(heap, call);
  EXPECT(!result.errors[0].empty());
  EXPECT(result.stale_ranks.empty()) << "rank " << result.stale_ranks[0];
}

TEST(MatmulAllReduce) {
  const Rows rows{3, 1, 16};
  const MatmulAllReduceParams p{{rows, 8, 8, DType::kF32, DType::kF32, false}};
  MatmulAllReduceCall call(p, ScatterTiling{8, 8}, 1);
  ExpectNothingStale(PlainHeap(3, call.Workspace()), call);
}

TEST(AllReduceInPackets) {
  for (AllReduceAlgorithm algorithm :
       {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot,
        AllReduceAlgorithm::kHalfButterfly, AllReduceAlgorithm::kButterfly}) {
    AllReduceCall call(AllReduceParams{3, 100, DType::kF32, algorithm}, 1);
    ExpectNothingStale(PlainHeap(3, call.Workspace()), call);
  }
}

TEST(AllReduceInChunks) {
  const AllReduceParams p{3, 100, DType::kF32, AllReduceAlgorithm::kChunked};
  AllReduceCall call(p, 1);
  ExpectNothingStale(PlainHeap(3, p.Chunks().Workspace()), call);
}

// A kernel author's body, which goes on after a failed wait: rank 2 sends a number to rank 0, which
// passes it on to rank 1.
class Relay : public AnyCall {
 public:
  Relay() : layout(shmem::WorkspaceFor(8, 2)) {}
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext wait) override {
    const shmem::Context ctx{view, layout, epoch, /*signature=*/7, wait, 0, 1};
    auto* number = ctx.data<int64_t>();
    int64_t sent = 41;
    bool ok = true;
    if (view.rank == 2) shmem::put_signal(ctx, number, &sent, 1, ctx.signal(0), 0);
    if (view.rank == 0) {
      ok = shmem::signal_wait_until(ctx, ctx.signal(0), 2);
      sent = ok ? *number + 1 : -1;  // what a body sends that goes on after a failed wait
      shmem::put_signal(ctx, number, &sent, 1, ctx.signal(1), 1);
    }
    if (view.rank == 1) {
      ok = shmem::signal_wait_until(ctx, ctx.signal(1), 0);
      if (ok) got_ = *number;
    }
    return ok;
  }
  int64_t WrongOn(int rank) const { return rank == 1 && got_ != 42; }
  int64_t Wrong() const override { return WrongOn(1); }

  const WorkspaceLayout layout;

 private:
  int64_t got_ = 0;
};

TEST(AKernelAuthorsBody) {
  Relay call;
  ExpectNothingStale(PlainHeap(3, call.layout), call);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
