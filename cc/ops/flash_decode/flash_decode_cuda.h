// The launcher of the CUDA kernels.
#ifndef JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUDA_H_
#define JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "gpu/device_state.h"
#include "ops/flash_decode/flash_decode.h"

namespace jflux {

// Enqueues the call on `stream`, on the current device: false and *error if it cannot. `state` is
// the device's, for its fault record; null without a heap.
bool LaunchFlashDecode(const FlashDecodeParams& params, const FlashDecodeArrays& arrays,
                       DeviceState* state, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadFlashDecodeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUDA_H_
