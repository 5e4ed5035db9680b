// The workspaces of the symmetric heap on GPUs. A workspace has one copy on each device of a set:
// an allocation of its own (runtime/workspace_memory.h).
//
//   identity  The set of devices, in any order, and the size. Calls over these devices whose needs
//             round up to this size share it, whatever the op, the shape and the order of ranks.
//   reach     A device addresses the copies of its own process by peer access, and those of other
//             processes by CUDA IPC or NVSHMEM. NVSHMEM also reaches other nodes, where copies are
//             not mapped.
//   writers   One thread at a time adds, attaches, closes and frees (jflux/_heap holds a lock).
//             XLA's threads count users.
//   readers   Handlers (View), on XLA's threads.
//   order     Add, Attach for each other process, Commit; then calls may run. A call sees the
//             copies of all processes with their signals cleared. To give a workspace back: Close
//             in all processes, then Free in all.
//   reset     Signals and packets start as zeros, and are never reset (core/signal.h). The address
//             of a copy never changes: captured CUDA graphs hold it.
//
// While a workspace is added, a kernel on the device may be waiting for a peer. So nothing in Add
// and Attach waits for kernels or needs an SM. Close and Free do wait for kernels, which may wait
// for peers whose handlers call View. So Close and Free do not hold the mutex while they wait.
#ifndef JFLUX_RUNTIME_WORKSPACES_CUDA_H_
#define JFLUX_RUNTIME_WORKSPACES_CUDA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "runtime/heap.h"
#include "runtime/workspace_memory.h"

namespace jflux {

// A copy on a device of this process.
struct WorkspaceCopy {
  int ordinal;  // CUDA's number of the device
  char* base;
  int64_t bytes;
  bool is_shared;  // other processes write to it too
};

class CudaWorkspaces {
 public:
  // `ordinals`: CUDA's number of each device of this process, by global id.
  CudaWorkspaces(std::map<int64_t, int> ordinals, std::unique_ptr<WorkspaceMemory> memory)
      : ordinals_(std::move(ordinals)), memory_(std::move(memory)) {}
  ~CudaWorkspaces();
  CudaWorkspaces(const CudaWorkspaces&) = delete;
  CudaWorkspaces& operator=(const CudaWorkspaces&) = delete;

  // Makes the copies of this process's devices. *handle is for the other processes of the set;
  // empty if there are none. Nothing is left behind on failure.
  bool Add(const WorkspaceId& id, std::string* handle, std::string* error);
  // Maps another process's copies.
  bool Attach(const WorkspaceId& id, const std::string& handle, std::string* error);
  // Lets calls find the workspace. False if a copy of the set is missing.
  bool Commit(const WorkspaceId& id, std::string* error);
  // Hides the workspace from calls, and waits for what runs on this process's devices. Afterwards
  // other processes may free their copies.
  bool Close(const WorkspaceId& id, std::string* error);
  bool Free(const WorkspaceId& id, std::string* error);
  // Closes all workspaces, when nothing runs.
  void CloseAll();

  // The workspace as rank `rank` of these devices addresses it: *view has the address of each copy,
  // null for copies that are not mapped (on other nodes), and `remote` a reference to each. False
  // if there is no such workspace.
  bool View(const std::vector<int64_t>& devices, int32_t rank, int64_t bytes, SymmetricView* view,
            shmem::RemoteRef* remote) const;
  // The address at which device `local` reaches the copy of `device`; null if it does not.
  char* CopyOf(const WorkspaceId& id, int64_t local, int64_t device) const;

  bool Has(const WorkspaceId& id) const;
  // Count the executables with a call that uses the workspace. False if there is no such workspace.
  bool BeginUse(const WorkspaceId& id);
  void EndUse(const WorkspaceId& id);
  // The workspaces that no executable uses. jflux/_heap knows which of them programs that have yet
  // to be compiled will use.
  std::vector<WorkspaceId> Unused() const;

  // Bytes that the workspaces take on the device that has the most of them.
  int64_t BytesTaken() const;

  // Calls visit(copy) for each copy of this process in a committed workspace, until it returns
  // false. No workspace is added meanwhile.
  template <typename F>
  bool ForEachCopy(F&& visit) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, workspace] : workspaces_) {
      if (!workspace.committed) continue;
      for (const auto& [device, address] : workspace.own) {
        if (!visit(WorkspaceCopy{ordinals_.at(device), address, id.bytes,
                                 workspace.own.size() < id.devices.size()})) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  struct Workspace {
    bool committed = false;
    int64_t users = 0;                                        // calls of executables
    std::map<int64_t, char*> own;                             // by local device
    std::map<std::pair<int64_t, int64_t>, PeerCopy> reached;  // by (local device, device)
    std::vector<std::pair<int, char*>> opened;  // of other processes: (ordinal, address)
  };

  bool AddCopy(const WorkspaceId& id, int64_t device, Workspace* workspace, std::string* error);
  bool AppendHandle(int64_t device, const Workspace& workspace, std::string* handle,
                    std::string* error);
  void CloseOpened(std::vector<std::pair<int, char*>>* opened);
  void FreeOwn(Workspace* workspace);

  const std::map<int64_t, int> ordinals_;
  const std::unique_ptr<WorkspaceMemory> memory_;
  mutable std::mutex mutex_;
  std::map<WorkspaceId, Workspace> workspaces_;
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_WORKSPACES_CUDA_H_
