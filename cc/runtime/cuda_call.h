// Code around the launch of every op's CUDA handler: it finds the device, the group, the workspace.
#ifndef JFLUX_RUNTIME_CUDA_CALL_H_
#define JFLUX_RUNTIME_CUDA_CALL_H_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// How many kernels handlers have enqueued. A captured graph that is replayed runs no handler.
inline std::atomic<int64_t>& CudaLaunches() {
  static std::atomic<int64_t> launches{0};
  return launches;
}

// Tests only: the handlers on this device fail before they launch. -1: none.
inline std::atomic<int32_t>& FailingOrdinal() {
  static std::atomic<int32_t> ordinal{-1};
  return ordinal;
}

// The context and the attributes of a handler on a GPU, which its operands follow.
inline constexpr auto BindCuda = [] {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attrs();
};

// Runs launch(device, view, remote, &error) -> bool for a call. `remote` refers to all ranks'
// copies; copies on other nodes have no address in `view`. `workspace_bytes`: of the call's layout.
template <typename Launch>
ffi::Error LaunchCudaCallAcrossNodes(OpId op, int32_t ordinal, const CallAttributes& call,
                                     int64_t workspace_bytes, Launch&& launch) {
  const WorkspaceBytes workspace{workspace_bytes, call.workspace_bytes};
  if (auto refused = workspace.Refused(op)) return *std::move(refused);
  const auto heap = CurrentHeapCuda();
  const std::string name = std::string("jflux.") + NameOf(op) + ": ";
  const auto failed = [](const std::string& why) {
    return ffi::Error(ffi::ErrorCode::kInternal, why);
  };
  const CudaDevice* device = heap == nullptr ? nullptr : heap->DeviceOf(ordinal);
  if (device == nullptr) {
    return failed(name + "the symmetric heap does not exist on GPU " + std::to_string(ordinal) +
                  "; call jflux.init()");
  }
  if (const auto fault = heap->FaultOf(device->id)) return failed(*fault);
  if (const auto why = heap->AbortReason()) return failed(name + "no call can be made: " + *why);
  // An error from here on may be this device's alone. Its peers must learn of it, or would wait.
  const auto failed_here = [&](const std::string& why) {
    heap->Abort("GPU " + std::to_string(ordinal) + ": " + name + why);
    return failed(name + why);
  };
  const auto group = FindGroup(call.groups, call.world, device->id);
  if (!group) return failed_here(kNotOfTheCall);
  SymmetricView view;
  shmem::RemoteRef remote[kMaxRanks];
  if (!heap->workspaces().View(group->devices, group->rank, workspace.of_plan, &view, remote)) {
    return failed(name + "the symmetric heap has no workspace of " +
                  std::to_string(workspace.of_plan) +
                  " bytes for these devices: the program was compiled before jflux.shutdown(), "
                  "before jax.distributed.initialize(), or in another process, and a job of "
                  "several processes has workspaces only for what each of them has lowered; lower "
                  "it again, in all processes");
  }
  std::string error;
  view.launch = static_cast<uint32_t>(++CudaLaunches() % 0xffffffff) + 1;
  if (FailingOrdinal() == ordinal) return failed_here("a test has this launch fail");
  CudaDevice planned = *device;
  planned.sm_count = static_cast<int>(call.sm_count);
  if (!launch(planned, view, static_cast<const shmem::RemoteRef*>(remote), &error)) {
    return failed_here(error);
  }
  return ffi::Error::Success();
}

// launch(device, view, &error) -> bool, of a group inside a node.
template <typename Launch>
ffi::Error LaunchCudaCall(OpId op, int32_t ordinal, const CallAttributes& call,
                          int64_t workspace_bytes, Launch&& launch) {
  const auto launch_mapped = [&](const CudaDevice& device, const SymmetricView& view,
                                 const shmem::RemoteRef*, std::string* error) {
    for (int32_t r = 0; r < view.world; ++r) {
      if (view.base[r] != nullptr) continue;
      *error = "the memory of rank " + std::to_string(r) + " is not mapped on this GPU";
      return false;
    }
    return launch(device, view, error);
  };
  return LaunchCudaCallAcrossNodes(op, ordinal, call, workspace_bytes, launch_mapped);
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CUDA_CALL_H_
