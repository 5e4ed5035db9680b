#include "runtime/heap.h"

#include <mutex>

#include "runtime/heap_cpu.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/heap_cuda.h"
#endif

namespace jflux {
namespace {

std::mutex g_mutex;
std::shared_ptr<Heap>& Current(HeapPlatform platform) {
  static auto* current = new std::shared_ptr<Heap>[2];  // outlives XLA's threads on purpose
  return current[static_cast<int>(platform)];
}

}  // namespace

namespace {
bool HasNone(const Heap& heap, const char* what, std::string* error) {
  *error = std::string("the heap's back end ") + heap.name() + " has no " + what;
  return false;
}
}  // namespace

bool Heap::AddWorkspace(const WorkspaceId&, std::string*, std::string* error) {
  return HasNone(*this, "reserved workspaces", error);
}
bool Heap::AttachWorkspace(const WorkspaceId&, const std::string&, std::string* error) {
  return HasNone(*this, "reserved workspaces", error);
}
bool Heap::CommitWorkspace(const WorkspaceId&, std::string* error) {
  return HasNone(*this, "reserved workspaces", error);
}
bool Heap::CloseWorkspace(const WorkspaceId&, std::string* error) {
  return HasNone(*this, "reserved workspaces", error);
}
bool Heap::FreeWorkspace(const WorkspaceId&, std::string* error) {
  return HasNone(*this, "reserved workspaces", error);
}
bool Heap::Probe(const WorkspaceId&, ProbeStep, std::string* error) {
  return HasNone(*this, "links", error);
}
bool Heap::SetEpochs(uint64_t, std::string* error) {
  return HasNone(*this, "calls that a workspace counts", error);
}

std::shared_ptr<Heap> CreateHeap(const std::string& backend, const HeapConfig& config,
                                 std::string* error) {
  if (backend == "cpu") return HeapCpu::Create(config, error);
#ifdef JFLUX_WITH_CUDA
  if (backend == "cuda") return HeapCuda::Create(config, error);
  if (backend == "nvshmem") return HeapCuda::CreateWithNvshmem(config, error);
#else
  if (backend == "cuda" || backend == "nvshmem") {
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
