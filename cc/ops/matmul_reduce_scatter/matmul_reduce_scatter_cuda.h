// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "gpu/gemm_config.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/heap_cuda.h"

namespace jflux {

inline ReduceScatterLayout CudaLayoutOf(const MatmulReduceScatterParams& p, const GemmChoice& c) {
  MatmulReduceScatterParams whole_tiles = p;
  whole_tiles.n = RoundUp<int64_t>(p.n, c.tile_n);
  return ReduceScatterLayout::Make(whole_tiles, kGemmTileM, c.tile_n / c.splits,
                                   /*parts=*/kGemmTileM / 64);
}

// The workspace that a call takes.
inline WorkspaceLayout MatmulReduceScatterWorkspace(const MatmulReduceScatterParams& p,
                                                    const GemmChoice& choice) {
  return CudaLayoutOf(p, choice).Workspace();
}

// The sum of several products is scattered once: y = scatter(sum_i x_i @ w_i) + bias + residual.
struct MatmulReduceScatterOperands {
  struct Term {
    const void* x;  // [outer, world * inner, k]
    const void* w;  // [k, n], or [n, k] if transpose_rhs
    int64_t k;
  } products[kMaxWeights];
  int32_t terms;
  void* y;               // [outer, inner, n]
  const float* bias;     // [n], or null
  const void* residual;  // as y, or null
};

// Enqueues the call on `stream`. params.k is that of all terms. With outer > 1, inner must be a
// multiple of kGemmTileM.
bool LaunchMatmulReduceScatter(const MatmulReduceScatterParams& params,
                               const MatmulReduceScatterOperands& operands,
                               const GemmChoice& choice, int64_t site, const CudaDevice& device,
                               const SymmetricView& view, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_
