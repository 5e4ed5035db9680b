// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_CUDA_H_
#define JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/moe_route/moe_route.h"

namespace jflux {

// Enqueues the call on `stream`, on the current device: false and *error if it cannot. An index
// that is no expert's counts as -1.
bool LaunchMoeRoute(const MoeRouteParams& params, const MoeRouteArrays& arrays, cudaStream_t stream,
                    std::string* error);

// Loads the kernel on the current device.
bool LoadMoeRouteKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_CUDA_H_
