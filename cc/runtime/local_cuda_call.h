// What every local op's CUDA handler does around its launch (runtime/local_op.h).
#ifndef JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_
#define JFLUX_RUNTIME_LOCAL_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <string>

#include "runtime/cuda_call.h"
#include "runtime/fault.h"

namespace jflux {

// The context and the attributes of a local op's handler on a GPU.
inline constexpr auto BindLocalCuda = [] {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attrs();
};

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
