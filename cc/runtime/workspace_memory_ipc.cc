#ifdef JFLUX_WITH_CUDA

#include <cuda_runtime.h>

#include "runtime/cuda_check.h"
#include "runtime/hex.h"
#include "runtime/workspace_memory.h"

namespace jflux {
namespace {

class IpcMemory final : public WorkspaceMemory {
 public:
  bool Allocate(int ordinal, int64_t bytes, char** address, std::string* error) override {
    void* allocated = nullptr;
    if (cudaMalloc(&allocated, bytes) != cudaSuccess) {
      cudaGetLastError();
      size_t free_bytes = 0, total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      *error = "GPU " + std::to_string(ordinal) + " has " + std::to_string(free_bytes) +
               " bytes free beside JAX's pool";
      return false;
    }
    *address = static_cast<char*>(allocated);
    return true;
  }

  void Free(char* address) override { cudaFree(address); }

  bool Export(char* address, std::string* handle, std::string* error) override {
    cudaIpcMemHandle_t ipc;
    JFLUX_CUDA_OR_FALSE(cudaIpcGetMemHandle(&ipc, address), error);
    *handle = HexOf(&ipc, sizeof(ipc));
    return true;
  }

  bool Open(int ordinal, const std::string& handle, PeerCopy* copy, std::string* error) override {
    cudaIpcMemHandle_t ipc;
    if (!ParseHex(handle, &ipc, sizeof(ipc))) {
      *error = "malformed handle of a peer process's workspace: " + handle;
      return false;
    }
    void* address = nullptr;
    const cudaError_t opened = cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess);
    if (opened != cudaSuccess) {
      cudaGetLastError();
      *error = CudaReason("cudaIpcOpenMemHandle", opened) + " (on GPU " + std::to_string(ordinal) +
               "): the processes of a host must see each other's GPUs, and these need peer access "
               "(`nvidia-smi topo -p2p rw`); in containers they need one IPC namespace "
               "(--ipc=host)";
      return false;
    }
    copy->mapped = static_cast<char*>(address);
    copy->remote = {copy->mapped};
    return true;
  }

  void Close(char* mapped) override { cudaIpcCloseMemHandle(mapped); }
};

}  // namespace

std::unique_ptr<WorkspaceMemory> NewIpcMemory() { return std::make_unique<IpcMemory>(); }

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
