// The threads of all CTAs of a cluster, as one team that sums.
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

  // Sum over all threads of the team; all call it. The order is fixed, so every thread and every
  // run gets the same bits. Whole warps, at most 32 per CTA.
  template <typename Wide>
  __device__ __forceinline__ Wide Sum(Wide v) const {
    JFLUX_SHARED(Wide[32], warps);
    JFLUX_SHARED(Wide[2][kCtas], ctas);
    const auto cluster = ThisCluster();
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < kCtas) {
      Wide sum = 0;
      for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += warps[w];
      // Double-buffered: a CTA that has not reached this sum may still read the other half.
      *cluster.map_shared_rank(&ctas[sums_ & 1][cta_], threadIdx.x) = sum;
    }
    cluster.sync();
    Wide sum = 0;
    for (int c = 0; c < kCtas; ++c) sum += ctas[sums_ & 1][c];
    ++sums_;
    return sum;
  }

 private:
  int cta_;
  mutable int sums_ = 0;
};

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_TEAM_CUH_
