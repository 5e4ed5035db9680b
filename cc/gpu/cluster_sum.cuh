// Split-k sum over a cluster (kClusterK): CTA i receives the i-th slice of the tile's columns, in
// the type of sums, and finishes it.
//
//   writes  Each thread stores its accumulators of the other CTAs' slices from registers into their
//           shared memory (st.async), one m64 block at a time.
//   waits   The same thread of the same consumer in each other CTA, for RemoteSlicesArrived. A
//           sender waits for RemoteSlicesRead before it overwrites the slices of the previous m64
//           block.
//   order   st.async completes transaction bytes on the reader's mbarrier.
//   reset   never: mbarrier phases alternate
//
// No deadlock: the same consumer of every CTA computes the same tile, and sends its slices once it
// has multiplied and finished its earlier tiles.
#ifndef JFLUX_GPU_CLUSTER_SUM_CUH_
#define JFLUX_GPU_CLUSTER_SUM_CUH_

#include <cstdint>

#include "gpu/gemm_multiply_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// A thread's accumulators of the slices that its CTA finishes, as epilogues take them.
template <typename Config>
using Slices = float[Config::kConsumerM64Blocks][Config::kSliceAccumulators];

template <typename Config>
struct ClusterSum {
  using Sum = typename Config::Sum;
  static constexpr int kCtas = Config::kClusterK;
  static constexpr int kVectors = Config::kSliceAccumulators / 4;  // of 16 bytes
  GemmSmem<Config> smem;
  int consumer, cta;
  uint32_t parity = 0;

  // Sums one m64 block. The order of the terms depends on the slice alone.
  __device__ __forceinline__ void Run(const Sum (&acc)[Config::kAccumulators],
                                      float (&slice)[Config::kSliceAccumulators]) {
    if constexpr (Config::kWhole) {
      Sum sum[Config::kSliceAccumulators];
      RunOf(acc, sum);
      ToFloats(sum, slice);
    } else {
      RunOf(acc, slice);
    }
  }

  // After the last tile: a CTA must not exit while another may still arrive at its barriers.
  __device__ __forceinline__ void AwaitRemoteReads() const {
    if constexpr (kCtas > 1) ptx::MbarrierWait(smem.RemoteSlicesRead(consumer), parity ^ 1);
  }

 private:
  __device__ __forceinline__ void RunOf(const Sum (&acc)[Config::kAccumulators],
                                        Sum (&sum)[Config::kSliceAccumulators]) {
    const int thread = threadIdx.x % 128;
    if (thread == 0) {
      ptx::MbarrierArriveExpectTx(smem.RemoteSlicesArrived(consumer), Config::kRemoteSliceBytes);
    }
    ptx::MbarrierWait(smem.RemoteSlicesRead(consumer), parity ^ 1);
#pragma unroll
    for (int i = 0; i < kCtas; ++i) {
      const Sum* slice = &acc[i * Config::kSliceAccumulators];
      if (i == cta) {
#pragma unroll
        for (int j = 0; j < Config::kSliceAccumulators; ++j) sum[j] = slice[j];
        continue;
      }
      const uint32_t bar = ptx::MapToCta(smem.RemoteSlicesArrived(consumer), i);
      const uint32_t to =
          ptx::MapToCta(smem.RemoteSlice(consumer, SliceIndex(cta, i)), i) + thread * 16;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const Sum* v = slice + 4 * vector;
        ptx::SendRemote(to + vector * 2048,
                        make_int4(Bits(v[0]), Bits(v[1]), Bits(v[2]), Bits(v[3])), bar);
      }
    }
    ptx::MbarrierWait(smem.RemoteSlicesArrived(consumer), parity);
#pragma unroll
    for (int index = 0; index < kCtas - 1; ++index) {
      const uint32_t from = smem.RemoteSlice(consumer, index) + thread * 16;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const uint4 v = ptx::LoadShared16(from + vector * 2048);
        Add(sum[4 * vector], v.x);
        Add(sum[4 * vector + 1], v.y);
        Add(sum[4 * vector + 2], v.z);
        Add(sum[4 * vector + 3], v.w);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 < kCtas) {
      ptx::MbarrierArriveRemote(ptx::MapToCta(smem.RemoteSlicesRead(consumer), threadIdx.x % 32));
    }
    parity ^= 1;
  }
  static __device__ __forceinline__ int Bits(float v) { return __float_as_int(v); }
  static __device__ __forceinline__ int Bits(int32_t v) { return v; }
  static __device__ __forceinline__ void Add(float& sum, uint32_t bits) {
    sum += __uint_as_float(bits);
  }
  static __device__ __forceinline__ void Add(int32_t& sum, uint32_t bits) {
    sum += static_cast<int32_t>(bits);
  }
  // The index among CTA `to`'s remote slices of the one from CTA `from`.
  static __device__ __forceinline__ int SliceIndex(int from, int to) {
    return from < to ? from : from - 1;
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_SUM_CUH_
