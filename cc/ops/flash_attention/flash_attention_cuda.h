// The launchers of the CUDA kernels.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUDA_H_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/flash_attention/flash_attention.h"

namespace jflux {

// Enqueue a call on `stream`, on the current device: false and *error if they cannot.
bool LaunchFlashAttention(const FlashAttentionParams& params, const FlashAttentionArrays& arrays,
                          cudaStream_t stream, std::string* error);
bool LaunchFlashAttentionBackward(const FlashAttentionParams& params,
                                  const FlashAttentionArrays& arrays, cudaStream_t stream,
                                  std::string* error);

// Load the kernels of each on the current device.
bool LoadFlashAttention(std::string* error);
bool LoadFlashAttentionBackward(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUDA_H_
