// Launches a kernel of all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"

namespace jflux {
bool LoadAllGatherMatmulKernels(std::string* error) {
  return LoadBothLoops(LoadGemmInstances<AllGatherMatmulInstances>, LoadAllGatherMatmulKernels80,
                       error);
}

bool LaunchAllGatherMatmul(const AllGatherMatmulParams& p, const AllGatherMatmulOperands& operands,
                           const ProductPlan& plan, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  if (choice.portable) {
    return LaunchAllGatherMatmul80(p, operands, plan, site, device, view, stream, error);
  }
  AllGatherMatmulArgs args{};
  args.layout = CudaLayoutOf(p);
  args.workspace = CudaWorkspaceOf(p, operands.scales);
  args.state = device.state;
  if (!SetProductArgs(p, operands, choice, device.sm_count, view, &args, error)) return false;
  args.gathered = operands.gathered;
  args.signature = SignatureOf(p.Signature(operands.scales), site, choice);
  args.op = static_cast<uint32_t>(kAllGatherMatmulId);
  const int sms = Min(device.sm_count, kMostSms);
  for (int i = 0; i < Min(args.num_tiles, sms / (choice.cluster_m * choice.splits)); ++i) {
    const Tile tile = args.order.At(i);
    args.first[i] = {tile.m, tile.n};
  }
  // Few rows are one row of tiles, so one raster group anyway.
  const bool few = p.rows.Total() <= kGemmTileM;
  args.send_group = few ? 0 : choice.group_m * choice.cluster_m;
  args.senders = plan.senders;
  const int box_rows_sent =
      static_cast<int>(Min<int64_t>(p.rows.PerRank(), KPanelLayout::kBoxRows));
  args.send_box_bytes = box_rows_sent * kBlockBytes;
  const int block = BlockElements(p.dtype);
  if (!EncodeTensorMap(&args.send_boxes, p.dtype, operands.x, {p.rows.PerRank(), p.k}, {p.k},
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
                         {BoxRows(p.rows.Total()), block}, error)) {
      return false;
    }
  }
  return LaunchGemmInstance<AllGatherMatmulInstances>(
      p.dtype, p.transpose_rhs, choice, &args, args.num_tiles, sms, stream, error, operands.scales,
      operands.quantize != Quantizing::kNone);
}

}  // namespace jflux
