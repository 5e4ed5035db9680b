// DeviceState: what kernels read of their device. It has memory of its own, beside the workspaces
// (runtime/heap_cuda.h).
#ifndef JFLUX_GPU_DEVICE_STATE_H_
#define JFLUX_GPU_DEVICE_STATE_H_

#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"

namespace jflux {

// The spans that jflux.timeline shows. A span belongs to one role of a kernel (gpu/gemm_sm90.cuh).
enum class EventKind : uint16_t {
  kWaitRows = 0,      // scheduler warp, for a tile's rows of A: a = row block, b = tile column
  kMultiply = 1,      // consumer; a and b as kWaitRows
  kEpilogue = 2,      // consumer, until its staging is written
  kWaitPartials = 3,  // for a peer's tile or partial tile
  kSend = 4,          // until the data has arrived: a = peer, b = chunk or row block
  // Store warp, until the tile has left its staging; with a lent stage, until it begins to.
  kStore = 5,
  kCopy = 6,        // send or scheduler warp, until a peer's tile has been copied to y; as kSend
  kWaitToSend = 7,  // store warp, for the send semaphore; as kMultiply
};

struct TimelineEvent {
  uint64_t begin_ns, end_ns;  // %globaltimer
  uint32_t call;              // the workspace's epoch
  uint16_t kind, sm;
  int32_t a, b;
};
static_assert(sizeof(TimelineEvent) == 32);

struct Timeline {
  TimelineEvent* events;  // null: recording is off
  uint32_t* count;        // events so far, including those that found no room
  uint32_t capacity;
};

// Records through which a device and the host tell each other of faults while a kernel runs. They
// are in host memory, which the host can still read after a trap.
struct HostRecords {
  Fault fault;     // WaitLimits::fault
  Fault warning;   // WaitLimits::warning
  uint64_t abort;  // WaitLimits::abort
};

struct DeviceState {
  TestHooks hooks;
  Timeline timeline;
  WaitLimits limits;
  uint64_t reported;  // not 0: ReportValue has written the record, or is writing it
};

// Reports a value that a kernel was given, from any thread: the kernel goes on. Nothing without a
// heap (`state` null), and nothing after the device's first fault.
JFLUX_HD void ReportValue(DeviceState* state, uint32_t op, int32_t rank, FaultKind kind,
                          int32_t peer, int64_t tile, int64_t expected, int64_t seen) {
  if (state == nullptr || !CompareExchange(&state->reported, 0, 1)) return;
  Fault* fault = state->limits.fault;
  if (LoadRelaxed(&fault->kind) != 0) return;
  WaitContext context{};
  context.op = op;
  context.rank = rank;
  WriteRecord(fault, context, kind, peer, tile, static_cast<uint64_t>(expected),
              static_cast<uint64_t>(seen));
}

}  // namespace jflux

#endif  // JFLUX_GPU_DEVICE_STATE_H_
