// What the roles of the GEMM main loop (gpu/gemm_sm90.cuh) know of the call that they serve, how
// they wait for peers, and the counters that they take work from.
#ifndef JFLUX_GPU_GEMM_CALL_CUH_
#define JFLUX_GPU_GEMM_CALL_CUH_

#include <cstdint>

#include "core/layout.h"
#include "core/signal.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"
#include "gpu/timeline.cuh"

namespace jflux {

// What a role knows of the call it serves.
struct CallContext {
  WaitContext wait;     // its deadline is set when a wait begins: reading the clock takes long
  uint64_t timeout_ns;  // how long a wait may last
  uint32_t epoch;
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
  call.epoch = NextEpoch(header->epoch);
  call.signal = MakeSignal(call.epoch, args.signature);
  call.state = args.state;
  call.recording = state.timeline.events != nullptr;
  call.delays = state.hooks.max_delay_us != 0;
  call.timeout_ns = state.deadline_ns;
  call.wait = WaitContext{state.fault, &header->stop,  0,
                          args.op,     args.view.rank, state.hooks.skip_waits != 0};
  return call;
}

__device__ __forceinline__ bool HasCome(const CallContext& call, const Signal* word) {
  return Classify(LoadAcquire(word), call.signal) == SignalState::kReady;
}

// Waits for a peer. A wait that fails lets the kernel run on, so that it ends soon, with wrong
// values; EndOfWaits turns that into an error.
__device__ __forceinline__ void AwaitPeer(const CallContext& call, const Signal* word, int peer,
                                          int64_t unit) {
  if (HasCome(call, word) || Faulted(call.wait)) return;
  WaitContext wait = call.wait;
  wait.deadline_ns = NowNs() + call.timeout_ns;
  WaitSignal(word, call.signal, peer, unit, wait);
}

// One lane of each warp that takes from a counter calls it when it has taken its last: of each CTA
// the scheduler and the sender. All have read the epoch by then.
template <typename Args>
__device__ __forceinline__ void LeaveCounters(const Args& args) {
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  __threadfence();
  if (atomicAdd(&header->exited, 1) != 2 * gridDim.x - 1) return;
  header->next_send = 0;
  header->next_copy = 0;
  header->senders = 0;
  header->next_tile = 0;
  header->exited = 0;
  header->epoch = NextEpoch(header->epoch);
}

// Of what Op::Send does, and of what it then copies.
template <typename Args>
__device__ __forceinline__ int32_t TakeUnit(const Args& args) {
  return static_cast<int32_t>(
      atomicAdd(&args.view.template At<WorkspaceHeader>(args.view.rank, 0)->next_send, 1));
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
