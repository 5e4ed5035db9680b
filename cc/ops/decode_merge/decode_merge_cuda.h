// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_CUDA_H_
#define JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/decode_merge/decode_merge.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchDecodeMerge(const DecodeMergeParams& params, const DecodeMergeArrays& arrays,
                       int64_t site, const CudaDevice& device, const SymmetricView& view,
                       cudaStream_t stream, std::string* error);

// Loads the kernel on the current device.
bool LoadDecodeMergeKernel(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_CUDA_H_
