// Prefix sums over a warp.
#ifndef JFLUX_GPU_WARP_SCAN_CUH_
#define JFLUX_GPU_WARP_SCAN_CUH_

#include <cuda_runtime.h>

namespace jflux {

// The sum of `value` over this lane and the lanes before it. Called by a full warp.
template <typename T>
__device__ __forceinline__ T WarpInclusiveSum(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffff, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

}  // namespace jflux

#endif  // JFLUX_GPU_WARP_SCAN_CUH_
