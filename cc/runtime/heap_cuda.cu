#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "core/packet.h"
#include "runtime/cuda_check.h"
#include "runtime/fault.h"
#include "runtime/heap_cuda.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

std::mutex g_mutex;

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
// say why. This does, once per device of each heap.
void WatchFaults() {
  std::weak_ptr<HeapCuda> watched;
  std::set<int64_t> told;
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto heap = CurrentHeapCuda();
    if (heap == nullptr) continue;
    if (watched.lock() != heap) {
      watched = heap;
      told.clear();
    }
    for (int64_t device : heap->devices()) {
      if (told.count(device) != 0) continue;
      if (const auto text = heap->FaultOf(device)) {
        std::fprintf(stderr, "%s\n", text->c_str());
        std::fflush(stderr);
        told.insert(device);
      }
    }
  }
}

}  // namespace

std::shared_ptr<HeapCuda> CurrentHeapCuda() {
  return std::static_pointer_cast<HeapCuda>(CurrentHeap(HeapPlatform::kCuda));
}

bool AddKernels(const char* (*load)(int), std::string* error) {
  const auto heap = CurrentHeapCuda();
  if (heap != nullptr) {
    for (int ordinal : heap->ordinals()) {
      if (!LoadOn(ordinal, load, error)) return false;
    }
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  Loaders().push_back(load);
  return true;
}

bool HeapCuda::Allocate(std::string* error) {
  static std::atomic<bool> watching{false};
  for (size_t i = 0; i < config_.devices.size(); ++i) {
    CudaDevice device{};
    device.ordinal = config_.ordinals[i];
    device.id = config_.devices[i];
    devices_.push_back(device);  // the destructor frees what it has
    if (!AllocateOn(&devices_.back(), error)) return false;
  }
  for (CudaDevice& device : devices_) {
    for (const CudaDevice& other : devices_) device.peers[other.id] = other.heap;
  }
  if (!watching.exchange(true)) std::thread(WatchFaults).detach();
  return true;
}

bool HeapCuda::AllocateOn(CudaDevice* device, std::string* error) {
  JFLUX_CUDA_OR_FALSE(cudaSetDevice(device->ordinal), error);
  JFLUX_CUDA_OR_FALSE(
      cudaDeviceGetAttribute(&device->sm_count, cudaDevAttrMultiProcessorCount, device->ordinal),
      error);
  for (int other : config_.ordinals) {
    if (other == device->ordinal) continue;
    int can = 0;
    JFLUX_CUDA_OR_FALSE(cudaDeviceCanAccessPeer(&can, device->ordinal, other), error);
    if (can == 0) {
      *error =
          "GPU " + std::to_string(device->ordinal) + " cannot access GPU " + std::to_string(other) +
          " (no NVLink or peer access between them): hide one of them (CUDA_VISIBLE_DEVICES), or "
          "see `nvidia-smi topo -p2p rw`";
      return false;
    }
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(other, 0);
    if (enabled != cudaSuccess && enabled != cudaErrorPeerAccessAlreadyEnabled) {
      *error = CudaReason("cudaDeviceEnablePeerAccess", enabled);
      return false;
    }
    cudaGetLastError();
  }
  if (cudaMalloc(&device->heap, kDeviceStateBytes + heap_bytes() + kProbeBytes) != cudaSuccess) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    *error = "cannot allocate the symmetric heap of " + std::to_string(heap_bytes()) +
             " bytes on GPU " + std::to_string(device->ordinal) + ", which has " +
             std::to_string(free_bytes) +
             " free: call jflux.init(heap_bytes=...) with less, or leave more beside JAX's pool "
             "(XLA_PYTHON_CLIENT_MEM_FRACTION)";
    return false;
  }
  JFLUX_CUDA_OR_FALSE(cudaMemset(device->heap, 0, kDeviceStateBytes + heap_bytes()), error);
  JFLUX_CUDA_OR_FALSE(
      cudaHostAlloc(reinterpret_cast<void**>(&device->fault), sizeof(Fault), cudaHostAllocMapped),
      error);
  std::memset(device->fault, 0, sizeof(Fault));
  DeviceState state{};
  JFLUX_CUDA_OR_FALSE(
      cudaHostGetDevicePointer(reinterpret_cast<void**>(&state.fault), device->fault, 0), error);
  state.deadline_ns = static_cast<uint64_t>(deadline_s() * 1e9);
  JFLUX_CUDA_OR_FALSE(cudaMemcpy(device->heap, &state, sizeof(state), cudaMemcpyHostToDevice),
                      error);
  if (!LoadKernels(error)) return false;
  std::vector<const char* (*)(int)> loaders;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    loaders = Loaders();
  }
  for (const auto load : loaders) {
    if (!LoadOn(device->ordinal, load, error)) return false;
  }
  JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  return true;
}

HeapCuda::~HeapCuda() {
  for (CudaDevice& device : devices_) {
    cudaSetDevice(device.ordinal);
    cudaFree(device.heap);
    cudaFreeHost(device.fault);
  }
}

bool HeapCuda::Probe(std::string* error) {
  links_.clear();
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    int index = 0;  // of this device among all, so that no two probe the same area
    for (const auto& [id, heap] : device.peers) index += id < device.id;
    const int64_t area = kDeviceStateBytes + heap_bytes() + (index % kProbeAreas) * kProbeAreaBytes;
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

char* HeapCuda::SegmentOf(int64_t local, int64_t device) const {
  for (const CudaDevice& from : devices_) {
    if (from.id != local) continue;
    const auto peer = from.peers.find(device);
    return peer == from.peers.end() ? nullptr : peer->second;
  }
  return nullptr;
}

HeapUsage HeapCuda::Usage() {
  const int64_t taken = workspaces_.BytesTaken();
  return HeapUsage{taken, taken};
}

const CudaDevice* HeapCuda::DeviceOf(int ordinal) const {
  for (const CudaDevice& device : devices_) {
    if (device.ordinal == ordinal) return &device;
  }
  return nullptr;
}

std::optional<std::string> HeapCuda::FaultOf(int64_t local) const {
  for (const CudaDevice& device : devices_) {
    if (device.id == local && LoadAcquire(&device.fault->kind) != 0) {
      return Describe(*device.fault, deadline_s());
    }
  }
  return std::nullopt;
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

bool HeapCuda::Poison(std::string* error) {
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    const bool ok = workspaces_.ForEach([&](int64_t offset, int64_t bytes) -> bool {
      // Another process may have begun to write the half of the next call. The half of the last
      // call is free: its data has been read.
      WorkspaceHeader header;
      char* base = device.heap + offset;
      JFLUX_CUDA_OR_FALSE(cudaMemcpy(&header, base, sizeof(header), cudaMemcpyDeviceToHost), error);
      for (uint32_t epoch : {header.epoch, header.epoch + 1}) {
        if (epoch != header.epoch && shared_) continue;
        if (const auto packets = PacketLayout::OfTotal(bytes)) {
          JFLUX_CUDA_OR_FALSE(
              cudaMemset(base + packets->PacketOffset(epoch), kPacketPoison, packets->half_bytes),
              error);
        } else {
          const WorkspaceLayout layout = WorkspaceLayout::OfTotal(bytes);
          JFLUX_CUDA_OR_FALSE(cudaMemset(base + layout.DataOffset(epoch), 0xff, layout.data_bytes),
                              error);
        }
      }
      return true;
    });
    if (!ok) return false;
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  return true;
}

bool HeapCuda::SetEpochs(uint32_t epoch, std::string* error) {
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  WorkspaceHeader header{};
  header.epoch = epoch;
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    const bool ok = workspaces_.ForEach([&](int64_t offset, int64_t bytes) -> bool {
      char* base = device.heap + offset;
      // Signals of calls whose numbers were smaller would seem to be from later ones.
      JFLUX_CUDA_OR_FALSE(cudaMemset(base, 0, bytes), error);
      JFLUX_CUDA_OR_FALSE(cudaMemcpy(base, &header, sizeof(header), cudaMemcpyHostToDevice), error);
      return true;
    });
    if (!ok) return false;
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  return true;
}

}  // namespace jflux
