// The call as the roles of the GEMM main loop (gpu/gemm_sm90.cuh) see it: its context, waits for
// peers, and the counters that hand out work.
#ifndef JFLUX_GPU_GEMM_CALL_CUH_
#define JFLUX_GPU_GEMM_CALL_CUH_

#include <cstdint>

#include "core/layout.h"
#include "core/signal.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"
#include "gpu/timeline.cuh"

namespace jflux {

// A call, as one role sees it.
struct CallContext {
  WaitContext wait;
  uint32_t epoch;  // its low bits: they choose the half, and name the call in a timeline
  Signal signal;
  const DeviceState* state;
  bool recording;
  bool delays;  // TestHooks::max_delay_us

  __device__ __forceinline__ uint64_t Start() const { return recording ? NowNs() : 0; }
  __device__ __forceinline__ void Done(EventKind kind, uint64_t start, int32_t a, int32_t b) const {
    Record(state, recording, kind, start, epoch, a, b);
  }
};

template <typename Args>
__device__ __forceinline__ CallContext MakeContext(const Args& args) {
  CallContext call;
  const DeviceState state = *args.state;
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const uint64_t epoch = NextEpoch(EpochOfWord(header->epoch_and_id));
  call.epoch = static_cast<uint32_t>(epoch);
  call.signal = MakeSignal(epoch, args.signature);
  call.state = args.state;
  call.recording = state.timeline.events != nullptr;
  call.delays = state.hooks.max_delay_us != 0;
  call.wait = WaitOf(args.state, &header->stop, args.op, args.view.rank, state.hooks);
  return call;
}

__device__ __forceinline__ bool HasArrived(const CallContext& call, const Signal* word) {
  return Classify(LoadAcquire(word), call.signal) == SignalState::kReady;
}

// Waits for a peer's signal; `item` names it in a fault record. After a failed wait the kernel runs
// on, with wrong values, so that it ends soon. TrapIfFaulted then turns the failure into an error.
__device__ __forceinline__ void AwaitPeer(const CallContext& call, const Signal* word, int peer,
                                          int64_t item) {
  if (HasArrived(call, word) || Faulted(call.wait)) return;
  WaitSignal(word, call.signal, peer, item, call.wait);
}

// Waits for the signals [item, count) of `words`, which `peer` sends in about this order. Called by
// a full warp: the lanes look at 32 at a time, and lane 0 waits for the first missing one.
__device__ __forceinline__ void AwaitSignals(const CallContext& call, const Signal* words, int peer,
                                             int32_t item, int32_t count) {
  const int lane = threadIdx.x % 32;
  while (item < count) {
    const bool has_arrived = item + lane >= count || HasArrived(call, words + item + lane);
    const uint32_t missing = __ballot_sync(0xffffffff, !has_arrived);
    if (missing == 0) {
      item += 32;
      continue;
    }
    item += __ffs(missing) - 1;
    if (lane == 0) AwaitPeer(call, words + item, peer, item);
    __syncwarp();
    ++item;  // also after a failed wait
  }
}

// Called by one lane of each of a CTA's kTakers warps that take work from counters (on Hopper the
// scheduler warp and the send warp), when it has taken its last. All have read the epoch before.
// The last caller resets the counters, with reset(header) those of the op, and publishes the epoch.
template <int kTakers = 2, typename Args, typename Reset>
__device__ __forceinline__ void LeaveCounters(const Args& args, Reset&& reset) {
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  __threadfence();
  if (atomicAdd(&header->exited, 1) != kTakers * gridDim.x - 1) return;
  header->next_transfer = 0;
  header->next_copy = 0;
  header->senders = 0;
  header->next_tile = 0;
  reset(header);
  header->exited = 0;
  header->epoch_and_id = EpochWord(NextEpoch(EpochOfWord(header->epoch_and_id)));
}

template <typename Args>
__device__ __forceinline__ void LeaveCounters(const Args& args) {
  LeaveCounters(args, [](WorkspaceHeader*) {});
}

// The next chunk to send or peer's tile to receive, and the next chunk to copy to `gathered`.
template <typename Args>
__device__ __forceinline__ int32_t TakeTransfer(const Args& args) {
  return static_cast<int32_t>(
      atomicAdd(&args.view.template At<WorkspaceHeader>(args.view.rank, 0)->next_transfer, 1));
}
template <typename Args>
__device__ __forceinline__ int32_t TakeCopy(const Args& args) {
  return static_cast<int32_t>(
      atomicAdd(&args.view.template At<WorkspaceHeader>(args.view.rank, 0)->next_copy, 1));
}

template <typename Args>
__device__ __forceinline__ int32_t TakeTile(const Args& args) {
  return static_cast<int32_t>(
      atomicAdd(&args.view.template At<WorkspaceHeader>(args.view.rank, 0)->next_tile, 1));
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CALL_CUH_
