// The kernel's arguments, and the addresses of what peers send.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_ARGS_CUH_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_ARGS_CUH_

#include "gpu/gemm_call.cuh"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ops/all_to_all_matmul/shard_panels.h"

namespace jflux {

// The fields that every tile needs come first: a line of constant memory is fetched when it is
// first read.
struct AllToAllMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  ShardTileOrder order;  // of cluster tiles
  int64_t n;
  int32_t k;  // of a shard
  int32_t num_tiles;
  int32_t terms;    // terms of the product: the ranks' shards if columns are concatenated, else 1
  int32_t a_bytes;  // bytes of a box of A
  uint32_t signature, op;
  bool split_rows, concat_rows;
  bool gathers;  // also write all_to_all(x)
  WorkspaceLayout workspace;
  ShardPanels panels;
  ShardSendOrder send_order;
  int32_t send_box_bytes;  // of a full box
  uint32_t senders;        // CTAs that may send
  // x, y and `gathered` are 4-d: columns of a shard, inner rows, outer rows, shards. If rows are
  // not split (x) or not concatenated (y, gathered), all rows are `inner`.
  CUtensorMap x;             // the local shard, as the main loop reads it
  CUtensorMap w[kMaxRanks];  // the rows of w of each term
  CUtensorMap y;
  CUtensorMap workspace_maps[2];  // the halves' data as rows of 64 columns; 4-d
  CUtensorMap send_boxes;         // x, as the send warp reads it
  CUtensorMap gathered;           // to store boxes
};
static_assert(sizeof(AllToAllMatmulArgs) <= 4096);  // the limit for kernel arguments

// The signal, on `rank`, of chunk `chunk` of a row block of the shard that it receives in `step`.
__device__ __forceinline__ Signal* ShardSignal(const AllToAllMatmulArgs& args,
                                               const CallContext& call, int rank, int step,
                                               int32_t row_block, int32_t chunk) {
  return args.view.At<Signal>(rank, args.workspace.SignalOffset(call.epoch) +
                                        args.panels.SignalOffset(step, row_block, chunk));
}
// Row `row` of a k-panel of a row block of that shard.
__device__ __forceinline__ char* ShardPanelRow(const AllToAllMatmulArgs& args,
                                               const CallContext& call, int rank, int step,
                                               int32_t row_block, int32_t k_panel, int32_t row) {
  return args.view.At(
      rank, args.workspace.DataOffset(call.epoch) +
                (args.panels.RowOf(step, row_block, k_panel) + row) * KPanelLayout::kRowBytes);
}
__device__ __forceinline__ int SourceRank(const AllToAllMatmulArgs& args, int step) {
  return static_cast<int>(Remainder(args.view.rank + step, args.view.world));
}

// Coordinates of row r of a shard in x, y or `gathered`. The launcher guarantees that the rows of a
// tile lie within one outer.
struct RowAt {
  int32_t inner, outer;
};
__device__ __forceinline__ RowAt RowOf(const AllToAllMatmulArgs& args, int32_t r, bool by_rows) {
  if (!by_rows || args.rows.outer == 1) return RowAt{r, 0};
  const auto outer = static_cast<int32_t>(Quotient(r, args.rows.inner));
  return RowAt{r - outer * static_cast<int32_t>(args.rows.inner), outer};
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_ARGS_CUH_
