// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/matmul_all_to_all/matmul_all_to_all_config.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchMatmulAllToAll(const MatmulAllToAllParams& params, const MatmulAllToAllArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulAllToAllKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_
