#ifdef JFLUX_WITH_CUDA

#include "runtime/heap_cuda.h"

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "core/packet.h"
#include "runtime/cuda_check.h"
#include "runtime/elastic_pool.h"
#include "runtime/fault.h"
#include "runtime/kernels_cuda.h"
#include "runtime/module_table.h"
#include "runtime/nvshmem.h"
#include "runtime/peers.h"

namespace jflux {
namespace {

std::mutex g_mutex;

// Functions that load the kernels of custom calls on a device; under g_mutex.
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

void Print(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
}

// A kernel that gave up leaves a record and traps; XLA then reports a failed launch, which does not
// say why. This does, once per device of each heap; and it prints the warnings of waits that last.
// A kernel that reports a value and goes on (gpu/device_state.h) leaves a record likewise.
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
      if (const auto text = heap->TakeWarning(device)) Print(*text);
      if (told.count(device) != 0) continue;
      if (const auto text = heap->FaultOf(device)) {
        Print(*text);
        told.insert(device);
        heap->AbortReason();  // aborts the others
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

HeapCuda::HeapCuda(HeapConfig config, const char* name, std::unique_ptr<WorkspaceMemory> memory)
    : Heap(std::move(config)),
      name_(name),
      workspaces_(
          [this] {
            std::map<int64_t, int> ordinals;
            for (size_t i = 0; i < config_.devices.size(); ++i) {
              ordinals[config_.devices[i]] = config_.ordinals[i];
            }
            return ordinals;
          }(),
          std::move(memory)) {}

std::shared_ptr<HeapCuda> HeapCuda::Create(const HeapConfig& config, std::string* error) {
  return Create(config, "cuda", NewIpcMemory(), error);
}

std::shared_ptr<HeapCuda> HeapCuda::CreateWithNvshmem(const HeapConfig& config,
                                                      std::string* error) {
  if (config.devices.size() != 1 || Nvshmem::Get().arena_bytes() == 0) {
    *error = config.devices.size() != 1 ? "NVSHMEM needs a process for each GPU"
                                        : "NVSHMEM has not been started";
    return nullptr;
  }
  return Create(config, "nvshmem", NewNvshmemMemory(), error);
}

std::shared_ptr<HeapCuda> HeapCuda::Create(const HeapConfig& config, const char* name,
                                           std::unique_ptr<WorkspaceMemory> memory,
                                           std::string* error) {
  static std::atomic<bool> watching{false};
  if (config.ordinals.size() > 1) {
    std::vector<PeerAccess> peers;
    if (!ReadPeers(&peers, error)) return nullptr;
    *error = WhyNoPeers(peers, config.ordinals);
    if (!error->empty()) return nullptr;
  }
  std::shared_ptr<HeapCuda> heap(new HeapCuda(config, name, std::move(memory)));
  for (size_t i = 0; i < config.devices.size(); ++i) {
    CudaDevice device{};
    device.ordinal = config.ordinals[i];
    device.id = config.devices[i];
    heap->devices_.push_back(device);  // the destructor frees what it has
    if (!heap->EnablePeerAccess(heap->devices_.back(), error) ||
        !heap->PrepareDevice(&heap->devices_.back(), error)) {
      return nullptr;
    }
  }
  if (!watching.exchange(true) && !StartThread(WatchFaults, error)) {
    watching = false;
    return nullptr;
  }
  return heap;
}

bool HeapCuda::EnablePeerAccess(const CudaDevice& device, std::string* error) {
  JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
  for (int other : config_.ordinals) {
    if (other == device.ordinal) continue;
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(other, 0);
    if (enabled != cudaSuccess && enabled != cudaErrorPeerAccessAlreadyEnabled) {
      *error = CudaReason("cudaDeviceEnablePeerAccess", enabled);
      return false;
    }
    cudaGetLastError();
  }
  return true;
}

bool HeapCuda::PrepareDevice(CudaDevice* device, std::string* error) {
  JFLUX_CUDA_OR_FALSE(cudaMalloc(reinterpret_cast<void**>(&device->state), sizeof(DeviceState)),
                      error);
  JFLUX_CUDA_OR_FALSE(cudaHostAlloc(reinterpret_cast<void**>(&device->records), sizeof(HostRecords),
                                    cudaHostAllocMapped),
                      error);
  std::memset(device->records, 0, sizeof(HostRecords));
  HostRecords* mapped = nullptr;
  JFLUX_CUDA_OR_FALSE(
      cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped), device->records, 0), error);
  DeviceState state{};
  state.limits.timeout_ns = NanosecondsOf(deadline_s());
  state.limits.warn_left_ns = WarnLeftNs();
  state.limits.fault = &mapped->fault;
  state.limits.warning = &mapped->warning;
  state.limits.abort = &mapped->abort;
  JFLUX_CUDA_OR_FALSE(cudaMemcpy(device->state, &state, sizeof(state), cudaMemcpyHostToDevice),
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
  if (!LoadModules(device->ordinal, error)) return false;
  JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  return ForgetLastStream(error);
}

void HeapCuda::Close() {
  std::string ignored;  // a device whose kernel has trapped runs nothing any more
  Synchronize(&ignored);
  workspaces_.CloseAll();
}

HeapCuda::~HeapCuda() {
  Close();
  for (CudaDevice& device : devices_) {
    cudaSetDevice(device.ordinal);
    cudaFree(device.state);
    cudaFreeHost(device.records);
  }
}

bool HeapCuda::Probe(const WorkspaceId& id, ProbeStep step, std::string* error) {
  if (step == ProbeStep::kCopies) links_.clear();
  std::vector<ProbedDevice> probed;
  for (const CudaDevice& device : devices_) {
    ProbedDevice p{device.id, device.ordinal, 0, {}};
    for (size_t i = 0; i < id.devices.size(); ++i) {
      if (id.devices[i] == device.id) p.index = static_cast<int>(i);
      p.copies.push_back(workspaces_.CopyOf(id, device.id, id.devices[i]));
      if (p.copies.back() != nullptr) continue;
      *error = "device " + std::to_string(id.devices[i]) + " is not part of the node's heap";
      return false;
    }
    probed.push_back(std::move(p));
  }
  return RunProbe(step, probed, id.devices, &links_, error);
}

bool HeapCuda::Synchronize(std::string* error) {
  cudaError_t first = cudaSuccess;
  for (const CudaDevice& device : devices_) {  // all of them, also if one has failed
    cudaError_t status = cudaSetDevice(device.ordinal);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (first == cudaSuccess) first = status;
  }
  JFLUX_CUDA_OR_FALSE(first, error);
  return true;
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
    const Fault& fault = device.records->fault;
    if (device.id != local || LoadAcquire(&fault.kind) == 0) continue;
    std::string text = Describe(fault, deadline_s());
    if (static_cast<FaultKind>(fault.kind) == FaultKind::kAborted) {
      std::lock_guard<std::mutex> lock(abort_mutex_);
      text += ": " + abort_reason_;
    }
    return text;
  }
  return std::nullopt;
}

void HeapCuda::Abort(const std::string& why) {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  if (!abort_reason_.empty()) return;
  abort_reason_ = why;
  for (const CudaDevice& device : devices_) StoreRelease(&device.records->abort, 1);
}

std::optional<std::string> HeapCuda::AbortReason() {
  for (const CudaDevice& device : devices_) {
    if (const auto fault = FaultOf(device.id)) {
      Abort("GPU " + std::to_string(device.ordinal) + ": " + *fault);
    }
  }
  std::lock_guard<std::mutex> lock(abort_mutex_);
  if (abort_reason_.empty()) return std::nullopt;
  return "this process has failed on " + abort_reason_;
}

std::optional<std::string> HeapCuda::TakeWarning(int64_t local) {
  for (const CudaDevice& device : devices_) {
    Fault* warning = &device.records->warning;
    if (device.id != local || LoadAcquire(&warning->kind) == 0) continue;
    const std::string text = DescribeWarning(*warning, warn_s(), deadline_s());
    StoreRelease(&warning->kind, 0);
    return text;
  }
  return std::nullopt;
}

bool HeapCuda::SetHooks(const TestHooks& hooks, std::string* error) {
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    JFLUX_CUDA_OR_FALSE(
        cudaMemcpy(&device.state->hooks, &hooks, sizeof(hooks), cudaMemcpyHostToDevice), error);
  }
  return true;
}

bool HeapCuda::Poison(std::string* error) {
  if (!Synchronize(error)) return false;
  const bool ok = workspaces_.ForEachCopy([&](const WorkspaceCopy& copy) -> bool {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(copy.ordinal), error);
    // Another process may have begun to write the half of the next call. The half of the last call
    // is free: its data has been read.
    WorkspaceHeader header;
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(&header, copy.base, sizeof(header), cudaMemcpyDeviceToHost),
                        error);
    const uint64_t last = EpochOfWord(header.epoch_and_id);
    for (uint64_t epoch : {last, last + 1}) {
      if (epoch != last && copy.is_shared) continue;
      if (const auto packets = PacketLayout::OfTotal(copy.bytes)) {
        JFLUX_CUDA_OR_FALSE(cudaMemset(copy.base + packets->PacketOffset(epoch), kPacketPoison,
                                       packets->half_bytes),
                            error);
      } else {
        const WorkspaceLayout layout = WorkspaceLayout::OfTotal(copy.bytes);
        JFLUX_CUDA_OR_FALSE(
            cudaMemset(copy.base + layout.DataOffset(epoch), 0xff, layout.data_bytes), error);
      }
    }
    return true;
  });
  return ok && Synchronize(error);
}

bool HeapCuda::Read(const WorkspaceId& id, int64_t device, int64_t offset, int64_t bytes, char* to,
                    std::string* error) {
  const char* copy = workspaces_.CopyOf(id, device, device);
  if (copy == nullptr || offset < 0 || bytes < 0 || offset + bytes > id.bytes) {
    *error = "the symmetric heap has no such memory";
    return false;
  }
  if (!Synchronize(error)) return false;
  JFLUX_CUDA_OR_FALSE(cudaMemcpy(to, copy + offset, bytes, cudaMemcpyDeviceToHost), error);
  return true;
}

bool HeapCuda::SetEpochs(uint64_t epoch, std::string* error) {
  if (!Synchronize(error)) return false;
  static_assert(offsetof(WorkspaceHeader, epoch_and_id) == 0);
  const uint64_t word = EpochWord(epoch);
  const bool ok = workspaces_.ForEachCopy([&](const WorkspaceCopy& copy) -> bool {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(copy.ordinal), error);
    uint64_t before;
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(&before, copy.base, sizeof(before), cudaMemcpyDeviceToHost),
                        error);
    // Signals of later calls would be a mismatch; and the calls that are left out would have
    // cleared LL packets (core/packet.h).
    const bool back = epoch < EpochOfWord(before);
    const bool clears = epoch >> kScrubPeriodBits != EpochOfWord(before) >> kScrubPeriodBits &&
                        PacketLayout::OfTotal(copy.bytes);
    if (back || clears) JFLUX_CUDA_OR_FALSE(cudaMemset(copy.base, 0, copy.bytes), error);
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(copy.base, &word, sizeof(word), cudaMemcpyHostToDevice), error);
    return true;
  });
  return ok && Synchronize(error);
}

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
