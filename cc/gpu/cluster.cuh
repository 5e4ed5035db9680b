// Clusters in kernels that are also compiled for GPUs without them.
//
// JFLUX_HAS_CLUSTERS: code for compute capability 9.0 and later has them. In older code, and in its
// PTX wherever that runs, a Cluster is one CTA, and a kernel must be launched without a cluster:
// LaunchKernel (runtime/kernels_cuda.h) does so.
#ifndef JFLUX_GPU_CLUSTER_CUH_
#define JFLUX_GPU_CLUSTER_CUH_

#include <cooperative_groups.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JFLUX_HAS_CLUSTERS 1
#else
#define JFLUX_HAS_CLUSTERS 0
#endif

namespace jflux {

#if JFLUX_HAS_CLUSTERS
using Cluster = cooperative_groups::cluster_group;
__device__ __forceinline__ Cluster ThisCluster() { return cooperative_groups::this_cluster(); }
#else
// With the members of cooperative_groups::cluster_group that jflux uses.
struct Cluster {
  __device__ __forceinline__ unsigned block_rank() const { return 0; }
  __device__ __forceinline__ unsigned num_blocks() const { return 1; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <typename T>
  __device__ __forceinline__ T* map_shared_rank(T* address, unsigned) const {
    return address;
  }
};
__device__ __forceinline__ Cluster ThisCluster() { return {}; }
#endif

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_CUH_
