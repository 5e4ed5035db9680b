// Back end `cuda_ipc`: several processes of one host, each with one GPU or more. Each opens the
// other processes' segments with CUDA IPC handles on all of its devices. The processes agree on
// where workspaces are before they call WorkspaceMap::Add.
#ifndef JFLUX_RUNTIME_HEAP_CUDA_IPC_H_
#define JFLUX_RUNTIME_HEAP_CUDA_IPC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/heap_cuda.h"

namespace jflux {

class HeapCudaIpc final : public HeapCuda {
 public:
  static std::shared_ptr<HeapCudaIpc> Create(const HeapConfig& config, std::string* error);
  ~HeapCudaIpc() override;

  const char* name() const override { return "cuda_ipc"; }
  // "id=hex digits" of each device, with commas between.
  bool Export(std::string* handle, std::string* error) const override;
  bool Attach(const std::string& handle, std::string* error) override;

 private:
  explicit HeapCudaIpc(HeapConfig config)
      : HeapCuda(std::move(config), WorkspaceMap::Places::kAgreed) {}
  bool AttachDevice(int64_t id, const std::string& hex, std::string* error);

  std::vector<std::pair<int, void*>> opened_;  // (ordinal, address)
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CUDA_IPC_H_
