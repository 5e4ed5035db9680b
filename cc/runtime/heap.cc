#include "runtime/heap.h"

#include <mutex>

#include "runtime/heap_cpu.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/heap_cuda_ipc.h"
#include "runtime/heap_cuda_peer.h"
#endif

namespace jflux {
namespace {

std::mutex g_mutex;
std::shared_ptr<Heap>& Current(HeapPlatform platform) {
  static auto* current = new std::shared_ptr<Heap>[2];  // outlives XLA's threads on purpose
  return current[static_cast<int>(platform)];
}

}  // namespace

bool Heap::Export(std::string*, std::string* error) const {
  *error = std::string("the heap's back end ") + name() + " is for one process";
  return false;
}

bool Heap::Attach(const std::string&, std::string* error) {
  *error = std::string("the heap's back end ") + name() + " is for one process";
  return false;
}

bool Heap::SetEpochs(uint32_t, std::string* error) {
  *error = std::string("the heap's back end ") + name() + " counts no calls of a workspace";
  return false;
}

std::optional<int64_t> Heap::FillView(const std::vector<int64_t>& devices, int32_t rank,
                                      int64_t offset, SymmetricView* view) const {
  *view = SymmetricView{};
  view->rank = rank;
  view->world = static_cast<int32_t>(devices.size());
  for (int32_t r = 0; r < view->world; ++r) {
    char* segment = SegmentOf(devices[rank], devices[r]);
    if (segment == nullptr) return devices[r];
    view->base[r] = segment + offset;
  }
  return std::nullopt;
}

std::shared_ptr<Heap> CreateHeap(const std::string& backend, const HeapConfig& config,
                                 std::string* error) {
  if (backend == "cpu") return HeapCpu::Create(config, error);
#ifdef JFLUX_WITH_CUDA
  if (backend == "cuda_peer") return HeapCudaPeer::Create(config, error);
  if (backend == "cuda_ipc") return HeapCudaIpc::Create(config, error);
#else
  if (backend.rfind("cuda", 0) == 0) {
    *error = "this build has no CUDA kernels";
    return nullptr;
  }
#endif
  *error = "the symmetric heap has no back end \"" + backend + "\"";
  return nullptr;
}

std::shared_ptr<Heap> CurrentHeap(HeapPlatform platform) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return Current(platform);
}

void SetCurrentHeap(HeapPlatform platform, std::shared_ptr<Heap> heap) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Current(platform).swap(heap);  // the old one is freed after the lock is released
}

}  // namespace jflux
