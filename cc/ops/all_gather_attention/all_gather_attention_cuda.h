// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CUDA_H_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/all_gather_attention/all_gather_attention_config.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`. `arrays` are those of flash_attention's forward pass.
bool LaunchAllGatherAttention(const AllGatherAttentionParams& params,
                              const FlashAttentionArrays& arrays, int32_t senders, int64_t site,
                              const CudaDevice& device, const SymmetricView& view,
                              cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllGatherAttentionKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CUDA_H_
