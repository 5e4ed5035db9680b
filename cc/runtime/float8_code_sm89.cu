#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

// Compiled for the architectures that kernels for float8 are compiled for.
__global__ void Float8Kernel() {}

}  // namespace

bool RunsFloat8Code() {
  cudaFuncAttributes attributes{};
  const auto* kernel = reinterpret_cast<const void*>(&Float8Kernel);
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return true;
  cudaGetLastError();  // there is no code for the device
  return false;
}

}  // namespace jflux
