// The threads of a CTA, of which there are whole warps.
#ifndef JFLUX_GPU_BLOCK_TEAM_CUH_
#define JFLUX_GPU_BLOCK_TEAM_CUH_

namespace jflux {

struct BlockTeam {
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int threads() const { return static_cast<int>(blockDim.x); }

  // In an order that depends on nothing: the same bits in each run.
  template <typename Wide>
  __device__ __forceinline__ Wide Sum(Wide v) const {
    __shared__ Wide warps[32];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    __syncthreads();  // all have read the last sum's
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : Wide{0};
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    return v;
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_BLOCK_TEAM_CUH_
