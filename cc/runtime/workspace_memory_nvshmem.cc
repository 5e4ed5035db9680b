#include <sstream>

#include "runtime/nvshmem.h"
#include "runtime/workspace_memory.h"

namespace jflux {
namespace {

// A handle is "pe+offset": of the process, and in its arena.
class NvshmemMemory final : public WorkspaceMemory {
 public:
  bool Allocate(int, int64_t bytes, char** address, std::string* error) override {
    int64_t free_bytes = 0;
    *address = Nvshmem::Get().Take(bytes, &free_bytes);
    if (*address != nullptr) return true;
    *error = "NVSHMEM's arena, which was taken when NVSHMEM started, has " +
             std::to_string(free_bytes) + " bytes free in all";
    return false;
  }

  void Free(char* address) override { Nvshmem::Get().Give(address); }

  bool Export(char* address, std::string* handle, std::string*) override {
    const Nvshmem& nvshmem = Nvshmem::Get();
    *handle = std::to_string(nvshmem.pe()) + "+" + std::to_string(nvshmem.OffsetOf(address));
    return true;
  }

  bool Open(int, const std::string& handle, PeerCopy* copy, std::string* error) override {
    const Nvshmem& nvshmem = Nvshmem::Get();
    std::istringstream in(handle);
    int pe = -1;
    int64_t offset = -1;
    char plus = 0, more = 0;
    if (!(in >> pe >> plus >> offset) || plus != '+' || in >> more || pe < 0 ||
        pe >= nvshmem.world() || offset < 0 || offset >= nvshmem.arena_bytes()) {
      *error = "malformed handle of a peer process's workspace: " + handle;
      return false;
    }
    copy->remote = {nvshmem.AddressOf(offset), pe};
    copy->mapped = nvshmem.plugin()->peer_address(copy->remote.address, pe);
    return true;
  }

  void Close(char*) override {}  // NVSHMEM keeps it mapped
};

}  // namespace

std::unique_ptr<WorkspaceMemory> NewNvshmemMemory() { return std::make_unique<NvshmemMemory>(); }

}  // namespace jflux
