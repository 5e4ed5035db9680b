// The timeline of the kernels on GPUs: where they record events, and how the host reads them.
#include <cuda_runtime.h>

#include <chrono>

#include "core/platform.h"
#include "runtime/cuda_check.h"
#include "runtime/heap_cuda.h"

namespace jflux {
namespace {

__global__ void ReadTimer(volatile uint64_t* now) { *now = NowNs(); }

// By how much the current device's global timer is ahead of the host's clock. The shortest of
// several exchanges bounds it from both sides, to a few microseconds.
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
    JFLUX_CUDA_OR_FALSE(cudaMemcpy(&device.state->timeline, &t, sizeof(t), cudaMemcpyHostToDevice),
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
    JFLUX_CUDA_OR_FALSE(
        cudaMemcpy(&device.state->timeline, &none, sizeof(none), cudaMemcpyHostToDevice), error);
    JFLUX_CUDA_OR_FALSE(cudaFree(t.events), error);
    JFLUX_CUDA_OR_FALSE(cudaFree(t.count), error);
    t = none;
  }
  return true;
}

}  // namespace jflux
