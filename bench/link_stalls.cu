// What traffic over a slow link costs loads that L2 serves (docs/experiments/0025).
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -Icc bench/link_stalls.cu -o link_stalls && ./link_stalls
//
// On every SM of GPU 0, and of GPU 1 if there is one, a lane loads 32 KiB at a time, four stages,
// as the GEMMs do; another one moves 64 KiB to or from the GPU's own memory, the host's or a
// peer's. A line of the table says how many GB/s that moved, and how much longer the loads took in
// all, beside how long it moved: with as much, there were no loads while it did.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/platform.h"
#include "gpu/ptx.cuh"

namespace {

namespace ptx = jflux::ptx;

constexpr int kStages = 4, kStageBytes = 32 << 10, kLoads = 900, kLoadsBefore = 250;
constexpr int64_t kSourceBytes = 24 << 20;  // which L2 holds
constexpr int kBufferBytes = 64 << 10, kMostPieces = 4;

enum class Way { kNone, kPush, kPull };

struct Traffic {
  const char* name;
  Way way;
  int piece, under_way;  // bytes; pieces of a CTA
  int ctas;              // which take part; all others' bytes are theirs
};

struct Times {  // of the GPU's clock, ns; 0: the CTA moved nothing
  uint64_t begin, end;
};

__device__ void Push(char* to, uint32_t smem, int bytes, const Traffic& traffic) {
  for (int at = 0; at < bytes; at += traffic.piece) {
    ptx::BulkStore(to + at, smem + at % kBufferBytes, traffic.piece);
    ptx::BulkCommit();
    if (traffic.under_way == 1) ptx::BulkWait<0>();
    if (traffic.under_way == 2) ptx::BulkWait<1>();
    if (traffic.under_way == 4) ptx::BulkWait<3>();
  }
  ptx::BulkWait<0>();
}

__device__ void Pull(const char* from, uint32_t smem, uint32_t bars, int bytes,
                     const Traffic& traffic) {
  const int pieces = bytes / traffic.piece, slots = traffic.under_way;
  for (int i = 0; i < pieces + slots; ++i) {
    const int slot = i % slots;
    if (i >= slots) ptx::MbarrierWait(bars + slot * 8, (i / slots - 1) & 1);
    if (i >= pieces) continue;
    ptx::MbarrierArriveExpectTx(bars + slot * 8, traffic.piece);
    ptx::BulkLoad(smem + slot * traffic.piece, from + static_cast<int64_t>(i) * traffic.piece,
                  traffic.piece, bars + slot * 8);
  }
}

__global__ void __launch_bounds__(64, 1)
    Run(const char* source, char* target, Traffic traffic, Times* times) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ __align__(8) uint64_t barriers[kStages + kMostPieces];
  __shared__ volatile bool moves;
  const uint32_t full = ptx::SmemAddress(barriers), buffer = ptx::SmemAddress(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages + kMostPieces; ++i) ptx::MbarrierInit(full + i * 8, 1);
    ptx::FenceMbarrierInit();
    moves = false;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto load = [&](int i) {
      const uint32_t bar = full + i % kStages * 8, to = buffer + i % kStages * kStageBytes;
      const char* from =
          source + (blockIdx.x * 977 + i * 131) * int64_t{kStageBytes} % kSourceBytes;
      ptx::MbarrierArriveExpectTx(bar, kStageBytes);
      for (int part = 0; part < 4; ++part) {
        constexpr int kPart = kStageBytes / 4;
        ptx::BulkLoad(to + part * kPart, from + part * kPart, kPart, bar);
      }
    };
    for (int i = 0; i < kStages; ++i) load(i);
    for (int i = 0; i < kLoads; ++i) {
      if (i == kLoadsBefore) moves = true;
      ptx::MbarrierWait(full + i % kStages * 8, i / kStages & 1);
      if (i + kStages < kLoads) load(i + kStages);
    }
  } else if (threadIdx.x == 32) {
    const bool takes_part = traffic.way != Way::kNone && blockIdx.x < traffic.ctas;
    times[blockIdx.x] = Times{};
    if (!takes_part) return;
    while (!moves) {
    }
    const int bytes = static_cast<int>(gridDim.x) / traffic.ctas * kBufferBytes;
    char* there = target + static_cast<int64_t>(blockIdx.x) * bytes;
    const uint32_t here = buffer + kStages * kStageBytes;
    times[blockIdx.x].begin = jflux::NowNs();
    if (traffic.way == Way::kPush) {
      Push(there, here, bytes, traffic);
    } else {
      Pull(there, here, full + kStages * 8, bytes, traffic);
    }
    times[blockIdx.x].end = jflux::NowNs();
  }
}

void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

struct Gpu {
  char *source, *memory;
  Times* times;
  cudaEvent_t begin, end;
  int sms;
};

constexpr int kSmemBytes = kStages * kStageBytes + kBufferBytes;

Gpu MakeGpu(int ordinal, int count) {
  Gpu gpu{};
  Check(cudaSetDevice(ordinal));
  if (count > 1) Check(cudaDeviceEnablePeerAccess(1 - ordinal, 0));
  Check(cudaDeviceGetAttribute(&gpu.sms, cudaDevAttrMultiProcessorCount, ordinal));
  Check(cudaMalloc(&gpu.source, kSourceBytes));
  Check(cudaMemset(gpu.source, 1, kSourceBytes));
  Check(cudaMalloc(&gpu.memory, int64_t{gpu.sms} * kBufferBytes));
  Check(cudaMalloc(&gpu.times, gpu.sms * sizeof(Times)));
  Check(cudaEventCreate(&gpu.begin));
  Check(cudaEventCreate(&gpu.end));
  Check(cudaFuncSetAttribute(Run, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  return gpu;
}

struct Result {
  float us = 0;     // of the kernel
  float moved = 0;  // of the traffic
};

// On all GPUs at once, GPU i with targets[i] (null: it only loads); medians.
std::vector<Result> Measure(const std::vector<Gpu>& gpus, const std::vector<char*>& targets,
                            const Traffic& traffic) {
  constexpr int kRounds = 9;
  std::vector<std::vector<float>> us(gpus.size()), moved(gpus.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < gpus.size(); ++i) {
      const Gpu& gpu = gpus[i];
      Traffic own = traffic;
      if (targets[i] == nullptr) own.way = Way::kNone;
      Check(cudaSetDevice(static_cast<int>(i)));
      Check(cudaEventRecord(gpu.begin));
      Run<<<gpu.sms, 64, kSmemBytes>>>(gpu.source, targets[i], own, gpu.times);
      Check(cudaEventRecord(gpu.end));
    }
    for (size_t i = 0; i < gpus.size(); ++i) {
      const Gpu& gpu = gpus[i];
      Check(cudaSetDevice(static_cast<int>(i)));
      Check(cudaDeviceSynchronize());
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
      us[i].push_back(1e3f * ms);
      std::vector<Times> times(gpu.sms);
      Check(cudaMemcpy(times.data(), gpu.times, gpu.sms * sizeof(Times), cudaMemcpyDeviceToHost));
      uint64_t begin = ~uint64_t{0}, end = 0;
      for (const Times& t : times) {
        if (t.end == 0) continue;
        begin = std::min(begin, t.begin);
        end = std::max(end, t.end);
      }
      moved[i].push_back(end == 0 ? 0 : (end - begin) / 1e3f);
    }
  }
  std::vector<Result> results(gpus.size());
  for (size_t i = 0; i < gpus.size(); ++i) {
    std::sort(us[i].begin(), us[i].end());
    std::sort(moved[i].begin(), moved[i].end());
    results[i] = Result{us[i][kRounds / 2], moved[i][kRounds / 2]};
  }
  return results;
}

}  // namespace

int main() {
  int count = 0;
  Check(cudaGetDeviceCount(&count));
  count = std::min(count, 2);
  std::vector<Gpu> gpus;
  for (int i = 0; i < count; ++i) gpus.push_back(MakeGpu(i, count));
  const int sms = gpus[0].sms;
  char* host = nullptr;
  Check(cudaHostAlloc(&host, int64_t{sms} * kBufferBytes, cudaHostAllocMapped));

  const Traffic traffics[] = {
      {"push 64 KiB at once", Way::kPush, 32 << 10, 0, sms},
      {"push 16 KiB, one", Way::kPush, 16 << 10, 1, sms},
      {"push 8 KiB, one", Way::kPush, 8 << 10, 1, sms},
      {"push 4 KiB, four", Way::kPush, 4 << 10, 4, sms},
      {"push 4 KiB, two", Way::kPush, 4 << 10, 2, sms},
      {"push 4 KiB, one", Way::kPush, 4 << 10, 1, sms},
      {"push 2 KiB, one", Way::kPush, 2 << 10, 1, sms},
      {"push 1 KiB, one", Way::kPush, 1 << 10, 1, sms},
      {"push 4 KiB, four, 33 CTAs", Way::kPush, 4 << 10, 4, 33},
      {"push 4 KiB, four, 11 CTAs", Way::kPush, 4 << 10, 4, 11},
      {"push 4 KiB, four, 6 CTAs", Way::kPush, 4 << 10, 4, 6},
      {"pull 16 KiB, four", Way::kPull, 16 << 10, 4, sms},
      {"pull 8 KiB, two", Way::kPull, 8 << 10, 2, sms},
      {"pull 4 KiB, four", Way::kPull, 4 << 10, 4, sms},
      {"pull 4 KiB, two", Way::kPull, 4 << 10, 2, sms},
      {"pull 4 KiB, one", Way::kPull, 4 << 10, 1, sms},
  };
  struct Target {
    const char* name;
    std::vector<char*> of;  // each GPU
  };
  std::vector<Target> targets{{"own memory", {gpus[0].memory}}, {"the host's", {host}}};
  for (Target& target : targets) target.of.resize(count);
  if (count > 1) {
    targets.push_back({"the peer's", {gpus[1].memory, nullptr}});
    targets.push_back({"each other's", {gpus[1].memory, gpus[0].memory}});
  }
  const std::vector<char*> none(count, nullptr);
  Measure(gpus, none, traffics[0]);
  for (const Target& target : targets) {
    const auto alone = Measure(gpus, none, traffics[0]);
    std::printf("\nTo or from %s; loads alone take %.1f us\n", target.name, alone[0].us);
    std::printf("%-28s %8s %12s", "", "GB/s", "of us moving");
    for (int i = 0; i < count; ++i) std::printf("  lost on GPU %d", i);
    std::printf("\n");
    for (const Traffic& traffic : traffics) {
      const auto with = Measure(gpus, target.of, traffic);
      const double bytes = static_cast<double>(sms / traffic.ctas) * traffic.ctas * kBufferBytes;
      std::printf("%-28s %8.0f %12.1f", traffic.name, bytes / with[0].moved / 1e3, with[0].moved);
      for (int i = 0; i < count; ++i) std::printf("  %13.1f", with[i].us - alone[i].us);
      std::printf("\n");
    }
  }
  return 0;
}
