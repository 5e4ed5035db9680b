// What all_gather_matmul's kernel is told, and where it finds what peers send.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_

#include "core/activation.h"
#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_config.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/k_panel_layout.h"

namespace jflux {

// SMs that a GPU of compute capability 9.0 can have, so clusters that begin with a tile.
inline constexpr int kMostSms = 144;

// What each tile needs comes first: lines of constant memory are fetched when they are first read.
struct AllGatherMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  GatherOrder order;  // of cluster tiles
  int64_t k;
  int32_t num_tiles;
  int32_t weights;
  int32_t a_bytes;  // of a box of rows
  uint32_t signature, op;
  // Whether y is the product as it is, row for row: nothing is added, applied or saved.
  bool no_epilogue;
  bool gated;  // a tile is as many columns of both weights
  bool out_f32;
  int32_t first_tile[kMaxWeights];  // tile column
  int64_t n[kMaxWeights];
  WorkspaceLayout workspace;
  KPanelLayout layout;
  int32_t send_group;      // blocks that are sent side by side: SendOrder
  int32_t send_box_bytes;  // of a box, as it is read
  uint32_t senders;        // CTAs that may send
  void* y_data[kMaxWeights];
  void* sums_data[kMaxWeights];    // or null
  const float* bias[kMaxWeights];  // or null
  Activation activation;
  void* gathered;  // or null
  CUtensorMap x;   // own rows, as the main loop reads them
  CUtensorMap w[kMaxWeights];
  CUtensorMap y[kMaxWeights];     // 16-bit types
  CUtensorMap sums[kMaxWeights];  // likewise
  CUtensorMap send_boxes;         // own rows, as they are sent
  CUtensorMap workspace_maps[2];  // rows of 64 columns, in the workspace's halves
  CUtensorMap gathered_rows;      // of `gathered`, to store boxes
  struct {
    int32_t m, n;
  } first[kMostSms];  // order.At of each cluster's number
};
static_assert(sizeof(AllGatherMatmulArgs) <= 4096);  // what every launch can take

// Of a block's rows that `src` sends, chunk `chunk` of k; on `rank`.
__device__ __forceinline__ Signal* ChunkSignal(const AllGatherMatmulArgs& args,
                                               const CallContext& call, int rank, int src,
                                               int32_t block, int32_t chunk) {
  return args.view.At<Signal>(
      rank, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(src, block, chunk));
}
// Row `row` of a block, in a panel of k; in the workspace of `rank`.
__device__ __forceinline__ char* KPanelRow(const AllGatherMatmulArgs& args, const CallContext& call,
                                           int rank, int32_t block, int32_t panel, int32_t row) {
  return args.view.At(rank, args.workspace.DataOffset(call.epoch) +
                                (args.layout.RowOf(block, panel) + row) * KPanelLayout::kRowBytes);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_ARGS_CUH_
