// What kernels do where a call begins and ends, whatever they send in between.
#ifndef JFLUX_GPU_CALL_CUH_
#define JFLUX_GPU_CALL_CUH_

#include <cooperative_groups.h>

#include <cstddef>
#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"
#include "device_state.h"

namespace jflux {

struct Turn {
  uint32_t epoch;  // of the call
  uint32_t place;  // of this cluster, in the order in which clusters begin
  bool first;      // the first CTA of the first cluster
};

// All threads of a CTA of a one-dimensional grid in clusters of kCtas. Clusters work in the order
// in which they begin, not that of their numbers: whichever may run, the lowest place that some
// rank waits for is running on all ranks, or is the next to. The place and the epoch are one word,
// taken at once; the last cluster to take its place raises the epoch for the next call.
template <int kCtas = 1>
__device__ __forceinline__ Turn TakeTurn(WorkspaceHeader* header) {
  namespace cg = cooperative_groups;
  __shared__ uint64_t taken;
  const bool leads = kCtas == 1 || cg::this_cluster().block_rank() == 0;
  if (leads && threadIdx.x + threadIdx.y + threadIdx.z == 0) {
    static_assert(offsetof(WorkspaceHeader, epoch) == 0 &&
                  offsetof(WorkspaceHeader, next_send) == 4);
    auto* word = reinterpret_cast<unsigned long long*>(header);
    taken = atomicAdd(word, 1ull << 32);
    if (taken >> 32 == gridDim.x / kCtas - 1) {
      atomicExch(word, NextEpoch(static_cast<uint32_t>(taken)));
    }
  }
  uint64_t mine;
  if constexpr (kCtas == 1) {
    __syncthreads();
    mine = taken;
  } else {  // the leader's CTA must stay until all have read: its cluster meets again before it
            // ends
    cg::this_cluster().sync();
    mine = *cg::this_cluster().map_shared_rank(&taken, 0);
  }
  const auto place = static_cast<uint32_t>(mine >> 32);
  return Turn{NextEpoch(static_cast<uint32_t>(mine)), place, leads && place == 0};
}

// TestHooks::max_delay_us.
__device__ __forceinline__ void DelayCall(const DeviceState& state, uint32_t epoch, int rank) {
  if (state.hooks.max_delay_us == 0) return;
  const uint64_t start = NowNs();
  const uint32_t hash = SignatureBuilder().Add(epoch).Add(rank).Get();
  const uint64_t delay_ns = static_cast<uint64_t>(hash % state.hooks.max_delay_us) * 1000;
  while (NowNs() - start < delay_ns) {
  }
}

// For threads that have waited for peers, after their last wait: one of each warp will do.
template <typename Args>
__device__ __forceinline__ void EndOfWaits(const Args& args) {
  const auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  if (LoadRelaxed(&header->stop) == 0) return;
  // A call that failed must not look like one that did not. The host first gets the time to print
  // why: XLA will only say that a launch failed.
  const uint64_t start = NowNs();
  while (NowNs() - start < 300000000ull) {
  }
  __trap();
}

}  // namespace jflux

#endif  // JFLUX_GPU_CALL_CUH_
