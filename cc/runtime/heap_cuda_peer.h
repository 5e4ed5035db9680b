// Back end `cuda_peer`: one process drives all GPUs, which reach each other's memory through peer
// access (HeapCuda::Allocate). The process alone decides where workspaces are.
#ifndef JFLUX_RUNTIME_HEAP_CUDA_PEER_H_
#define JFLUX_RUNTIME_HEAP_CUDA_PEER_H_

#include <memory>
#include <string>
#include <utility>

#include "runtime/heap_cuda.h"

namespace jflux {

class HeapCudaPeer final : public HeapCuda {
 public:
  static std::shared_ptr<HeapCudaPeer> Create(const HeapConfig& config, std::string* error) {
    std::shared_ptr<HeapCudaPeer> heap(new HeapCudaPeer(config));
    return heap->Allocate(error) ? heap : nullptr;
  }
  const char* name() const override { return "cuda_peer"; }

 private:
  explicit HeapCudaPeer(HeapConfig config)
      : HeapCuda(std::move(config), WorkspaceMap::Places::kHere) {}
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CUDA_PEER_H_
