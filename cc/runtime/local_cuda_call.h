// Code around the launch of every local op's CUDA handler (runtime/op.h).
#ifndef JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_
#define JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <optional>
#include <string>

#include "runtime/cuda_call.h"
#include "runtime/fault.h"

namespace jflux {

// The context and the attributes of a local op's handler on a GPU.
inline constexpr auto BindLocalCuda = [] {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attrs();
};

// The current device's part of the heap.
struct LocalState {
  DeviceState* state = nullptr;      // null without a heap
  std::optional<std::string> fault;  // as Heap::FaultOf
};
inline LocalState StateOfThisDevice() {
  int ordinal = 0;
  const auto heap = CurrentHeapCuda();
  if (heap == nullptr || cudaGetDevice(&ordinal) != cudaSuccess) return {};
  const CudaDevice* device = heap->DeviceOf(ordinal);
  if (device == nullptr) return {};
  return {device->state, heap->FaultOf(device->id)};
}

// launch(&error) -> bool.
template <typename Launch>
ffi::Error LaunchLocalCuda(OpId op, Launch&& launch) {
  std::string error;
  ++CudaLaunches();
  if (launch(&error)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string("jflux.") + NameOf(op) + ": " + error);
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_
