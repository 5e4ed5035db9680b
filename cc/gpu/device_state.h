// What every kernel on a device finds at the start of that device's heap.
#ifndef JFLUX_GPU_DEVICE_STATE_H_
#define JFLUX_GPU_DEVICE_STATE_H_

#include <cstdint>

#include "core/layout.h"
#include "core/signal.h"

namespace jflux {

struct DeviceState {
  Fault* fault;          // in host memory: readable while a kernel runs, and after it trapped
  uint64_t deadline_ns;  // how long a wait may last
  TestHooks hooks;
};

inline constexpr int64_t kDeviceStateBytes = 4096;  // channels start behind it

}  // namespace jflux

#endif  // JFLUX_GPU_DEVICE_STATE_H_
