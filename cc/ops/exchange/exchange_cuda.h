// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_CUDA_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "ops/exchange/exchange.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Enqueues the call on `stream`.
bool LaunchExchange(const ExchangeParams& params, const ExchangeArrays& arrays, int64_t site,
                    const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                    std::string* error);

// Loads the kernels on the current device.
bool LoadExchangeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_CUDA_H_
