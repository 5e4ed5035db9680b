// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_CUDA_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/all_reduce/all_reduce.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchAllReduce(const AllReduceParams& params, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error);

// Loads the kernels on the current device.
bool LoadAllReduceKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_CUDA_H_
