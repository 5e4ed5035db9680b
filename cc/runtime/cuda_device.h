// A device of the symmetric heap, as launchers need it. This is not in runtime/heap_cuda.h, whose
// standard headers nvcc would parse three times for every file of kernels.
#ifndef JFLUX_RUNTIME_CUDA_DEVICE_H_
#define JFLUX_RUNTIME_CUDA_DEVICE_H_

#include <cstdint>

#include "gpu/device_state.h"

// As in CUDA's headers: an op's header declares its launcher, and host code without CUDA reads it.
typedef struct CUstream_st* cudaStream_t;

namespace jflux {

// A device of this process.
struct CudaDevice {
  int ordinal;
  int64_t id;  // global
  // SMs that a launch counts on: of a call with peers as its plan says, on every rank alike. How
  // many CTAs there are, and in which order they take tiles, depends on it.
  int sm_count;
  DeviceState* state;      // device address
  HostRecords* records;    // host address; the kernels' addresses are in DeviceState
  Timeline timeline;       // device addresses
  int64_t timer_ahead_ns;  // of the host's clock, when the timeline began
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CUDA_DEVICE_H_
