// The start and the end of a call, for all kernels: dynamic cluster ids, kernels that overlap,
// injected delays, the trap after a failed wait.
#ifndef JFLUX_GPU_CALL_CUH_
#define JFLUX_GPU_CALL_CUH_

#include <cstddef>
#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"
#include "cluster.cuh"
#include "device_state.h"

namespace jflux {

struct DynamicId {
  uint64_t epoch;  // of the call
  uint32_t id;     // of this cluster: 0, 1, ... in the order in which clusters start
  bool first;      // the first CTA of the cluster with id 0
  bool overlaps;   // this thread has found another kernel in the workspace
};

__device__ __forceinline__ WaitContext WaitOf(DeviceState* state, uint64_t* stop, uint32_t op,
                                              int32_t rank, const TestHooks& hooks) {
  return WaitContext{/*fault=*/nullptr,     stop,          /*deadline_ns=*/0, op, rank,
                     hooks.skip_waits != 0, &state->limits};
}

// Kernels of one workspace must not overlap: they share its counters, and reuse of the two halves
// (core/signal.h) relies on the end of the kernel before. WorkspaceHeader::inside therefore counts
// the participants of a call as they begin and end: the clusters of a packet kernel with their
// dynamic ids, the send and scheduler warps of a GEMM. Reading it takes the latency of a load, so a
// GEMM reads it where nothing waits for it: in the store warp at its beginning, in the two other
// warps at their end. A kernel that finds another one reports it and traps.
__device__ __forceinline__ uint64_t AddInside(WorkspaceHeader* header, uint64_t presence) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(&header->inside),
                   static_cast<unsigned long long>(presence));
}
__device__ __forceinline__ void EnterWorkspace(const SymmetricView& view) {
  AddInside(view.At<WorkspaceHeader>(view.rank, 0), Presence(view.launch));
}
__device__ __forceinline__ void LeaveWorkspace(const SymmetricView& view) {
  AddInside(view.At<WorkspaceHeader>(view.rank, 0), 0 - Presence(view.launch));
}

// XLA only reports that a launch failed. The pause gives the host time to print the reason first.
__device__ __forceinline__ void PauseAndTrap() {
  const uint64_t start = NowNs();
  while (NowNs() - start < 300000000ull) {
  }
  __trap();
}
__device__ __forceinline__ void TrapOnOverlap(const SymmetricView& view, const WaitContext& wait) {
  ReportFault(wait, FaultKind::kOverlap, wait.rank, -1, view.launch, 0);
  PauseAndTrap();
}
// Called after the last wait, by one thread of each warp that has waited for peers. Traps if a wait
// of this rank failed, or if another kernel is in the workspace: a failed call must not look like a
// successful one.
__device__ __forceinline__ void TrapIfFaulted(const SymmetricView& view, const WaitContext& wait) {
  const auto* header = view.At<WorkspaceHeader>(view.rank, 0);
  static_assert(offsetof(WorkspaceHeader, stop) % 16 == 0 &&
                offsetof(WorkspaceHeader, inside) == offsetof(WorkspaceHeader, stop) + 8);
  uint64_t stop, inside;
  LoadRelaxed2(&header->stop, &stop, &inside);
  if (!IsAlone(inside, view.launch)) TrapOnOverlap(view, wait);
  if (stop != 0) PauseAndTrap();
}
// Called early, by one thread of a CTA.
__device__ __forceinline__ void TrapIfNotAlone(const SymmetricView& view, const WaitContext& wait) {
  const uint64_t inside = LoadRelaxed(&view.At<WorkspaceHeader>(view.rank, 0)->inside);
  if (!IsAlone(inside, view.launch)) TrapOnOverlap(view, wait);
}

// Called by all threads of a one-dimensional grid of clusters of kCtas CTAs.
//
// Clusters take dynamic ids in the order in which they start, and work by id, not by blockIdx: so
// the lowest id that any rank waits for is running or next to start, and forward progress is
// guaranteed however many CTAs fit on the GPU. Id and epoch share one 64-bit word and are read by
// one atomic; the cluster with the last id writes the next epoch, for the next call.
//
// The same thread counts the cluster in. LeaveAfterDynamicId counts it out.
template <int kCtas = 1>
__device__ __forceinline__ DynamicId TakeDynamicId(const SymmetricView& view) {
  JFLUX_SHARED(uint64_t, word_taken);
  auto* header = view.At<WorkspaceHeader>(view.rank, 0);
  const bool leads = kCtas == 1 || ThisCluster().block_rank() == 0;
  DynamicId taken{};
  if (leads && threadIdx.x + threadIdx.y + threadIdx.z == 0) {
    const uint64_t inside = AddInside(header, Presence(view.launch));
    auto* word = reinterpret_cast<unsigned long long*>(&header->epoch_and_id);
    word_taken = atomicAdd(word, 1ull);
    if (IdOfWord(word_taken) == gridDim.x / kCtas - 1) {
      atomicExch(word, EpochWord(NextEpoch(EpochOfWord(word_taken))));
    }
    taken.overlaps = !IsAlone(inside, view.launch);
  }
  uint64_t word_seen;
  if constexpr (kCtas == 1) {
    __syncthreads();
    word_seen = word_taken;
  } else {  // distributed shared memory: the leader CTA must not exit before all have read. The
            // callers' clusters synchronise again before they exit
    ThisCluster().sync();
    word_seen = *ThisCluster().map_shared_rank(&word_taken, 0);
  }
  taken.epoch = NextEpoch(EpochOfWord(word_seen));
  taken.id = IdOfWord(word_seen);
  taken.first = leads && taken.id == 0;
  return taken;
}

// Called by all threads at the end.
template <int kCtas = 1>
__device__ __forceinline__ void LeaveAfterDynamicId(const SymmetricView& view) {
  const bool leads = kCtas == 1 || ThisCluster().block_rank() == 0;
  if (leads && threadIdx.x + threadIdx.y + threadIdx.z == 0) LeaveWorkspace(view);
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

}  // namespace jflux

#endif  // JFLUX_GPU_CALL_CUH_
