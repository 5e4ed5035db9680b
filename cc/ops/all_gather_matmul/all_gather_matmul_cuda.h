// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "gpu/gemm_config.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// What one signal announces: GemmConfig::kChunkBytes.
inline constexpr int64_t kCudaChunkBytes = 16384;

// The channel that a call takes on GPUs with `sm_count` multiprocessors.
inline ChannelLayout AllGatherMatmulChannel(const AllGatherMatmulParams& p, int) {
  return AllGatherLayout::Make(p, kCudaChunkBytes).Channel();
}

// Enqueues the call on `stream`.
bool LaunchAllGatherMatmul(const AllGatherMatmulParams& params, const AllGatherMatmulArrays& arrays,
                           const GemmChoice& choice, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CUDA_H_
