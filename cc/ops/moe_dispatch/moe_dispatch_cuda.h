// The launchers of the CUDA kernels.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_CUDA_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/moe_dispatch/moe_dispatch.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueue a call on `stream`.
bool LaunchMoeDispatch(const MoeDispatchParams& params, const MoeDispatchArrays& arrays,
                       int64_t site, const CudaDevice& device, const SymmetricView& view,
                       cudaStream_t stream, std::string* error);
bool LaunchMoeCombine(const MoeCombineParams& params, const MoeCombineArrays& arrays, int64_t site,
                      const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                      std::string* error);

// Loads the kernels of both on the current device.
bool LoadMoeDispatchKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_CUDA_H_
