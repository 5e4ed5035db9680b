// Where the copies of the workspaces on GPUs get their memory, and how processes reach each
// other's.
//
//   CUDA IPC   cudaMalloc, and cudaIpcOpenMemHandle in the processes of the same node
//   NVSHMEM    a place in NVSHMEM's symmetric heap (runtime/nvshmem.h). The processes of a node
//              find it mapped; those of other nodes reach it by NVSHMEM's API alone.
//
// Nothing here waits for another process or for a kernel.
#ifndef JFLUX_RUNTIME_WORKSPACE_MEMORY_H_
#define JFLUX_RUNTIME_WORKSPACE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "jflux/remote.h"

namespace jflux {

// A peer's copy as a device of this process reaches it.
struct PeerCopy {
  char* mapped = nullptr;  // null: by NVSHMEM alone
  shmem::RemoteRef remote = {nullptr};
};

class WorkspaceMemory {
 public:
  // No two allocations share a block: a CUDA IPC handle opens the whole block.
  static constexpr int64_t kBlockBytes = 2 << 20;

  virtual ~WorkspaceMemory() = default;

  // Allocates whole blocks on the GPU `ordinal`, which is the current one.
  virtual bool Allocate(int ordinal, int64_t bytes, char** address, std::string* error) = 0;
  virtual void Free(char* address) = 0;
  // A handle with which other processes open the memory: text without commas and equals signs.
  virtual bool Export(char* address, std::string* handle, std::string* error) = 0;
  // Maps memory of another process for the GPU `ordinal`, which is the current one. A malformed
  // handle is an error.
  virtual bool Open(int ordinal, const std::string& handle, PeerCopy* copy, std::string* error) = 0;
  // Unmaps memory that Open has mapped.
  virtual void Close(char* mapped) = 0;
};

std::unique_ptr<WorkspaceMemory> NewIpcMemory();
std::unique_ptr<WorkspaceMemory> NewNvshmemMemory();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_WORKSPACE_MEMORY_H_
