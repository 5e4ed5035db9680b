// Results on their way out: from the consumers of the GEMM main loop (gpu/gemm_sm90.cuh) to its
// storer, a block of 64 rows at a time, in shared memory.
//
// Each consumer has a place for a block of its own. Or (GemmConfig::kLends) it has one for 64
// columns, and the tile lends it parts of its last stage for the rest, once both consumers have
// read that. The storer gives the stage back when what was published there has been read.
#ifndef JFLUX_GPU_STAGING_CUH_
#define JFLUX_GPU_STAGING_CUH_

#include <cstdint>

#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// A tile's last stage, `next` being the one after it.
template <typename Config>
__device__ __forceinline__ int LastStage(const Ring<Config::kStages>& next) {
  return (next.index + Config::kStages - 1) % Config::kStages;
}

// Where a block is staged: its first strip, the next, and the rest.
struct StagedBlock {
  uint32_t first, second, rest;
  __device__ uint32_t Strip(int i) const {
    return i == 0 ? first : i == 1 ? second : rest + (i - 2) * kStripBytes;
  }
};
// Of a consumer's block of a tile whose last stage this is.
template <typename Config>
__device__ __forceinline__ StagedBlock StagedBlockOf(const GemmSmem<Config>& smem, int consumer,
                                                     int last_stage) {
  const uint32_t own = smem.Staging(consumer);
  if constexpr (Config::kLends) {
    return StagedBlock{own, smem.A(last_stage) + consumer * kStripBytes,
                       smem.B(last_stage) + consumer * (Config::kBBytes / Config::kConsumers)};
  } else {
    return StagedBlock{own, own + kStripBytes, own + 2 * kStripBytes};
  }
}

// Where it is whole.
template <typename Config>
__device__ __forceinline__ uint32_t Whole(const StagedBlock& block) {
  static_assert(!Config::kLends);
  return block.first;
}

// A consumer's side of its staging. Acquire and Publish are called by all its threads. (BlockAt:
// its i-th block of a tile.)
template <typename Config>
struct StagingWriter {
  GemmSmem<Config> smem;
  int consumer;
  uint32_t parity = 0;
  // Where tiles lend stages: this tile's last, and whether anything has been published in it.
  int last_stage = 0;
  bool published = false;

  __device__ int BlockAt(int i) const { return Config::kCooperative ? consumer : i; }
  __device__ void Enter(int last) {
    last_stage = last;
    published = false;
  }
  __device__ StagedBlock Acquire() {
    ptx::MbarrierWait(smem.Stored(consumer), parity ^ 1);
    return StagedBlockOf<Config>(smem, consumer, last_stage);
  }
  __device__ void Publish() {
    ptx::FenceProxyAsyncShared();  // bulk copies will read it
    ptx::MbarrierArrive(smem.Staged(consumer));
    parity ^= 1;
    published = true;
  }
};

// The storer's side, a single lane: where it finds the blocks of a tile, one after the other.
template <typename Config>
struct StagingReader {
  GemmSmem<Config> smem;
  int turn = 0;           // whose tile it is, unless both have blocks of it
  uint32_t parities = 0;  // a bit for each consumer
  Ring<Config::kStages> stages;
  // Bits likewise: who has published some of this tile, and what has not been read yet.
  uint32_t published = 0, unread = 0;

  __device__ void Enter(int k_blocks) {
    if constexpr (Config::kLends) stages.Skip(k_blocks);
  }
  __device__ StagedBlock Acquire(int block) {
    const int consumer = ConsumerOf(block);
    if (unread >> consumer & 1) AwaitRead();
    ptx::MbarrierWait(smem.Staged(consumer), parities >> consumer & 1);
    parities ^= 1u << consumer;
    published |= 1u << consumer;
    return StagedBlockOf<Config>(smem, consumer, LastStage<Config>(stages));
  }
  // After the copies out of it have been issued and committed.
  __device__ void Release(int block) {
    unread |= 1u << ConsumerOf(block);
    if constexpr (!Config::kLends) AwaitRead();
  }
  // After the tile: gives its last stage back.
  __device__ void Leave() {
    if constexpr (Config::kLends) {
      AwaitRead();
      const uint32_t empty = smem.Empty(LastStage<Config>(stages));
      for (int cta = 0; published != 0 && cta < Config::kClusterM; ++cta) {
        ptx::MbarrierArriveRemote(ptx::MapToCta(empty, cta), __popc(published));
      }
      published = 0;
    }
    turn ^= 1;
  }

 private:
  __device__ int ConsumerOf(int block) const { return Config::kCooperative ? block : turn; }
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
