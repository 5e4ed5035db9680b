// Which executables use which workspaces on GPUs.
//
// XLA instantiates the handler of each call when it makes or loads an executable, and destroys the
// handler's state with the executable. The state counts as a user of the call's workspaces. Only
// workspaces without users are given back (CudaWorkspaces::Unused).
#ifndef JFLUX_RUNTIME_WORKSPACE_USE_H_
#define JFLUX_RUNTIME_WORKSPACE_USE_H_

#include <memory>
#include <vector>

#include "runtime/heap_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jflux {

class WorkspaceUse {
 public:
  static xla::ffi::TypeId id;
  static xla::ffi::TypeInfo info;

  WorkspaceUse() = default;
  ~WorkspaceUse();
  WorkspaceUse(const WorkspaceUse&) = delete;
  WorkspaceUse& operator=(const WorkspaceUse&) = delete;

  // The workspace of each group that has a device of this process. Where one process drives the
  // node's GPUs, a missing one is made: the executable may come from a cache. False, and why, if
  // that fails. An executable for other devices than the heap's uses nothing.
  bool Begin(const std::shared_ptr<HeapCuda>& heap, const int64_t* groups, size_t count,
             int64_t world, int64_t bytes, std::string* error);

 private:
  std::weak_ptr<HeapCuda> heap_;
  std::vector<WorkspaceId> used_;
};

// The instantiate stage of every op on GPUs.
XLA_FFI_Error* InstantiateWorkspaceUse(XLA_FFI_CallFrame* frame);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_WORKSPACE_USE_H_
