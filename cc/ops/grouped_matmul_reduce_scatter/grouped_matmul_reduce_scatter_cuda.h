// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CUDA_H_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_config.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchGroupedMatmulReduceScatter(const GroupedMatmulReduceScatterParams& params,
                                      const GroupedMatmulReduceScatterArrays& arrays,
                                      const GemmChoice& choice, int64_t site,
                                      const CudaDevice& device, const SymmetricView& view,
                                      cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadGroupedMatmulReduceScatterKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CUDA_H_
