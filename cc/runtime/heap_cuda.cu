#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "core/packet.h"
#include "runtime/cuda_check.h"
#include "runtime/fault.h"
#include "runtime/heap_cuda.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

std::mutex g_mutex;
std::shared_ptr<HeapCuda>& Current() {
  static auto* current = new std::shared_ptr<HeapCuda>;
  return *current;
}

// Of custom calls; under g_mutex.
std::vector<const char* (*)(int)>& Loaders() {
  static auto* loaders = new std::vector<const char* (*)(int)>;
  return *loaders;
}

bool LoadOn(int ordinal, const char* (*load)(int), std::string* error) {
  const char* reason = load(ordinal);
  if (reason != nullptr) {
    *error = "the kernels of a custom call cannot be loaded on GPU " + std::to_string(ordinal) +
             ": " + reason;
  }
  return reason == nullptr;
}

// A kernel that gave up leaves a record and traps; XLA then reports a failed launch, which does not
// say why. This does.
void WatchFaults() {
  std::vector<const Fault*> told;
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto heap = CurrentHeapCuda();
    if (heap == nullptr) continue;
    for (int ordinal = 0; ordinal < 64; ++ordinal) {
      const CudaDevice* device = heap->DeviceOf(ordinal);
      if (device == nullptr) continue;
      bool known = false;
      for (const Fault* f : told) known |= f == device->fault;
      if (known) continue;
      if (const auto text = heap->FaultOf(*device)) {
        std::fprintf(stderr, "%s\n", text->c_str());
        std::fflush(stderr);
        told.push_back(device->fault);
      }
    }
  }
}

__global__ void ReadTimer(volatile uint64_t* now) { *now = NowNs(); }

// By how much the current device's global timer is ahead of the host's clock: between the two sides
// of the shortest of several exchanges, so to a few microseconds.
bool TimerAhead(int64_t* ahead_ns, std::string* error) {
  uint64_t *host = nullptr, *device = nullptr;
  JFLUX_CUDA_OR_FALSE(cudaHostAlloc(&host, sizeof(uint64_t), cudaHostAllocMapped), error);
  JFLUX_CUDA_OR_FALSE(cudaHostGetDevicePointer(&device, host, 0), error);
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  int64_t shortest = INT64_MAX;
  for (int i = 0; i < 50; ++i) {
    const int64_t before = now();
    ReadTimer<<<1, 1>>>(device);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    const int64_t after = now();
    if (after - before < shortest) {
      shortest = after - before;
      *ahead_ns = static_cast<int64_t>(*host) - (before + after) / 2;
    }
  }
  JFLUX_CUDA_OR_FALSE(cudaFreeHost(host), error);
  return true;
}

}  // namespace

std::shared_ptr<HeapCuda> CurrentHeapCuda() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return Current();
}

void SetCurrentHeapCuda(std::shared_ptr<HeapCuda> heap) {
  static std::atomic<bool> watching{false};
  if (heap != nullptr && !watching.exchange(true)) std::thread(WatchFaults).detach();
  std::lock_guard<std::mutex> lock(g_mutex);
  Current() = std::move(heap);
}

bool AddKernels(const char* (*load)(int), std::string* error) {
  const auto heap = CurrentHeapCuda();
  for (int ordinal = 0; heap != nullptr && ordinal < 64; ++ordinal) {
    if (heap->DeviceOf(ordinal) != nullptr && !LoadOn(ordinal, load, error)) return false;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  Loaders().push_back(load);
  return true;
}

std::shared_ptr<HeapCuda> HeapCuda::Create(const std::vector<int>& ordinals,
                                           const std::vector<int64_t>& ids, int64_t heap_bytes,
                                           double deadline_s, std::string* error) {
  std::shared_ptr<HeapCuda> heap(new HeapCuda);
  heap->heap_bytes_ = heap_bytes;
  heap->deadline_s_ = deadline_s;
  for (size_t i = 0; i < ordinals.size(); ++i) {
    CudaDevice device{};
    device.ordinal = ordinals[i];
    device.id = ids[i];
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(
        cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, device.ordinal),
        error);
    for (int other : ordinals) {
      if (other == device.ordinal) continue;
      int can = 0;
      JFLUX_CUDA_OR_FALSE(cudaDeviceCanAccessPeer(&can, device.ordinal, other), error);
      if (can == 0) {
        *error =
            "GPU " + std::to_string(device.ordinal) + " cannot access GPU " +
            std::to_string(other) +
            " (no NVLink or peer access between them): hide one of them (CUDA_VISIBLE_DEVICES), or "
            "see `nvidia-smi topo -p2p rw`";
        return nullptr;
      }
      const cudaError_t enabled = cudaDeviceEnablePeerAccess(other, 0);
      if (enabled != cudaSuccess && enabled != cudaErrorPeerAccessAlreadyEnabled) {
        *error = CudaReason("cudaDeviceEnablePeerAccess", enabled);
        return nullptr;
      }
      cudaGetLastError();
    }
    if (cudaMalloc(&device.heap, kDeviceStateBytes + heap_bytes + kProbeBytes) != cudaSuccess) {
      cudaGetLastError();
      size_t free_bytes = 0, total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      *error = "cannot allocate the symmetric heap of " + std::to_string(heap_bytes) +
               " bytes on GPU " + std::to_string(device.ordinal) + ", which has " +
               std::to_string(free_bytes) +
               " free: call jflux.init(heap_bytes=...) with less, or leave more beside JAX's pool "
               "(XLA_PYTHON_CLIENT_MEM_FRACTION)";
      return nullptr;
    }
    heap->devices_.push_back(device);
    CudaDevice& kept = heap->devices_.back();
    JFLUX_CUDA_OR_FALSE(cudaMemset(kept.heap, 0, kDeviceStateBytes + heap_bytes), error);
    JFLUX_CUDA_OR_FALSE(
        cudaHostAlloc(reinterpret_cast<void**>(&kept.fault), sizeof(Fault), cudaHostAllocMapped),
        error);
    std::memset(kept.fault, 0, sizeof(Fault));
    DeviceState state{};
    JFLUX_CUDA_OR_FALSE(
        cudaHostGetDevicePointer(reinterpret_cast<void**>(&state.fault), kept.fault, 0), error);
    state.deadline_ns = static_cast<uint64_t>(deadline_s * 1e9);
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(kept.heap, &state, sizeof(state), cudaMemcpyHostToDevice),
                        error);
    if (!LoadKernels(error)) return nullptr;
    std::vector<const char* (*)(int)> loaders;
    {
      std::lock_guard<std::mutex> lock(g_mutex);
      loaders = Loaders();
    }
    for (const auto load : loaders) {
      if (!LoadOn(device.ordinal, load, error)) return nullptr;
    }
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  for (CudaDevice& device : heap->devices_) {
    for (const CudaDevice& other : heap->devices_) device.peers[other.id] = other.heap;
  }
  return heap;
}

HeapCuda::~HeapCuda() {
  for (auto& [ordinal, address] : opened_) {
    cudaSetDevice(ordinal);
    cudaIpcCloseMemHandle(address);
  }
  for (CudaDevice& device : devices_) {
    cudaSetDevice(device.ordinal);
    cudaFree(device.heap);
    cudaFreeHost(device.fault);
  }
}

bool HeapCuda::Export(int64_t id, std::string* handle, std::string* error) const {
  for (const CudaDevice& device : devices_) {
    if (device.id != id) continue;
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    cudaIpcMemHandle_t ipc;
    JFLUX_CUDA_OR_FALSE(cudaIpcGetMemHandle(&ipc, device.heap), error);
    handle->clear();
    for (size_t i = 0; i < sizeof(ipc); ++i) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", reinterpret_cast<unsigned char*>(&ipc)[i]);
      *handle += digits;
    }
    return true;
  }
  *error = "device " + std::to_string(id) + " is not of this process";
  return false;
}

bool HeapCuda::Attach(int64_t id, const std::string& handle, std::string* error) {
  cudaIpcMemHandle_t ipc;
  if (handle.size() != 2 * sizeof(ipc)) {
    *error = "malformed IPC handle of device " + std::to_string(id);
    return false;
  }
  for (size_t i = 0; i < sizeof(ipc); ++i) {
    reinterpret_cast<unsigned char*>(&ipc)[i] =
        static_cast<unsigned char>(std::stoi(handle.substr(2 * i, 2), nullptr, 16));
  }
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    void* address = nullptr;
    const cudaError_t opened = cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess);
    if (opened != cudaSuccess) {
      *error = CudaReason("cudaIpcOpenMemHandle", opened) + " (for device " + std::to_string(id) +
               " on GPU " + std::to_string(device.ordinal) +
               "): all processes must run on one host and see each other's GPUs, and in one "
               "container if in any";
      return false;
    }
    opened_.emplace_back(device.ordinal, address);
    device.peers[id] = static_cast<char*>(address);
  }
  return true;
}

bool HeapCuda::Probe(std::string* error) {
  links_.clear();
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    int index = 0;  // of this device among all, so that no two probe the same area
    for (const auto& [id, heap] : device.peers) index += id < device.id;
    const int64_t area = kDeviceStateBytes + heap_bytes_ + (index % kProbeAreas) * kProbeAreaBytes;
    for (const auto& [id, heap] : device.peers) {
      if (id == device.id) continue;
      links_.push_back(ProbeLink(device.id, id, device.heap + area, heap + area));
      if (!links_.back().fault.empty()) {
        *error = "the link from device " + std::to_string(device.id) + " to device " +
                 std::to_string(id) + " cannot be trusted: " + links_.back().fault +
                 "; hide one of them (CUDA_VISIBLE_DEVICES), and have the link checked";
        return false;
      }
    }
  }
  return true;
}

bool HeapCuda::AddWorkspace(const std::vector<int64_t>& groups, int64_t total_bytes, int64_t offset,
                            std::string* error) {
  if (offset < kDeviceStateBytes || offset + total_bytes > kDeviceStateBytes + heap_bytes_) {
    *error = "workspace outside the heap";
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  workspaces_.push_back(Workspace{groups, total_bytes, offset});
  taken_ = Max(taken_, offset - kDeviceStateBytes + total_bytes);
  return true;
}

std::optional<int64_t> HeapCuda::FindWorkspace(const int64_t* groups, size_t count,
                                               int64_t total_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Workspace& c : workspaces_) {
    if (c.total_bytes == total_bytes && c.groups.size() == count &&
        std::equal(c.groups.begin(), c.groups.end(), groups)) {
      return c.offset;
    }
  }
  if (!opened_.empty() || taken_ + total_bytes > heap_bytes_) return std::nullopt;
  workspaces_.push_back(Workspace{std::vector<int64_t>(groups, groups + count), total_bytes,
                                  kDeviceStateBytes + taken_});
  taken_ += total_bytes;
  return workspaces_.back().offset;
}

int64_t HeapCuda::BytesTaken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return taken_;
}

CudaDevice* HeapCuda::DeviceOf(int ordinal) {
  for (CudaDevice& device : devices_) {
    if (device.ordinal == ordinal) return &device;
  }
  return nullptr;
}

std::optional<std::string> HeapCuda::FaultOf(const CudaDevice& device) const {
  if (LoadAcquire(&device.fault->kind) == 0) return std::nullopt;
  return Describe(*device.fault, deadline_s_);
}

bool HeapCuda::SetHooks(const TestHooks& hooks, std::string* error) {
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(device.heap + offsetof(DeviceState, hooks), &hooks,
                                   sizeof(hooks), cudaMemcpyHostToDevice),
                        error);
  }
  return true;
}

bool HeapCuda::StartTimeline(uint32_t capacity, std::string* error) {
  if (!StopTimeline(error)) return false;
  for (CudaDevice& device : devices_) {
    Timeline& t = device.timeline;
    t.capacity = capacity;
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaMalloc(&t.events, capacity * sizeof(TimelineEvent)), error);
    JFLUX_CUDA_OR_FALSE(cudaMalloc(&t.count, sizeof(*t.count)), error);
    JFLUX_CUDA_OR_FALSE(cudaMemset(t.count, 0, sizeof(*t.count)), error);
    if (!TimerAhead(&device.timer_ahead_ns, error)) return false;
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(device.heap + offsetof(DeviceState, timeline), &t, sizeof(t),
                                   cudaMemcpyHostToDevice),
                        error);
  }
  return true;
}

bool HeapCuda::ReadTimeline(int64_t id, std::vector<TimelineEvent>* events, uint32_t* missed,
                            std::string* error) {
  events->clear();
  *missed = 0;
  for (CudaDevice& device : devices_) {
    const Timeline& t = device.timeline;
    if (device.id != id || t.events == nullptr) continue;
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    uint32_t count = 0;
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(&count, t.count, sizeof(count), cudaMemcpyDeviceToHost), error);
    events->resize(Min(count, t.capacity));
    *missed = count - static_cast<uint32_t>(events->size());
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(events->data(), t.events, events->size() * sizeof(TimelineEvent),
                                   cudaMemcpyDeviceToHost),
                        error);
    for (TimelineEvent& e : *events) {
      e.begin_ns -= device.timer_ahead_ns;
      e.end_ns -= device.timer_ahead_ns;
    }
  }
  return true;
}

bool HeapCuda::StopTimeline(std::string* error) {
  for (CudaDevice& device : devices_) {
    Timeline& t = device.timeline;
    if (t.events == nullptr) continue;
    const Timeline none{};
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(device.heap + offsetof(DeviceState, timeline), &none,
                                   sizeof(none), cudaMemcpyHostToDevice),
                        error);
    JFLUX_CUDA_OR_FALSE(cudaFree(t.events), error);
    JFLUX_CUDA_OR_FALSE(cudaFree(t.count), error);
    t = none;
  }
  return true;
}

bool HeapCuda::Poison(std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    for (const Workspace& c : workspaces_) {
      // Another process may have begun to write the half of the next call; the half of the last
      // finished one is safe.
      WorkspaceHeader header;
      JFLUX_CUDA_OR_FALSE(
          cudaMemcpy(&header, device.heap + c.offset, sizeof(header), cudaMemcpyDeviceToHost),
          error);
      char* base = device.heap + c.offset;
      for (uint32_t epoch : {header.epoch, header.epoch + 1}) {
        if (epoch != header.epoch && !opened_.empty()) continue;
        if (const auto packets = PacketLayout::OfTotal(c.total_bytes)) {
          JFLUX_CUDA_OR_FALSE(
              cudaMemset(base + packets->PacketOffset(epoch), kPacketPoison, packets->half_bytes),
              error);
        } else {
          const WorkspaceLayout layout = WorkspaceLayout::OfTotal(c.total_bytes);
          JFLUX_CUDA_OR_FALSE(cudaMemset(base + layout.DataOffset(epoch), 0xff, layout.data_bytes),
                              error);
        }
      }
    }
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  return true;
}

bool HeapCuda::SetEpochs(uint32_t epoch, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  WorkspaceHeader header{};
  header.epoch = epoch;
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    for (const Workspace& c : workspaces_) {
      char* base = device.heap + c.offset;
      // Signals of calls whose numbers were smaller would seem to be from later ones.
      JFLUX_CUDA_OR_FALSE(cudaMemset(base, 0, c.total_bytes), error);
      JFLUX_CUDA_OR_FALSE(cudaMemcpy(base, &header, sizeof(header), cudaMemcpyHostToDevice), error);
    }
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  return true;
}

}  // namespace jflux
