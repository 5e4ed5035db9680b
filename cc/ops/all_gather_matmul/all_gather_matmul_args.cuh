// The kernel's arguments, and the addresses of what peers send.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_

#include "core/activation.h"
#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_config.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/k_panel_layout.h"

namespace jflux {

// The fields that every tile needs come first: a line of constant memory is fetched when it is
// first read.
struct AllGatherMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  GatherOrder order;  // of cluster tiles
  int64_t k;
  int32_t num_tiles;
  int32_t weights;
  int32_t a_bytes;  // bytes of a box of A
  uint32_t signature, op;
  // Whether y is the product, row for row: no bias, activation, gate or saved sums.
  bool no_epilogue;
  bool gated;  // half of a tile's columns belong to each weight
  bool out_f32;
  int32_t first_tile[kMaxWeights];  // tile column at which each weight starts
  int64_t n[kMaxWeights];
  WorkspaceLayout workspace;
  KPanelLayout layout;
  int32_t send_group;      // row blocks of a raster group (SendOrder)
  int32_t send_box_bytes;  // of a full box
  uint32_t senders;        // CTAs that may send
  void* y_data[kMaxWeights];
  void* sums_data[kMaxWeights];    // or null
  const float* bias[kMaxWeights];  // or null
  Activation activation;
  void* gathered;  // or null
  CUtensorMap x;   // local rows, as the main loop reads them
  CUtensorMap w[kMaxWeights];
  CUtensorMap y[kMaxWeights];     // 16-bit types
  CUtensorMap sums[kMaxWeights];  // 16-bit types
  CUtensorMap send_boxes;         // local rows, as the send warp reads them
  CUtensorMap workspace_maps[2];  // the halves' data as rows of 64 columns
  CUtensorMap gathered_rows;      // `gathered`, to store boxes
  struct {
    int32_t m, n;
  } first[kMostSms];  // order.At(i), the static first tile of cluster i
};
static_assert(sizeof(AllGatherMatmulArgs) <= 4096);  // the limit for kernel arguments

// The signal, on `rank`, of chunk `chunk` of the rows that `src` sends of a row block.
__device__ __forceinline__ Signal* ChunkSignal(const AllGatherMatmulArgs& args,
                                               const CallContext& call, int rank, int src,
                                               int32_t row_block, int32_t chunk) {
  return args.view.At<Signal>(rank, args.workspace.SignalOffset(call.epoch) +
                                        args.layout.SignalOffset(src, row_block, chunk));
}
// Row `row` of a k-panel of a row block, in the workspace of `rank`.
__device__ __forceinline__ char* KPanelRow(const AllGatherMatmulArgs& args, const CallContext& call,
                                           int rank, int32_t row_block, int32_t k_panel,
                                           int32_t row) {
  return args.view.At(rank,
                      args.workspace.DataOffset(call.epoch) +
                          (args.layout.RowOf(row_block, k_panel) + row) * KPanelLayout::kRowBytes);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_
