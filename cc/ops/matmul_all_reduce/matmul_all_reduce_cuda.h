// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchMatmulAllReduce(const MatmulAllReduceParams& params, const MatmulAllReduceArrays& arrays,
                           const ProductPlan& plan, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulAllReduceKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_
