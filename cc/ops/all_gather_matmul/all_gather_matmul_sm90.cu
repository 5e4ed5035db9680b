// Launches a kernel of all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"

namespace jflux {
bool LoadAllGatherMatmulKernels(std::string* error) {
  return LoadGemmInstances<AllGatherMatmulInstances>(error);
}

bool LaunchAllGatherMatmul(const AllGatherMatmulParams& p, const AllGatherMatmulOperands& operands,
                           const ProductPlan& plan, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  AllGatherMatmulArgs args{};
  args.layout = CudaLayoutOf(p);
  args.workspace = args.layout.Workspace();
  args.state = device.state;
  args.view = view;
  args.rows = p.rows;
  TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  grid.tiles_n = 0;
  args.weights = operands.weights;
  args.activation = operands.activation;
  args.gated = operands.gated;
  for (int i = 0; i < operands.weights; ++i) {
    args.y_data[i] = operands.products[i].y;
    args.sums_data[i] = operands.products[i].sums;
    args.bias[i] = operands.products[i].bias;
    args.w_scale[i] = operands.products[i].scale;
    args.n[i] = operands.products[i].n;
    args.first_tile[i] = grid.tiles_n;
    grid.tiles_n += static_cast<int32_t>(CeilDiv<int64_t>(args.n[i], choice.tile_n));
  }
  if (args.gated) {
    grid.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(args.n[0], choice.tile_n / 2));
  }
  args.gathered = operands.gathered;
  args.k = p.k;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kAllGatherMatmulId);
  args.order = GatherOrder::Make(grid, view.rank, view.world, p.rows.PerRank(),
                                 kGemmTileM * choice.cluster_m);
  args.num_tiles = grid.tiles_m * grid.tiles_n;
  const int sms = Min(device.sm_count, kMostSms);
  for (int i = 0; i < Min(args.num_tiles, sms / (choice.cluster_m * choice.splits)); ++i) {
    const Tile tile = args.order.At(i);
    args.first[i] = {tile.m, tile.n};
  }
  // Few rows are one row of tiles, so one raster group anyway.
  const bool few = p.rows.Total() <= kGemmTileM;
  args.send_group = few ? 0 : choice.group_m * choice.cluster_m;
  args.senders = plan.senders;
  args.out_f32 = p.out_dtype == DType::kF32;
  args.x_scale = operands.x_scale;
  args.no_epilogue =
      !args.out_f32 && args.rows.outer == 1 && !args.gated && args.activation == Activation::kNone;
  for (int i = 0; i < args.weights; ++i) {
    args.no_epilogue &= args.bias[i] == nullptr && args.sums_data[i] == nullptr;
  }
  const int box_rows = BoxRows(p.rows.Total());
  args.a_bytes = box_rows * kBlockBytes;
  const int box_rows_sent =
      static_cast<int>(Min<int64_t>(p.rows.PerRank(), KPanelLayout::kBoxRows));
  args.send_box_bytes = box_rows_sent * kBlockBytes;
  const int block = BlockElements(p.dtype);
  if (!EncodeTensorMap(&args.x, p.dtype, operands.x, {p.rows.PerRank(), p.k}, {p.k},
                       {box_rows, block}, error) ||
      !EncodeTensorMap(&args.send_boxes, p.dtype, operands.x, {p.rows.PerRank(), p.k}, {p.k},
                       {box_rows_sent, block}, error, Boxes::kLinear) ||
      (operands.gathered != nullptr &&
       !EncodeTensorMap(&args.gathered_rows, p.dtype, operands.gathered, {p.rows.Total(), p.k},
                        {p.k}, {KPanelLayout::kBoxRows, block}, error, Boxes::kLinear))) {
    return false;
  }
  for (int half = 0; half < 2; ++half) {
    if (!EncodeTensorMap(&args.workspace_maps[half], p.dtype,
                         view.At(view.rank, args.workspace.DataOffset(half)),
                         {args.layout.RowOf(args.layout.row_blocks, 0), block}, {block},
                         {box_rows, block}, error)) {
      return false;
    }
  }
  for (int i = 0; i < args.weights; ++i) {
    const int64_t n = args.n[i];
    const auto encode_result = [&](CUtensorMap* map, void* data) {
      if (args.out_f32 || data == nullptr) return true;
      return EncodeTensorMap(map, p.out_dtype, data, {p.rows.Total(), n}, {n},
                             {64, StoreColumns(choice)}, error);
    };
    if (!encode_result(&args.y[i], args.y_data[i]) ||
        !encode_result(&args.sums[i], args.sums_data[i]) ||
        !EncodeRhsMap(&args.w[i], p.dtype, operands.products[i].w, p.k, n, p.transpose_rhs,
                      args.gated, choice, error)) {
      return false;
    }
  }
  return LaunchGemmInstance<AllGatherMatmulInstances>(
      p.dtype, p.transpose_rhs, choice, &args, args.num_tiles, sms, stream, error, operands.scales);
}

}  // namespace jflux
