// The sum over a cluster whose CTAs have multiplied a part of k each (kClusterK): CTA i gets the
// i-th slice of the tile's columns, in float32, and finishes it.
//
// Each thread sends the others what they finish of its accumulators, from its registers to their
// shared memory, where the same thread of the same consumer adds it to its own. A block of 64 rows
// at a time: what is sent next waits until the others have read.
//
// Who waits for whom: a consumer for the same consumer of the other CTAs, which computes the same
// tile, and has sent its slices as soon as it has multiplied, and finished the tiles before.
#ifndef JFLUX_GPU_CLUSTER_SUM_CUH_
#define JFLUX_GPU_CLUSTER_SUM_CUH_

#include <cstdint>

#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// What a thread finishes of a tile.
template <typename Config>
using Slices = float[Config::kOwnBlocks][Config::kSliceAccumulators];

template <typename Config>
struct ClusterSum {
  static constexpr int kCtas = Config::kClusterK;
  static constexpr int kUnits = Config::kSliceAccumulators / 4;  // of 16 bytes
  GemmSmem<Config> smem;
  int consumer, cta;
  uint32_t parity = 0;

  // A block. The order of the terms depends on nothing but the slice.
  __device__ __forceinline__ void Run(const float (&acc)[Config::kAccumulators],
                                      float (&own)[Config::kSliceAccumulators]) {
    const int thread = threadIdx.x % 128;
    if (thread == 0) {
      ptx::MbarrierArriveExpectTx(smem.OthersCame(consumer), Config::kOthersBytes);
    }
    ptx::MbarrierWait(smem.OthersRead(consumer), parity ^ 1);
#pragma unroll
    for (int i = 0; i < kCtas; ++i) {
      const float* slice = &acc[i * Config::kSliceAccumulators];
      if (i == cta) {
#pragma unroll
        for (int j = 0; j < Config::kSliceAccumulators; ++j) own[j] = slice[j];
        continue;
      }
      const uint32_t bar = ptx::MapToCta(smem.OthersCame(consumer), i);
      const uint32_t to = ptx::MapToCta(smem.Other(consumer, PlaceOf(cta, i)), i) + thread * 16;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const float* v = slice + 4 * unit;
        ptx::SendRemote(to + unit * 2048,
                        make_int4(__float_as_int(v[0]), __float_as_int(v[1]), __float_as_int(v[2]),
                                  __float_as_int(v[3])),
                        bar);
      }
    }
    ptx::MbarrierWait(smem.OthersCame(consumer), parity);
#pragma unroll
    for (int place = 0; place < kCtas - 1; ++place) {
      const uint32_t from = smem.Other(consumer, place) + thread * 16;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const uint4 v = ptx::LoadShared16(from + unit * 2048);
        own[4 * unit] += __uint_as_float(v.x);
        own[4 * unit + 1] += __uint_as_float(v.y);
        own[4 * unit + 2] += __uint_as_float(v.z);
        own[4 * unit + 3] += __uint_as_float(v.w);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 < kCtas) {
      ptx::MbarrierArriveRemote(ptx::MapToCta(smem.OthersRead(consumer), threadIdx.x % 32));
    }
    parity ^= 1;
  }

  // In the end: no CTA may leave while another may still arrive at its barriers.
  __device__ __forceinline__ void AwaitReaders() const {
    if constexpr (kCtas > 1) ptx::MbarrierWait(smem.OthersRead(consumer), parity ^ 1);
  }

 private:
  // Where CTA `to` keeps what `from` sends.
  static __device__ __forceinline__ int PlaceOf(int from, int to) {
    return from < to ? from : from - 1;
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_CLUSTER_SUM_CUH_
