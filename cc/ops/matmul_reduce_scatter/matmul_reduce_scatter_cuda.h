// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_config.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

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
                               const MatmulReduceScatterOperands& operands, const ProductPlan& plan,
                               int64_t site, const CudaDevice& device, const SymmetricView& view,
                               cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulReduceScatterKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CUDA_H_
