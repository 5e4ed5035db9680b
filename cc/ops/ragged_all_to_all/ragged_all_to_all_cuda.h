// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_CUDA_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchRaggedAllToAll(const RaggedParams& params, const RaggedArrays& arrays, int64_t site,
                          const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                          std::string* error);

// Loads the kernels on the current device.
bool LoadRaggedAllToAllKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_CUDA_H_
