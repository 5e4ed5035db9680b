// Staging: shared memory through which the consumers of the GEMM main loop (gpu/gemm_sm90.cuh) pass
// results to the store warp, one m64 block at a time.
//
//   writes  a consumer (StagingWriter)
//   waits   the store warp (StagingReader) for Staged; the consumer for Stored before it writes
//           again
//   order   mbarriers, and a proxy fence: bulk copies read the staging
//   reset   never: mbarrier phases alternate
//
// Each consumer has staging for one m64 block. With a lent stage (GemmConfig::kLendsStage) it has
// staging for 64 columns, and uses parts of the tile's last stage for the rest, once both consumers
// have read that stage. The store warp returns the stage when it has read the results in it.
#ifndef JFLUX_GPU_STAGING_CUH_
#define JFLUX_GPU_STAGING_CUH_

#include <cstdint>

#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// The tile's last stage; `next` is the stage after it.
template <typename Config>
__device__ __forceinline__ int LastStage(const Ring<Config::kStages>& next) {
  return (next.index + Config::kStages - 1) % Config::kStages;
}

// Addresses of a staged m64 block: the first strip, the second, and the rest.
struct StagedM64 {
  uint32_t first, second, rest;
  __device__ uint32_t Strip(int i) const {
    return i == 0 ? first : i == 1 ? second : rest + (i - 2) * kStripBytes;
  }
};
// The staging of `consumer` in a tile whose last stage is `last_stage`.
template <typename Config>
__device__ __forceinline__ StagedM64 StagedM64Of(const GemmSmem<Config>& smem, int consumer,
                                                 int last_stage) {
  const uint32_t base = smem.Staging(consumer);
  if constexpr (Config::kLendsStage) {
    return StagedM64{base, smem.A(last_stage) + consumer * kStripBytes,
                     smem.B(last_stage) + consumer * (Config::kBBytes / Config::kConsumers)};
  } else {
    return StagedM64{base, base + kStripBytes, base + 2 * kStripBytes};
  }
}

// The address of a staged m64 block whose strips are contiguous.
template <typename Config>
__device__ __forceinline__ uint32_t ContiguousStaging(const StagedM64& staged) {
  static_assert(!Config::kLendsStage);
  return staged.first;
}

// A consumer's side. All its threads call Acquire and Publish. M64At(i): the consumer's i-th m64
// block of a tile.
template <typename Config>
struct StagingWriter {
  GemmSmem<Config> smem;
  int consumer;
  uint32_t parity = 0;
  // With a lent stage: the tile's last stage, and whether results were published in it.
  int last_stage = 0;
  bool published = false;

  __device__ int M64At(int i) const { return Config::kCooperative ? consumer : i; }
  __device__ void Enter(int last) {
    last_stage = last;
    published = false;
  }
  __device__ StagedM64 Acquire() {
    ptx::MbarrierWait(smem.Stored(consumer), parity ^ 1);
    return StagedM64Of<Config>(smem, consumer, last_stage);
  }
  __device__ void Publish() {
    ptx::FenceProxyAsyncShared();  // bulk copies will read it
    ptx::MbarrierArrive(smem.Staged(consumer));
    parity ^= 1;
    published = true;
  }
};

// The store warp's side, for a single lane.
template <typename Config>
struct StagingReader {
  GemmSmem<Config> smem;
  int tile_consumer = 0;  // the consumer of the current tile, unless they share tiles
  uint32_t parities = 0;  // one bit per consumer
  Ring<Config::kStages> stages;
  // One bit per consumer: it has published results of this tile; its results have not been read
  // yet.
  uint32_t published = 0, unread = 0;

  __device__ void Enter(int k_blocks) {
    if constexpr (Config::kLendsStage) stages.Skip(k_blocks);
  }
  __device__ StagedM64 Acquire(int m64) {
    const int consumer = ConsumerOf(m64);
    if (unread >> consumer & 1) AwaitRead();
    ptx::MbarrierWait(smem.Staged(consumer), parities >> consumer & 1);
    parities ^= 1u << consumer;
    published |= 1u << consumer;
    return StagedM64Of<Config>(smem, consumer, LastStage<Config>(stages));
  }
  // Called after the copies out of the staging have been issued and committed.
  __device__ void Release(int m64) {
    unread |= 1u << ConsumerOf(m64);
    if constexpr (!Config::kLendsStage) AwaitRead();
  }
  // Called after the tile. Returns a lent stage.
  __device__ void Leave() {
    if constexpr (Config::kLendsStage) {
      AwaitRead();
      const uint32_t empty = smem.Empty(LastStage<Config>(stages));
      for (int cta = 0; published != 0 && cta < Config::kClusterM; ++cta) {
        ptx::MbarrierArriveRemote(ptx::MapToCta(empty, cta), __popc(published));
      }
      published = 0;
    }
    tile_consumer ^= 1;
  }

 private:
  __device__ int ConsumerOf(int m64) const { return Config::kCooperative ? m64 : tile_consumer; }
  __device__ void AwaitRead() {
    ptx::BulkWaitRead<0>();
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      if (unread >> consumer & 1) ptx::MbarrierArrive(smem.Stored(consumer));
    }
    unread = 0;
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_STAGING_CUH_
