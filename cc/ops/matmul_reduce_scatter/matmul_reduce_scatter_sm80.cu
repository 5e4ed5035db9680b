// Launches a portable kernel of matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

JFLUX_FLOAT8_APART(MatmulReduceScatterKernels80);

bool LoadMatmulReduceScatterKernels80(std::string* error) {
  return LoadGemmInstances80<MatmulReduceScatterKernels80, kScaledProduct80>(error);
}

bool LaunchMatmulReduceScatter80(const MatmulReduceScatterParams& p,
                                 const MatmulReduceScatterOperands& operands,
                                 const ProductPlan& plan, int64_t site, const CudaDevice& device,
                                 const SymmetricView& view, cudaStream_t stream,
                                 std::string* error) {
  const GemmChoice& choice = plan.choice;
  MatmulReduceScatterArgs80 args{};
  args.state = device.state;
  args.view = view;
  args.rows = p.rows;
  args.layout = CudaLayoutOf(p, choice);
  args.workspace = args.layout.Workspace();
  const TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  args.order = ScatterOrder::Make(grid, view.rank, view.world, p.rows.PerRank(), kGemmTileM);
  args.num_tiles = grid.tiles_m * grid.tiles_n;
  args.terms = operands.terms;
  for (int i = 0; i < args.terms; ++i) {
    args.x[i] = operands.products[i].x;
    args.w[i] = operands.products[i].w;
    args.k[i] = operands.products[i].k;
  }
  args.n = p.n;
  args.out_f32 = p.out_dtype == DType::kF32;
  args.out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args.x_scale = operands.x_scale;
  args.w_scale = operands.w_scale;
  args.bias = operands.bias;
  args.residual = operands.residual;
  args.y = operands.y;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulReduceScatterId);
  return LaunchGemmInstance80<MatmulReduceScatterKernels80, kScaledProduct80>(
      p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error);
}

}  // namespace jflux
