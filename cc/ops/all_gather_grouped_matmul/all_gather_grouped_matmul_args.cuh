// The kernel's arguments, and the addresses of what peers send.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_ARGS_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_ARGS_CUH_

#include "core/gathered_tiles.h"
#include "gpu/gemm_call.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_config.h"
#include "ops/grouped_matmul/grouped_matmul_args.cuh"

namespace jflux {

// GroupedMatmulArgs has what the epilogue needs. Of its groups, there are no group_sizes; its map
// of x is not used.
struct AllGatherGroupedMatmulArgs : GroupedMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  TokenLayout layout;
  GatheredTiles order;  // of cluster tiles
  uint32_t senders;     // CTAs that may send
  int32_t tokens;       // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* source;
  const char* x_data;
};
static_assert(sizeof(AllGatherGroupedMatmulArgs) <= 4096);

// The signal, on `rank`, of a chunk of the tokens of `src`.
__device__ __forceinline__ Signal* ChunkSignal(const AllGatherGroupedMatmulArgs& args,
                                               const CallContext& call, int rank, int src,
                                               int32_t chunk) {
  return args.view.At<Signal>(
      rank, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(src, chunk));
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_ARGS_CUH_
