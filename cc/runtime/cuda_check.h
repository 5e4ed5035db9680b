// CUDA errors as values.
#ifndef JFLUX_RUNTIME_CUDA_CHECK_H_
#define JFLUX_RUNTIME_CUDA_CHECK_H_

#include <cuda_runtime.h>

#include <string>

namespace jflux {

inline std::string CudaReason(const char* what, cudaError_t error) {
  return std::string(what) + ": " + cudaGetErrorString(error);
}

}  // namespace jflux

// Returns a false (or null) value from the caller, with the reason in *error.
#define JFLUX_CUDA_OR_FALSE(call, error)                   \
  do {                                                     \
    const cudaError_t jflux_status = (call);               \
    if (jflux_status != cudaSuccess) {                     \
      *(error) = ::jflux::CudaReason(#call, jflux_status); \
      return {};                                           \
    }                                                      \
  } while (false)

#endif  // JFLUX_RUNTIME_CUDA_CHECK_H_
