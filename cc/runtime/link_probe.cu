#include <cuda_runtime.h>

#include <utility>

#include "core/atomic.h"
#include "core/platform.h"
#include "core/signal.h"
#include "runtime/cuda_check.h"
#include "runtime/link_probe.h"

namespace jflux {
namespace {

constexpr int64_t kSlotBytes = 2 << 20;
constexpr int kCopies = 40;
constexpr int kTurns = 64;
constexpr int kWords = 128;                          // of 8 bytes, in a turn
constexpr uint64_t kTalkTimeoutNs = 20'000'000'000;  // ranks may share a GPU, and take turns

// The memory that one peer writes in `talk`.
struct Talk {
  uint64_t data[2][kWords];
  uint64_t flag;
  uint64_t pad[15];
};

struct TalkResult {
  unsigned long long ns;     // of all turns
  unsigned int wrong_turns;  // whose data were not there when the flag was
  unsigned int lost_turn;    // the turn whose flag did not come; 0: all came
};

struct Area {
  char* base;
  int devices;

  __host__ __device__ uint32_t* Slot(int i) const {
    return reinterpret_cast<uint32_t*>(base + i * kSlotBytes);
  }
  __host__ __device__ uint32_t* Pattern() const { return Slot(devices); }
  __host__ __device__ uint32_t* Pulled() const { return Slot(devices + 1); }
  __host__ __device__ Talk* TalkOf(int i) const {
    return reinterpret_cast<Talk*>(base + (devices + 2) * kSlotBytes) + i;
  }
};

__host__ __device__ uint32_t PatternWord(int64_t i, int64_t device) {
  return static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(device * 7919 + 1);
}

// A slot, and whose pattern is in it.
struct SlotArgs {
  uint32_t* words;
  int64_t device;
  unsigned long long* wrong;  // bytes that are not the pattern's
};

constexpr int kBlocks = 128, kThreads = 256;
constexpr int64_t kStride = kBlocks * kThreads;

__global__ void Fill(const __grid_constant__ SlotArgs args) {
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < kSlotBytes / 4; i += kStride) {
    args.words[i] = PatternWord(i, args.device);
  }
}

__global__ void Compare(const __grid_constant__ SlotArgs args) {
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < kSlotBytes / 4; i += kStride) {
    if (args.words[i] != PatternWord(i, args.device)) atomicAdd(args.wrong, 4);
  }
}

__device__ uint64_t TalkWord(int turn, int from, int to, int i) {
  return (static_cast<uint64_t>(turn) << 40) + (static_cast<uint64_t>(from) << 32) + to * 1024 + i;
}

struct TalkArgs {
  Area own, peer;
  int me, them;
  TalkResult* result;
};

// One warp exchanges turns with one peer.
__global__ void TalkWith(const __grid_constant__ TalkArgs args) {
  const int me = args.me, them = args.them;
  TalkResult* result = args.result;
  const uint64_t start = NowNs();
  Talk* to = args.peer.TalkOf(me);
  const Talk* from = args.own.TalkOf(them);
  for (int turn = 1; turn <= kTurns; ++turn) {
    for (int i = threadIdx.x; i < kWords; i += 32) {
      to->data[turn % 2][i] = TalkWord(turn, me, them, i);
    }
    __syncwarp();
    if (threadIdx.x == 0) StoreRelease(&to->flag, static_cast<uint64_t>(turn));
    bool lost = false;
    if (threadIdx.x == 0) {
      for (uint32_t attempt = 0; LoadAcquire(&from->flag) < static_cast<uint64_t>(turn);
           ++attempt) {
        if (NowNs() - start > kTalkTimeoutNs) {
          lost = true;
          break;
        }
        PollPause(attempt);
      }
    }
    __syncwarp();
    if (__any_sync(0xffffffff, lost)) {
      if (threadIdx.x == 0) result->lost_turn = turn;
      return;
    }
    bool wrong = false;
    for (int i = threadIdx.x; i < kWords; i += 32) {
      const auto* word = &from->data[turn % 2][i];
      wrong |= *static_cast<const volatile uint64_t*>(word) != TalkWord(turn, them, me, i);
    }
    if (__any_sync(0xffffffff, wrong) && threadIdx.x == 0) ++result->wrong_turns;
  }
  if (threadIdx.x == 0) result->ns = NowNs() - start;
}

// In place of LaunchKernel, which orders a device's kernels: its talks run at once, on several
// streams.
template <typename Args>
bool Launch(void (*kernel)(Args), Args args, int blocks, int threads, cudaStream_t stream,
            std::string* error) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  void* arguments[] = {&args};
  JFLUX_CUDA_OR_FALSE(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), error);
  return true;
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
  return ok && ms > 0 ? static_cast<double>(kSlotBytes) * kCopies / (ms * 1e6) : 0;
}

// A stream, and memory that device and host see. The current device's.
template <typename T>
struct Bench {
  cudaStream_t stream = nullptr;
  T* result = nullptr;

  bool Make(std::string* error) {
    JFLUX_CUDA_OR_FALSE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), error);
    JFLUX_CUDA_OR_FALSE(
        cudaHostAlloc(reinterpret_cast<void**>(&result), sizeof(T), cudaHostAllocMapped), error);
    *result = T{};
    return true;
  }
  Bench() = default;
  Bench(Bench&& other) noexcept
      : stream(std::exchange(other.stream, nullptr)),
        result(std::exchange(other.result, nullptr)) {}
  ~Bench() {
    if (result != nullptr) cudaFreeHost(result);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

std::string Between(int64_t from, int64_t to) {
  return "the link from device " + std::to_string(from) + " to device " + std::to_string(to) +
         " cannot be trusted: ";
}
constexpr char kAdvice[] =
    "; hide one of the two (CUDA_VISIBLE_DEVICES), and have the link checked";

Link* LinkOf(std::vector<Link>* links, int64_t from, int64_t to) {
  for (Link& link : *links) {
    if (link.from == from && link.to == to) return &link;
  }
  links->push_back(Link{from, to, 0, 0, 0});
  return &links->back();
}

bool RunCopies(const ProbedDevice& d, const std::vector<int64_t>& ids, std::vector<Link>* links,
               std::string* error) {
  const int n = static_cast<int>(ids.size());
  const Area own{d.copies[d.index], n};
  Bench<unsigned long long> bench;
  if (!bench.Make(error)) return false;
  JFLUX_CUDA_OR_FALSE(cudaMemsetAsync(own.TalkOf(0), 0, n * sizeof(Talk), bench.stream), error);
  if (!Launch(Fill, SlotArgs{own.Pattern(), d.id, nullptr}, kBlocks, kThreads, bench.stream,
              error)) {
    return false;
  }
  JFLUX_CUDA_OR_FALSE(cudaStreamSynchronize(bench.stream), error);
  for (int i = 0; i < n; ++i) {
    if (i == d.index) continue;
    const Area peer{d.copies[i], n};
    Link* link = LinkOf(links, d.id, ids[i]);
    link->push_gbps = Bandwidth(bench.stream, [&] {
      cudaMemcpyAsync(peer.Slot(d.index), own.Pattern(), kSlotBytes, cudaMemcpyDeviceToDevice,
                      bench.stream);
    });
    link->pull_gbps = Bandwidth(bench.stream, [&] {
      cudaMemcpyAsync(own.Pulled(), peer.Slot(d.index), kSlotBytes, cudaMemcpyDeviceToDevice,
                      bench.stream);
    });
    *bench.result = 0;
    if (!Launch(Compare, SlotArgs{own.Pulled(), d.id, bench.result}, kBlocks, kThreads,
                bench.stream, error)) {
      return false;
    }
    JFLUX_CUDA_OR_FALSE(cudaStreamSynchronize(bench.stream), error);
    if (*bench.result != 0) {
      *error = Between(d.id, ids[i]) + std::to_string(*bench.result) + " of " +
               std::to_string(kSlotBytes) + " bytes came back different from a copy to the peer" +
               kAdvice;
      return false;
    }
    if (link->push_gbps <= 0 || link->pull_gbps <= 0) {
      *error = "copies from GPU " + std::to_string(d.ordinal) + " could not be timed";
      return false;
    }
  }
  return true;
}

bool RunCheck(const ProbedDevice& d, const std::vector<int64_t>& ids, std::string* error) {
  const int n = static_cast<int>(ids.size());
  const Area own{d.copies[d.index], n};
  Bench<unsigned long long> bench;
  if (!bench.Make(error)) return false;
  for (int i = 0; i < n; ++i) {
    if (i == d.index) continue;
    *bench.result = 0;
    if (!Launch(Compare, SlotArgs{own.Slot(i), ids[i], bench.result}, kBlocks, kThreads,
                bench.stream, error)) {
      return false;
    }
    JFLUX_CUDA_OR_FALSE(cudaStreamSynchronize(bench.stream), error);
    if (*bench.result != 0) {
      *error = Between(ids[i], d.id) + std::to_string(*bench.result) + " of " +
               std::to_string(kSlotBytes) +
               " bytes that it wrote are not in the memory of the second one" + kAdvice;
      return false;
    }
  }
  return true;
}

// All devices talk at once: each waits for its peers.
bool RunTalk(const std::vector<ProbedDevice>& devices, const std::vector<int64_t>& ids,
             std::vector<Link>* links, std::string* error) {
  const int n = static_cast<int>(ids.size());
  struct Running {
    const ProbedDevice* device;
    int peer;
    Bench<TalkResult> bench;
  };
  std::vector<Running> running;
  for (const ProbedDevice& d : devices) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(d.ordinal), error);
    cudaFuncAttributes attributes;  // loads it: later, a load could wait for a kernel that waits
    JFLUX_CUDA_OR_FALSE(
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&TalkWith)), error);
    for (int i = 0; i < n; ++i) {
      if (i == d.index) continue;
      running.push_back(Running{&d, i, {}});
      if (!running.back().bench.Make(error)) return false;
    }
  }
  for (Running& r : running) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(r.device->ordinal), error);
    const TalkArgs args{Area{r.device->copies[r.device->index], n},
                        Area{r.device->copies[r.peer], n}, r.device->index, r.peer, r.bench.result};
    if (!Launch(TalkWith, args, 1, 32, r.bench.stream, error)) return false;
  }
  for (Running& r : running) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(r.device->ordinal), error);
    JFLUX_CUDA_OR_FALSE(cudaStreamSynchronize(r.bench.stream), error);
  }
  for (Running& r : running) {
    const TalkResult& result = *r.bench.result;
    const int64_t me = r.device->id, them = ids[r.peer];
    if (result.lost_turn != 0) {
      *error = Between(them, me) + "flag " + std::to_string(result.lost_turn) + " of " +
               std::to_string(kTurns) + " did not arrive within " +
               std::to_string(kTalkTimeoutNs / 1'000'000'000) +
               " s (or kernels of different GPUs do not run at the same time, as with "
               "CUDA_LAUNCH_BLOCKING=1 and in profilers and debuggers)" +
               kAdvice;
      return false;
    }
    if (result.wrong_turns != 0) {
      *error = Between(them, me) + "in " + std::to_string(result.wrong_turns) + " of " +
               std::to_string(kTurns) + " turns the data were not there when their flag was" +
               kAdvice;
      return false;
    }
    LinkOf(links, me, them)->signal_us = static_cast<double>(result.ns) / kTurns / 1000;
  }
  return true;
}

}  // namespace

int64_t ProbeBytes(int devices) {
  return (devices + 2) * kSlotBytes +
         RoundUp<int64_t>(devices * static_cast<int64_t>(sizeof(Talk)), kSlotBytes);
}

bool RunProbe(ProbeStep step, const std::vector<ProbedDevice>& devices,
              const std::vector<int64_t>& ids, std::vector<Link>* links, std::string* error) {
  std::string why;
  bool ok = true;
  if (step == ProbeStep::kTalk) {
    ok = RunTalk(devices, ids, links, &why);
  } else {
    for (const ProbedDevice& d : devices) {
      ok = cudaSetDevice(d.ordinal) == cudaSuccess &&
           (step == ProbeStep::kCopies ? RunCopies(d, ids, links, &why) : RunCheck(d, ids, &why));
      if (!ok) break;
    }
  }
  if (ok) return true;
  // A failed CUDA call says nothing about a link.
  const bool is_link = why.rfind("the link", 0) == 0;
  *error = is_link ? why : "the probe of the links could not run (" + why + ")";
  return false;
}

}  // namespace jflux
