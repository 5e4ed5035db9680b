// Builds the kernel arguments, here and for matmul_all_reduce.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_ARGS_CUDA_H_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_ARGS_CUDA_H_

#include <string>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_cuda.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {

// Fills all fields except `signature`, `op` and `senders`.
inline bool MakeScatterArgs(const MatmulReduceScatterParams& p,
                            const MatmulReduceScatterOperands& operands, const GemmChoice& choice,
                            const CudaDevice& device, const SymmetricView& view,
                            MatmulReduceScatterArgs* args, std::string* error) {
  args->layout = CudaLayoutOf(p, choice);
  args->workspace = args->layout.Workspace();
  args->state = device.state;
  args->view = view;
  args->rows = p.rows;
  const TileGrid grid = GridOf(choice, p.rows.Total(), p.n, device.sm_count);
  args->order = ScatterOrder::Make(grid, view.rank, view.world, p.rows.PerRank(),
                                   kGemmTileM * choice.cluster_m);
  args->y_data = operands.y;
  args->bias = operands.bias;
  args->residual = operands.residual;
  args->terms = operands.terms;
  args->n = p.n;
  args->num_tiles = grid.tiles_m * grid.tiles_n;
  args->out_f32 = p.out_dtype == DType::kF32;
  const Rows& r = p.rows;
  // Actual row = (o * world + rank) * inner + i. With outer == 1 the rows form one range.
  const bool flat = r.outer == 1;
  const int64_t inner = flat ? r.Total() : r.inner, world = flat ? 1 : r.world;
  if (!args->out_f32 && !EncodeTensorMap(&args->y, p.dtype, operands.y, {r.PerRank(), p.n}, {p.n},
                                         {64, StoreColumns(choice)}, error)) {
    return false;
  }
  const int box_rows = BoxRows(p.rows.Total());
  args->a_bytes = box_rows * 64 * SizeOf(p.dtype);
  for (int i = 0; i < args->terms; ++i) {
    const auto& [x, w, k] = operands.products[i];
    args->k[i] = k;
    if (!EncodeTensorMap(&args->x[i], p.dtype, x, {world, r.outer, inner, k},
                         {r.inner * k, r.world * r.inner * k, k}, {1, 1, box_rows, 64}, error) ||
        !EncodeRhsMap(&args->w[i], p.dtype, w, k, p.n, p.transpose_rhs,
                      /*halves=*/false, choice, error)) {
      return false;
    }
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_ARGS_CUDA_H_
