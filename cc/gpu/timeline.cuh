// Records a span of work of one role, for jflux.timeline. While recording is off, a record costs
// one test of a register.
#ifndef JFLUX_GPU_TIMELINE_CUH_
#define JFLUX_GPU_TIMELINE_CUH_

#include "core/platform.h"
#include "gpu/device_state.h"
#include "gpu/ptx.cuh"

namespace jflux {

// Called by one thread. begin_ns: NowNs() at the start of the span.
__device__ __forceinline__ void Record(const DeviceState* state, bool recording, EventKind kind,
                                       uint64_t begin_ns, uint32_t call, int32_t a, int32_t b) {
  if (!recording) return;
  const Timeline timeline = state->timeline;
  const uint32_t slot = atomicAdd(timeline.count, 1);
  if (slot >= timeline.capacity) return;
  const uint32_t sm = ptx::SmId();
  timeline.events[slot] = TimelineEvent{
      begin_ns, NowNs(), call, static_cast<uint16_t>(kind), static_cast<uint16_t>(sm), a, b};
}

}  // namespace jflux

#endif  // JFLUX_GPU_TIMELINE_CUH_
