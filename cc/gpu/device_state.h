// What every kernel on a device finds at the start of that device's heap.
#ifndef JFLUX_GPU_DEVICE_STATE_H_
#define JFLUX_GPU_DEVICE_STATE_H_

#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"

namespace jflux {

// What jflux.timeline shows: one span of work of one role of a kernel.
enum class EventKind : uint16_t {
  kWaitRows = 0,    // a scheduler, for a tile's rows: a = tile row, b = tile column
  kMultiply = 1,    // a consumer, likewise
  kEpilogue = 2,    // a consumer, until its staging is written
  kWaitParts = 3,   // a scheduler, for the peers' parts of a tile
  kSend = 4,        // until the data has arrived: a = peer, b = chunk or tile row
  kStore = 5,       // a storer, until y's tile has left the staging (a lent stage: begins to leave)
  kCopy = 6,        // a sender, until a peer's tile has left the workspace: as kSend
  kWaitToSend = 7,  // a storer, for the send semaphore: as kMultiply
};

struct TimelineEvent {
  uint64_t begin_ns, end_ns;  // the GPU's global timer
  uint32_t call;              // the workspace's epoch
  uint16_t kind, sm;
  int32_t a, b;
};
static_assert(sizeof(TimelineEvent) == 32);

struct Timeline {
  TimelineEvent* events;  // null: nobody records
  uint32_t* count;        // how many there would be with room for all
  uint32_t capacity;
};

struct DeviceState {
  Fault* fault;          // in host memory: readable while a kernel runs, and after it trapped
  uint64_t deadline_ns;  // how long a wait may last
  TestHooks hooks;
  Timeline timeline;
};

inline constexpr int64_t kDeviceStateBytes = 4096;  // workspaces start behind it

}  // namespace jflux

#endif  // JFLUX_GPU_DEVICE_STATE_H_
