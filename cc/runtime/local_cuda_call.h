// What every local op's CUDA handler does around its launch (runtime/local_op.h).
#ifndef JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_
#define JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "runtime/cuda_call.h"
#include "runtime/fault.h"

namespace jflux {

// The context and the attributes of a local op's handler on a GPU.
inline constexpr auto BindLocalCuda = [] {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::ScratchAllocator>()
      .Attrs();
};

// launch(scratch, &error) -> bool.
template <typename Launch>
ffi::Error LaunchLocalCuda(OpId op, ffi::ScratchAllocator& allocator, int64_t scratch_bytes,
                           Launch&& launch) {
  const std::string name = std::string("jflux.") + NameOf(op) + ": ";
  void* scratch = nullptr;
  if (scratch_bytes > 0) {
    const auto allocated = allocator.Allocate(scratch_bytes);
    if (!allocated.has_value()) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        name + "no " + std::to_string(scratch_bytes) + " bytes of scratch memory");
    }
    scratch = *allocated;
  }
  std::string error;
  ++CudaLaunches();
  if (!launch(scratch, &error)) return ffi::Error(ffi::ErrorCode::kInternal, name + error);
  return ffi::Error::Success();
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_
