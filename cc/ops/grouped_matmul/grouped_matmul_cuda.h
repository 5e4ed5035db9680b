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

// Device memory that a call needs beside its arrays; its contents are undefined when it begins.
int64_t GroupedMatmulScratchBytes(const GroupedMatmulParams& params);
int64_t GroupedMatmulDwScratchBytes(const GroupedMatmulDwParams& params);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot. `scratch` is
// null if no bytes are needed.
bool LaunchGroupedMatmul(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                         void* scratch, cudaStream_t stream, std::string* error);
bool LaunchGroupedMatmulDw(const GroupedMatmulDwParams& params, const GroupedMatmulDwArrays& arrays,
                           void* scratch, cudaStream_t stream, std::string* error);

// Loads the kernels of both on the current device.
bool LoadGroupedMatmulKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CUDA_H_
