// The threads of all CTAs of a cluster, as one team that sums and compares.
#ifndef JFLUX_GPU_CLUSTER_TEAM_CUH_
#define JFLUX_GPU_CLUSTER_TEAM_CUH_

#include "core/platform.h"
#include "gpu/cluster.cuh"

namespace jflux {

template <int kCtas>
class ClusterTeam {
 public:
  __device__ __forceinline__ ClusterTeam() : cta_(static_cast<int>(ThisCluster().block_rank())) {}

  __device__ __forceinline__ int thread() const {
    return cta_ * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int threads() const { return kCtas * static_cast<int>(blockDim.x); }

  // Threads that MaxOfLanes is over: those with consecutive numbers, a warp.
  static constexpr int kLanes = 32;

  // Sum over all threads of the team; all call it. The order is fixed, so every thread and every
  // run gets the same bits. Whole warps, at most 32 per CTA.
  template <typename Wide>
  __device__ __forceinline__ Wide Sum(Wide v) const {
    const auto add = [](Wide a, Wide b) { return a + b; };
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    return OfWarps(v, add);
  }
  // The largest of all threads' v.
  __device__ __forceinline__ uint32_t Max(uint32_t v) const {
    return OfWarps(MaxOfLanes(v), [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  }
  __device__ __forceinline__ uint32_t MaxOfLanes(uint32_t v) const {
    return __reduce_max_sync(0xffffffff, v);
  }

 private:
  // Combines what all warps have; a zero is as nothing.
  template <typename T, typename Combine>
  __device__ __forceinline__ T OfWarps(T v, Combine&& combine) const {
    JFLUX_SHARED(T[32], warps);
    JFLUX_SHARED(T[2][kCtas], ctas);
    const auto cluster = ThisCluster();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < kCtas) {
      T of_cta = 0;
      for (unsigned w = 0; w < blockDim.x / 32; ++w) of_cta = combine(of_cta, warps[w]);
      // Double-buffered: a CTA that has not reached this call may still read the other half.
      *cluster.map_shared_rank(&ctas[calls_ & 1][cta_], threadIdx.x) = of_cta;
    }
    cluster.sync();
    T all = 0;
    for (int c = 0; c < kCtas; ++c) all = combine(all, ctas[calls_ & 1][c]);
    ++calls_;
    return all;
  }

  int cta_;
  mutable int calls_ = 0;
};

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_TEAM_CUH_
