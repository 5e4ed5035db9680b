// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "core/activation.h"
#include "ops/all_gather_matmul/all_gather_matmul_config.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

// Several weights share one gather: y_i = activation(all_gather(x) @ w_i + bias_i), or, gated, one
// y_0 = activation(all_gather(x) @ w_0 + bias_0) * (all_gather(x) @ w_1 + bias_1).
struct AllGatherMatmulOperands {
  const void* x;
  struct Product {
    const void* w;  // [k, n], or [n, k] if transpose_rhs
    void* y;        // [outer, world * inner, n]
    int64_t n;
    const float* bias;  // [n], or null
    void* sums;         // as y, of what the activation is applied to; or null
  } products[kMaxWeights];
  int32_t weights;
  Activation activation;
  bool gated;
  void* gathered;  // or null
};

// Enqueues the call on `stream`. params.n is the columns of all weights.
bool LaunchAllGatherMatmul(const AllGatherMatmulParams& params,
                           const AllGatherMatmulOperands& operands, const ProductPlan& plan,
                           int64_t site, const CudaDevice& device, const SymmetricView& view,
                           cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllGatherMatmulKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_
