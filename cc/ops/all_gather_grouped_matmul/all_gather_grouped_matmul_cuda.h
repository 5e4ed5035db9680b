// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CUDA_H_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_config.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchAllGatherGroupedMatmul(const AllGatherGroupedMatmulParams& params,
                                  const AllGatherGroupedMatmulArrays& arrays,
                                  const GemmChoice& choice, int32_t senders, int64_t site,
                                  const CudaDevice& device, const SymmetricView& view,
                                  cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllGatherGroupedMatmulKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CUDA_H_
