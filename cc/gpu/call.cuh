// The start and the end of a call, for all kernels: dynamic cluster ids, injected delays, the trap
// after a failed wait.
#ifndef JFLUX_GPU_CALL_CUH_
#define JFLUX_GPU_CALL_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"
#include "device_state.h"

namespace jflux {

struct DynamicId {
  uint64_t epoch;  // of the call
  uint32_t id;     // of this cluster: 0, 1, ... in the order in which clusters start
  bool first;      // the first CTA of the cluster with id 0
};

// Called by all threads of a one-dimensional grid of clusters of kCtas CTAs.
//
// Clusters take dynamic ids in the order in which they start, and work by id, not by blockIdx: so
// the lowest id that any rank waits for is running or next to start, and forward progress is
// guaranteed however many CTAs fit on the GPU. Id and epoch share one 64-bit word and are read by
// one atomic; the cluster with the last id writes the next epoch, for the next call.
template <int kCtas = 1>
__device__ __forceinline__ DynamicId TakeDynamicId(WorkspaceHeader* header) {
  namespace cg = cooperative_groups;
  __shared__ uint64_t word_taken;
  const bool leads = kCtas == 1 || cg::this_cluster().block_rank() == 0;
  if (leads && threadIdx.x + threadIdx.y + threadIdx.z == 0) {
    auto* word = reinterpret_cast<unsigned long long*>(&header->epoch_and_id);
    word_taken = atomicAdd(word, 1ull);
    if (IdOfWord(word_taken) == gridDim.x / kCtas - 1) {
      atomicExch(word, EpochWord(NextEpoch(EpochOfWord(word_taken))));
    }
  }
  uint64_t word_seen;
  if constexpr (kCtas == 1) {
    __syncthreads();
    word_seen = word_taken;
  } else {  // distributed shared memory: the leader CTA must not exit before all have read. The
            // callers' clusters synchronise again before they exit
    cg::this_cluster().sync();
    word_seen = *cg::this_cluster().map_shared_rank(&word_taken, 0);
  }
  const uint32_t id = IdOfWord(word_seen);
  return DynamicId{NextEpoch(EpochOfWord(word_seen)), id, leads && id == 0};
}

// Injects TestHooks::max_delay_us.
__device__ __forceinline__ void DelayCall(const DeviceState& state, uint64_t epoch, int rank) {
  if (state.hooks.max_delay_us == 0) return;
  const uint64_t start = NowNs();
  const uint32_t hash = SignatureBuilder().Add(static_cast<int64_t>(epoch)).Add(rank).Get();
  const uint64_t delay_ns = static_cast<uint64_t>(hash % state.hooks.max_delay_us) * 1000;
  while (NowNs() - start < delay_ns) {
  }
}

// Called after the last wait, by one thread of each warp that has waited for peers. Traps if a wait
// of this rank failed: a failed call must not look like a successful one.
template <typename Args>
__device__ __forceinline__ void TrapIfFaulted(const Args& args) {
  const auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  if (LoadRelaxed(&header->stop) == 0) return;
  // XLA only reports that a launch failed. The pause gives the host time to print the reason first.
  const uint64_t start = NowNs();
  while (NowNs() - start < 300000000ull) {
  }
  __trap();
}

}  // namespace jflux

#endif  // JFLUX_GPU_CALL_CUH_
