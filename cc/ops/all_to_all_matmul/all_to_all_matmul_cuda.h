// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CUDA_H_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/all_to_all_matmul/all_to_all_matmul_config.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchAllToAllMatmul(const AllToAllMatmulParams& params, const AllToAllMatmulArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllToAllMatmulKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CUDA_H_
