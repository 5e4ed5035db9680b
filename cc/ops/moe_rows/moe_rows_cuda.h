// The launcher of the CUDA kernels.
#ifndef JFLUX_OPS_MOE_ROWS_MOE_ROWS_CUDA_H_
#define JFLUX_OPS_MOE_ROWS_MOE_ROWS_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/moe_rows/moe_rows.h"

namespace jflux {

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchMoeRows(const MoeRowsParams& params, const MoeRowsArrays& arrays, cudaStream_t stream,
                   std::string* error);

// Loads the kernels on the current device.
bool LoadMoeRowsKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_ROWS_MOE_ROWS_CUDA_H_
