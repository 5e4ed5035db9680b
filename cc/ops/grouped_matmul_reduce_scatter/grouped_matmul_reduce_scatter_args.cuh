// The kernel's arguments, and what they say about a call.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_ARGS_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_ARGS_CUH_

#include "core/scattered_tiles.h"
#include "gpu/gemm_call.cuh"
#include "ops/grouped_matmul/grouped_matmul_args.cuh"
#include "ops/grouped_matmul/span_table_sm90.cuh"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_config.h"

namespace jflux {

// GroupedMatmulArgs has what the product needs. Of its groups, there are no group_sizes.
struct GroupedMatmulReduceScatterArgs : GroupedMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  SumLayout layout;
  ScatteredTiles order;  // of cluster tiles
  SumItems items;
  int32_t tokens;  // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* destination;
  const int32_t* source;
  const float* weights;
  char* out;

  // Blocks of a class that have been stored (core/tile_counts.h).
  __device__ __forceinline__ uint64_t* StoredOf(int32_t tile_class) const {
    return &view.At<WorkspaceHeader>(view.rank, 0)->tiles_stored[tile_class];
  }
};
static_assert(sizeof(GroupedMatmulReduceScatterArgs) <= 4096);

// The signal, on `dst`, of an item that `src` has summed.
__device__ __forceinline__ Signal* ItemSignal(const GroupedMatmulReduceScatterArgs& args,
                                              const CallContext& call, int dst, int src,
                                              int32_t item) {
  return args.view.At<Signal>(
      dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(dst, src, item));
}
// The sum, on `dst`, of a token that `src` has sent.
__device__ __forceinline__ char* SlotOf(const GroupedMatmulReduceScatterArgs& args,
                                        const CallContext& call, int dst, int src, int64_t token) {
  return args.view.At(
      dst, args.workspace.DataOffset(call.epoch) + args.layout.RowOffset(dst, src, token));
}

// The table of spans, and behind it the number of blocks of each class. Both lie in the shared
// memory of the send boxes, which this op does not need: its sums pass through registers.
template <typename Config>
class ClassTable {
 public:
  using Args = GroupedMatmulReduceScatterArgs;
  static_assert(4 * (kMostSpans + 1 + kMostTileClasses) <=
                Config::kSendBoxes * Config::kSendBoxBytes);

  __device__ ClassTable(const Args& args, const GemmSmem<Config>& smem)
      : spans_(smem.SendBox(0), args.order.Segments()), blocks_(spans_.End(args.groups.groups)) {}

  __device__ const SpanTable<Config>& spans() const { return spans_; }
  // Called by all consumers of the CTA.
  __device__ void Make(const Args& args, bool leads) const {
    spans_.Make(args, leads);
    const int32_t groups = args.groups.groups;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    for (int32_t c = warp; c < args.order.Classes(); c += 4 * Config::kConsumers) {
      int32_t blocks = 0;
      for (int32_t e = lane; e < groups; e += 32) {
        const auto before = spans_.BeforeOf(e);
        blocks +=
            args.order.BlocksOf(args.order.RowsOfClass(c, before), before(args.order.Segments()));
      }
      const int32_t sum = WarpInclusiveSum(blocks);
      if (lane == 31) ptx::StoreShared4(blocks_ + 4 * c, sum);
    }
    __syncwarp();
    SyncSums();
  }
  // Called by the send warp before it reads the blocks.
  __device__ void Await() const { SyncSums(); }
  __device__ int32_t BlocksOf(int32_t tile_class) const {
    return ptx::LoadShared4(blocks_ + 4 * tile_class);
  }

  // A barrier of the CTA's warps that sum: all consumers, and the send warp.
  static __device__ void SyncSums() {
    ptx::BarrierSync(3 + Config::kConsumers, 128 * Config::kConsumers + 32);
  }

 private:
  SpanTable<Config> spans_;
  uint32_t blocks_;
};

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_ARGS_CUH_
