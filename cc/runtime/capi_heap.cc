// The C interface of the symmetric heap, and of the timeline that GPUs' kernels write into it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/capi.h"
#include "runtime/heap.h"
#include "runtime/nvshmem.h"
#include "runtime/reason.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#include "runtime/heap_cuda.h"
#include "runtime/kernels_cuda.h"
#include "runtime/peers.h"
#endif

namespace {

using jflux::Heap;
using jflux::HeapPlatform;
using jflux::Reason;

HeapPlatform PlatformOf(const char* platform) {
  return std::strcmp(platform, "cpu") == 0 ? HeapPlatform::kCpu : HeapPlatform::kCuda;
}

std::shared_ptr<Heap> HeapOf(const char* platform) {
  return jflux::CurrentHeap(PlatformOf(platform));
}

// f(heap, &error) -> bool, on the heap of a platform, if there is one.
template <typename F>
const char* OnHeap(const char* platform, F&& f) {
  const auto heap = HeapOf(platform);
  std::string error;
  if (heap == nullptr) {
    return Reason(std::string("the symmetric heap does not exist on the platform ") + platform);
  }
  return f(*heap, &error) ? nullptr : Reason(error);
}

// f(heap, id, &error) -> bool, on the heap of a platform, if there is one.
template <typename F>
const char* OnWorkspace(const char* platform, const JfluxWorkspace* w, F&& f) {
  const auto id = jflux::WorkspaceId::Of(
      std::vector<int64_t>(w->devices, w->devices + w->num_devices), w->bytes);
  return OnHeap(platform, [&](Heap& heap, std::string* error) { return f(heap, id, error); });
}

}  // namespace

const char* jflux_heap_create(const char* platform, const char* backend,
                              const JfluxHeapConfig* config) {
  jflux::HeapConfig c;
  c.devices.assign(config->devices, config->devices + config->num_devices);
  if (config->ordinals != nullptr) {
    c.ordinals.assign(config->ordinals, config->ordinals + config->num_devices);
  }
  c.heap_bytes = config->heap_bytes;
  c.deadline_s = config->deadline_s;
  c.warn_s = config->warn_s;
  c.leads = config->leads != 0;
  std::string error;
  auto heap = jflux::CreateHeap(backend, c, &error);
  if (heap == nullptr) return Reason(error);
  jflux::SetCurrentHeap(PlatformOf(platform), std::move(heap));
  return nullptr;
}

const char* jflux_heap_export(const char* platform, const char** handle) {
  thread_local std::string kept;
  const char* reason =
      OnHeap(platform, [](Heap& heap, std::string* error) { return heap.Export(&kept, error); });
  *handle = kept.c_str();
  return reason;
}

const char* jflux_heap_attach(const char* platform, const char* handle) {
  return OnHeap(platform,
                [&](Heap& heap, std::string* error) { return heap.Attach(handle, error); });
}

void jflux_heap_close(const char* platform) {
  if (const auto heap = HeapOf(platform)) heap->Close();
}

const char* jflux_heap_probe(const char* platform, const JfluxWorkspace* w, int step) {
  return OnWorkspace(platform, w, [&](Heap& heap, const auto& id, std::string* error) {
    return heap.Probe(id, static_cast<jflux::ProbeStep>(step), error);
  });
}

int jflux_heap_links(const char* platform, JfluxLink* links, int capacity) {
  const auto heap = HeapOf(platform);
  if (heap == nullptr) return 0;
  int count = 0;
  for (const jflux::Link& l : heap->links()) {
    if (count < capacity) {
      links[count] = JfluxLink{l.from, l.to, l.push_gbps, l.pull_gbps, l.signal_us};
    }
    ++count;
  }
  return count;
}

void jflux_heap_shutdown(const char* platform, int keep) {
  static auto* kept = new std::vector<std::shared_ptr<Heap>>;
  if (keep != 0) kept->push_back(HeapOf(platform));
  jflux::SetCurrentHeap(PlatformOf(platform), nullptr);
}

const char* jflux_heap_add_workspace(const char* platform, const JfluxWorkspace* w,
                                     const char** handle) {
  thread_local std::string kept;
  const char* reason = OnWorkspace(platform, w, [](Heap& heap, const auto& id, std::string* error) {
    return heap.AddWorkspace(id, &kept, error);
  });
  *handle = kept.c_str();
  return reason;
}

const char* jflux_heap_attach_workspace(const char* platform, const JfluxWorkspace* w,
                                        const char* handle) {
  return OnWorkspace(platform, w, [&](Heap& heap, const auto& id, std::string* error) {
    return heap.AttachWorkspace(id, handle, error);
  });
}

const char* jflux_heap_commit_workspace(const char* platform, const JfluxWorkspace* w) {
  return OnWorkspace(platform, w, [](Heap& heap, const auto& id, std::string* error) {
    return heap.CommitWorkspace(id, error);
  });
}

int jflux_heap_has_workspace(const char* platform, const JfluxWorkspace* w) {
  return OnWorkspace(platform, w, [](Heap& heap, const auto& id, std::string*) {
           return heap.HasWorkspace(id);
         }) == nullptr;
}

const char* jflux_heap_close_workspace(const char* platform, const JfluxWorkspace* w) {
  return OnWorkspace(platform, w, [](Heap& heap, const auto& id, std::string* error) {
    return heap.CloseWorkspace(id, error);
  });
}

const char* jflux_heap_free_workspace(const char* platform, const JfluxWorkspace* w) {
  return OnWorkspace(platform, w, [](Heap& heap, const auto& id, std::string* error) {
    return heap.FreeWorkspace(id, error);
  });
}

const char* jflux_heap_unused_workspaces(const char* platform) {
  const auto heap = HeapOf(platform);
  std::string text;
  if (heap != nullptr) {
    for (const jflux::WorkspaceId& id : heap->UnusedWorkspaces()) {
      text += (text.empty() ? "" : ";") + std::to_string(id.bytes) + ":";
      for (size_t i = 0; i < id.devices.size(); ++i) {
        text += (i == 0 ? "" : ",") + std::to_string(id.devices[i]);
      }
    }
  }
  return Reason(text);
}

void jflux_heap_usage(const char* platform, int64_t* in_use, int64_t* touched) {
  const auto heap = HeapOf(platform);
  const jflux::HeapUsage usage = heap == nullptr ? jflux::HeapUsage{0, 0} : heap->Usage();
  *in_use = usage.in_use;
  *touched = usage.touched;
}

const char* jflux_heap_test_hooks(const char* platform, int skip_waits, int max_delay_us) {
  const jflux::TestHooks hooks{static_cast<uint32_t>(skip_waits),
                               static_cast<uint32_t>(max_delay_us)};
  return OnHeap(platform,
                [&](Heap& heap, std::string* error) { return heap.SetHooks(hooks, error); });
}

const char* jflux_heap_poison(const char* platform) {
  return OnHeap(platform, [](Heap& heap, std::string* error) { return heap.Poison(error); });
}

const char* jflux_heap_set_epochs(const char* platform, uint64_t epoch) {
  return OnHeap(platform,
                [&](Heap& heap, std::string* error) { return heap.SetEpochs(epoch, error); });
}

// ---- NVSHMEM -----------------------------------------------------------------------------------

const char* jflux_nvshmem_load(const char* host_library, const char* plugin) {
  std::string error;
  return jflux::Nvshmem::Get().Load(host_library, plugin, &error) ? nullptr : Reason(error);
}

const char* jflux_nvshmem_unique_id(const char** id) {
  thread_local std::string kept;
  kept.clear();
  std::string error;
  const bool ok = jflux::Nvshmem::Get().UniqueId(&kept, &error);
  *id = kept.c_str();
  return ok ? nullptr : Reason(error);
}

const char* jflux_nvshmem_start(const char* id, int rank, int world, int ordinal, int64_t bytes) {
  std::string error;
  const bool ok = jflux::Nvshmem::Get().Start(id, rank, world, ordinal, bytes, &error);
  return ok ? nullptr : Reason(error);
}

int64_t jflux_nvshmem_arena_bytes(void) { return jflux::Nvshmem::Get().arena_bytes(); }

#ifdef JFLUX_WITH_CUDA

int64_t jflux_probe_bytes(int num_devices) { return jflux::ProbeBytes(num_devices); }
int64_t jflux_cuda_free_bytes(const int* ordinals, int count) {
  int64_t least = 0;
  for (int i = 0; i < count; ++i) {
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaSetDevice(ordinals[i]) != cudaSuccess ||
        cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    least = i == 0 ? free_bytes : std::min<int64_t>(least, free_bytes);
  }
  return least;
}

const char* jflux_cuda_peers(JfluxPeerAccess* peers, int capacity, int* count) {
  std::string error;
  std::vector<jflux::PeerAccess> found;
  if (!jflux::ReadPeers(&found, &error)) return Reason(error);
  *count = 0;
  for (const jflux::PeerAccess& p : found) {
    if (*count < capacity) peers[*count] = {p.from, p.to, p.loads_and_stores, p.atomics};
    ++*count;
  }
  return nullptr;
}

const char* jflux_cuda_arch(int ordinal, int32_t* arch) {
  std::string error;
  int found = 0;
  if (cudaSetDevice(ordinal) != cudaSuccess) {
    return Reason("GPU " + std::to_string(ordinal) + " cannot be used");
  }
  if (!jflux::LoadedArch(&found, &error)) return Reason(error);
  *arch = found;
  return nullptr;
}

int64_t jflux_cuda_launches(void) { return jflux::CudaLaunches(); }
void jflux_cuda_fail_launches(int ordinal) { jflux::FailingOrdinal() = ordinal; }

namespace {

template <typename F>
const char* OnCudaHeap(F&& f) {
  return OnHeap("cuda", [&](Heap& heap, std::string* error) {
    return f(static_cast<jflux::HeapCuda&>(heap), error);
  });
}

}  // namespace

const char* jflux_cuda_timeline_start(int64_t capacity) {
  return OnCudaHeap([&](jflux::HeapCuda& heap, std::string* error) {
    return heap.StartTimeline(static_cast<uint32_t>(capacity), error);
  });
}

const char* jflux_cuda_timeline_read(int64_t id, JfluxEvent* events, int64_t capacity,
                                     int64_t* count) {
  static_assert(sizeof(JfluxEvent) == sizeof(jflux::TimelineEvent));
  return OnCudaHeap([&](jflux::HeapCuda& heap, std::string* error) {
    std::vector<jflux::TimelineEvent> recorded;
    uint32_t missed = 0;
    if (!heap.ReadTimeline(id, &recorded, &missed, error)) return false;
    *count = static_cast<int64_t>(recorded.size()) + missed;
    const auto copied = std::min<size_t>(recorded.size(), capacity);
    std::memcpy(events, recorded.data(), copied * sizeof(JfluxEvent));
    return true;
  });
}

const char* jflux_cuda_timeline_stop(void) {
  return OnCudaHeap(
      [](jflux::HeapCuda& heap, std::string* error) { return heap.StopTimeline(error); });
}

const char* jflux_heap_read(const char*, const JfluxWorkspace* w, int64_t device, int64_t offset,
                            int64_t bytes, char* to) {
  return OnWorkspace("cuda", w, [&](Heap& heap, const auto& id, std::string* error) {
    return static_cast<jflux::HeapCuda&>(heap).Read(id, device, offset, bytes, to, error);
  });
}

#else

namespace {
const char* NotBuilt() { return Reason("this build has no CUDA kernels"); }
}  // namespace

int64_t jflux_probe_bytes(int) { return 0; }
int64_t jflux_cuda_free_bytes(const int*, int) { return 0; }
const char* jflux_cuda_peers(JfluxPeerAccess*, int, int*) { return NotBuilt(); }
const char* jflux_cuda_arch(int, int32_t*) { return NotBuilt(); }
int64_t jflux_cuda_launches(void) { return 0; }
void jflux_cuda_fail_launches(int) {}
const char* jflux_cuda_timeline_start(int64_t) { return NotBuilt(); }
const char* jflux_cuda_timeline_read(int64_t, JfluxEvent*, int64_t, int64_t*) { return NotBuilt(); }
const char* jflux_cuda_timeline_stop(void) { return NotBuilt(); }
const char* jflux_heap_read(const char*, const JfluxWorkspace*, int64_t, int64_t, int64_t, char*) {
  return NotBuilt();
}

#endif  // JFLUX_WITH_CUDA
