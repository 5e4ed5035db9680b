#include <cuda_runtime.h>

#include <utility>

#include "core/atomic.h"
#include "core/platform.h"
#include "runtime/cuda_check.h"
#include "runtime/link_probe.h"

namespace jflux {
namespace {

constexpr int64_t kHalf = kProbeAreaBytes / 2;  // pattern in the first half, the copy from the peer
                                                // in the second
constexpr int kCopies = 40;
constexpr int kSignals = 64;

struct ProbeResult {
  unsigned long long wrong;      // bytes that differ after the round trip
  unsigned long long signal_ns;  // of kSignals round trips
  unsigned int lost;             // flags that did not come back within the timeout
};

__global__ void Fill(uint32_t* area, uint32_t seed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < kHalf / 4) area[i] = static_cast<uint32_t>(i) * 2654435761u + seed;
}

__global__ void Compare(const uint32_t* a, const uint32_t* b, ProbeResult* result) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < kHalf / 4 && a[i] != b[i]) atomicAdd(&result->wrong, 4);
}

// One thread writes a flag to the peer's memory and polls until it reads it there.
__global__ void RoundTrips(uint64_t* remote_flag, ProbeResult* result) {
  const uint64_t start = NowNs();
  for (uint64_t i = 1; i <= kSignals; ++i) {
    StoreRelease(remote_flag, i);
    while (LoadAcquire(remote_flag) != i) {
      if (NowNs() - start > 1000000000ull) {
        result->lost = 1;
        return;
      }
    }
  }
  result->signal_ns = NowNs() - start;
}

// Runs `copy` kCopies times between events. Returns GB/s, or 0 on an error.
template <typename F>
double Bandwidth(cudaStream_t stream, F&& copy) {
  cudaEvent_t begin, end;
  if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) return 0;
  copy();
  cudaEventRecord(begin, stream);
  for (int i = 0; i < kCopies; ++i) copy();
  cudaEventRecord(end, stream);
  float ms = 0;
  const bool ok = cudaEventSynchronize(end) == cudaSuccess &&
                  cudaEventElapsedTime(&ms, begin, end) == cudaSuccess;
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ok && ms > 0 ? static_cast<double>(kHalf) * kCopies / (ms * 1e6) : 0;
}

std::string Run(char* local, char* remote, cudaStream_t stream, ProbeResult* result, Link* link) {
  std::string error;
  const auto failed = [&](cudaError_t status, const char* what) {
    if (status != cudaSuccess) error = CudaReason(what, status);
    return status != cudaSuccess;
  };
  const dim3 grid(static_cast<unsigned>(kHalf / 4 / 256));
  Fill<<<grid, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(local),
                                 static_cast<uint32_t>(link->from * 7919 + link->to));
  const auto push = [&] {
    cudaMemcpyAsync(remote, local, kHalf, cudaMemcpyDeviceToDevice, stream);
  };
  const auto pull = [&] {
    cudaMemcpyAsync(local + kHalf, remote, kHalf, cudaMemcpyDeviceToDevice, stream);
  };
  link->push_gbps = Bandwidth(stream, push);
  link->pull_gbps = Bandwidth(stream, pull);
  Compare<<<grid, 256, 0, stream>>>(reinterpret_cast<const uint32_t*>(local),
                                    reinterpret_cast<const uint32_t*>(local + kHalf), result);
  RoundTrips<<<1, 1, 0, stream>>>(reinterpret_cast<uint64_t*>(remote), result);
  if (failed(cudaGetLastError(), "probe kernels")) return error;
  if (failed(cudaStreamSynchronize(stream), "probe")) return error;
  link->signal_us = static_cast<double>(result->signal_ns) / kSignals / 1000;
  if (result->wrong != 0) {
    return std::to_string(result->wrong) + " of " + std::to_string(kHalf) +
           " bytes came back different from a copy to the peer";
  }
  if (result->lost != 0) return "a flag written to the peer did not arrive within 1 s";
  if (link->push_gbps <= 0 || link->pull_gbps <= 0) return "copies could not be timed";
  return "";
}

}  // namespace

Link ProbeLink(int64_t from, int64_t to, char* local, char* remote) {
  Link link{from, to, 0, 0, 0, ""};
  cudaStream_t stream = nullptr;
  ProbeResult* result = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
      cudaHostAlloc(reinterpret_cast<void**>(&result), sizeof(ProbeResult), cudaHostAllocMapped) !=
          cudaSuccess) {
    link.fault = "no memory for the probe";
  } else {
    *result = ProbeResult{};
    link.fault = Run(local, remote, stream, result, &link);
  }
  if (result != nullptr) cudaFreeHost(result);
  if (stream != nullptr) cudaStreamDestroy(stream);
  return link;
}

}  // namespace jflux
