// Launches a portable kernel of all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

bool LoadAllGatherMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<AllGatherMatmulKernels80>(error);
}

bool LaunchAllGatherMatmul80(const AllGatherMatmulParams& p,
                             const AllGatherMatmulOperands& operands, const ProductPlan& plan,
                             int64_t site, const CudaDevice& device, const SymmetricView& view,
                             cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  AllGatherMatmulArgs80 args{};
  args.state = device.state;
  args.view = view;
  args.rows = p.rows;
  args.k = p.k;
  args.layout = CudaLayoutOf(p);
  args.workspace = CudaWorkspaceOf(p, operands.scales);
  args.weights = operands.weights;
  args.gated = operands.gated;
  args.out_f32 = p.out_dtype == DType::kF32;
  args.activation = operands.activation;
  args.x = operands.x;
  args.gathered = operands.gathered;
  TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  grid.tiles_n = 0;
  for (int i = 0; i < args.weights; ++i) {
    const auto& product = operands.products[i];
    args.w[i] = product.w;
    args.y[i] = product.y;
    args.sums[i] = product.sums;
    args.bias[i] = product.bias;
    args.n[i] = product.n;
    args.first_tile[i] = grid.tiles_n;
    grid.tiles_n += static_cast<int32_t>(CeilDiv<int64_t>(product.n, choice.tile_n));
  }
  if (args.gated) {  // half of a tile's columns belong to each weight
    grid.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(args.n[0], choice.tile_n / 2));
  }
  args.order = GatherOrder::Make(grid, view.rank, view.world, p.rows.PerRank(), kGemmTileM);
  args.num_tiles = grid.tiles_m * grid.tiles_n;
  args.send_group = p.rows.Total() <= kGemmTileM ? 0 : choice.group_m;
  args.senders = plan.senders;
  args.signature = SignatureOf(p.Signature(operands.scales), site, choice);
  args.op = static_cast<uint32_t>(kAllGatherMatmulId);
  return LaunchGemmInstance80<AllGatherMatmulKernels80>(p.dtype, p.transpose_rhs, &args,
                                                        device.sm_count, stream, error);
}

}  // namespace jflux
