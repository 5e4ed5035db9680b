// The launchers of the CUDA kernels.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CUDA_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CUDA_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

// Why no kernel takes the call; empty if one does. Pure.
std::string WhyNoGroupedMatmulKernel(const GroupedMatmulParams& params);
std::string WhyNoGroupedMatmulDwKernel(const GroupedMatmulDwParams& params);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchGroupedMatmul(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                         cudaStream_t stream, std::string* error);
bool LaunchGroupedMatmulDw(const GroupedMatmulDwParams& params, const GroupedMatmulDwArrays& arrays,
                           cudaStream_t stream, std::string* error);

// Load kernels on the current device: the first function those of both ops, the second those of the
// weight gradient.
bool LoadGroupedMatmulKernels(std::string* error);
bool LoadGroupedMatmulDwKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CUDA_H_
