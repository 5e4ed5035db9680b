// Clusters in kernels that are also compiled for GPUs without them.
//
// JFLUX_HAS_CLUSTERS: code for compute capability 9.0 and later has them. In older code, and in its
// PTX wherever that runs, a Cluster is one CTA, and a kernel must be launched without a cluster:
// LaunchKernel (runtime/kernels_cuda.h) does so.
//
// Its members are CUDA's built-in functions, as cooperative_groups::cluster_group calls them: that
// header takes the compiler's passes over a file longer than all of jflux's headers.
#ifndef JFLUX_GPU_CLUSTER_CUH_
#define JFLUX_GPU_CLUSTER_CUH_

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JFLUX_HAS_CLUSTERS 1
#else
#define JFLUX_HAS_CLUSTERS 0
#endif

namespace jflux {

struct Cluster {
#if JFLUX_HAS_CLUSTERS
  __device__ __forceinline__ unsigned block_rank() const { return __clusterRelativeBlockRank(); }
  __device__ __forceinline__ unsigned num_blocks() const { return __clusterSizeInBlocks(); }
  __device__ __forceinline__ void sync() const {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }
  template <typename T>
  __device__ __forceinline__ T* map_shared_rank(T* address, unsigned rank) const {
    return static_cast<T*>(__cluster_map_shared_rank(address, rank));
  }
#else
  __device__ __forceinline__ unsigned block_rank() const { return 0; }
  __device__ __forceinline__ unsigned num_blocks() const { return 1; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <typename T>
  __device__ __forceinline__ T* map_shared_rank(T* address, unsigned) const {
    return address;
  }
#endif
};
__device__ __forceinline__ Cluster ThisCluster() { return {}; }

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_CUH_
