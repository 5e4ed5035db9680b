// Whether the simulator finds faults: a small product with one fault at a time, under a number of
// schedules. Some fault must show in one of them, as a message or as a wrong number; without a
// fault, none may.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/platform.h"
#include "gpu/ptx.cuh"
#include "gpu/wgmma.cuh"
#include "runtime/kernels_cuda.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;
using T = __nv_bfloat16;

enum class Bug {
  kNone,
  kNoFullWait,     // a stage is multiplied before it is full
  kEarlyRelease,   // a stage is given back before wgmma has read it
  kWrongParity,    // of the wait for empty stages
  kFewBytes,       // fewer bytes are expected than arrive
  kManyBytes,      // more
  kTwiceReleased,  // too many arrivals
  kNoMmaWait,      // accumulators are read without a wait
  kNoMmaFence,     // wgmma.fence is missing
  kNoProxyFence,   // the result is stored by TMA without fence.proxy.async
  kNoBarrier,      // the result is stored before all threads have written it
  kNoReadWait,     // the staging is overwritten before it has been read
  kEarlyExit,      // a thread leaves that the others wait for
};

constexpr int kRows = 64, kColumns = 64, kTileK = 64, kStages = 2;
constexpr int kStageBytes = 2 * 8192, kStagingAt = kStages * kStageBytes;
constexpr int kBarriersAt = kStagingAt + 8192, kSmemBytes = kBarriersAt + 64;
constexpr int kThreads = 160;  // a consumer warpgroup, and a producer warp

struct ProductArgs {
  int32_t k_blocks, tiles;
  CUtensorMap a, b, y;  // [tiles 64, k], [64, k], [tiles 64, 64]
};

// y = a @ b^T. One tile of 64 rows after the other.
template <Bug kBug>
__global__ void ProductKernel(const __grid_constant__ ProductArgs args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const uint32_t smem = ptx::SmemAddress(storage);
  const auto full = [&](int s) { return smem + kBarriersAt + 8 * s; };
  const auto empty = [&](int s) { return full(kStages + s); };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::MbarrierInit(full(s), 1);
      ptx::MbarrierInit(empty(s), 4);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
  const int blocks = args.k_blocks * args.tiles;
  if (threadIdx.x >= 128) {
    if (threadIdx.x != 128) return;
    for (int i = 0; i < blocks; ++i) {
      const int s = i % kStages, round = i / kStages;
      const int wrong = kBug == Bug::kWrongParity ? 1 : 0;
      ptx::MbarrierWait(empty(s), (round & 1) ^ 1 ^ wrong);
      const int bytes = kStageBytes + (kBug == Bug::kFewBytes    ? -128
                                       : kBug == Bug::kManyBytes ? 128
                                                                 : 0);
      ptx::MbarrierArriveExpectTx(full(s), bytes);
      const int k0 = i % args.k_blocks * kTileK;
      ptx::TmaLoad2d(smem + s * kStageBytes, &args.a, full(s), k0, i / args.k_blocks * kRows);
      ptx::TmaLoad2d(smem + s * kStageBytes + 8192, &args.b, full(s), k0, 0);
    }
    return;
  }
  if (kBug == Bug::kEarlyExit && threadIdx.x == 77) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto release = [&](int s) {
    if (lane == 0) ptx::MbarrierArrive(empty(s));
    if (kBug == Bug::kTwiceReleased && lane == 1) ptx::MbarrierArrive(empty(s));
  };
  for (int i = 0, tile = 0; tile < args.tiles; ++tile) {
    float acc[kColumns / 2];
    for (int block = 0; block < args.k_blocks; ++block, ++i) {
      const int s = i % kStages;
      if (kBug != Bug::kNoFullWait) ptx::MbarrierWait(full(s), i / kStages & 1);
      if (kBug != Bug::kNoMmaFence) wgmma::Fence();
      for (int k = 0; k < kTileK / 16; ++k) {
        wgmma::Multiply<0, 0>(static_cast<const T*>(nullptr), acc,
                              wgmma::Descriptor(smem + s * kStageBytes + k * 32, 16, 1024),
                              wgmma::Descriptor(smem + s * kStageBytes + 8192 + k * 32, 16, 1024),
                              block + k > 0);
      }
      wgmma::Commit();
      if (kBug == Bug::kEarlyRelease) release(s);
      if (kBug != Bug::kNoMmaWait) wgmma::Wait<0>();
      if (kBug != Bug::kEarlyRelease) release(s);
    }
    if (threadIdx.x == 0 && kBug != Bug::kNoReadWait) ptx::BulkWaitRead<0>();
    ptx::BarrierSync(1, 128);  // the staging has been read
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      const auto pack = [&](int j) {
        const __nv_bfloat162 v = __floats2bfloat162_rn(acc[8 * pair + j], acc[8 * pair + j + 1]);
        return simt::BitsAs<uint32_t>(v);
      };
      const int row = 16 * warp + lane % 16, vector = 2 * pair + lane / 16;
      ptx::StoreMatrix4(smem + kStagingAt + row * 128 + ((vector ^ (row & 7)) * 16), pack(0),
                        pack(2), pack(4), pack(6));
    }
    if (kBug != Bug::kNoProxyFence) ptx::FenceProxyAsyncShared();
    if (kBug != Bug::kNoBarrier) ptx::BarrierSync(2, 128);  // all is written
    if (threadIdx.x == 0) {
      ptx::TmaStore2d(&args.y, smem + kStagingAt, 0, tile * kRows);
      ptx::BulkCommit();
    }
  }
  if (threadIdx.x == 0) ptx::BulkWaitRead<0>();
}

// The message of a run, or what is wrong with its result; empty if nothing is.
template <Bug kBug>
std::string RunProduct(uint32_t seed) {
  constexpr int kTiles = 3, kBlocks = 5, kK = kBlocks * kTileK;
  std::mt19937 random(seed);
  auto a = RandomArray<T>(random, kTiles * kRows * kK), b = RandomArray<T>(random, kColumns * kK);
  Array<T> y(kTiles * kRows * kColumns);
  ProductArgs args{kBlocks, kTiles, {}, {}, {}};
  std::string error;
  const auto* kernel = reinterpret_cast<const void*>(&ProductKernel<kBug>);
  const bool launched =
      EncodeTensorMap(&args.a, DType::kBF16, a.get(), {kTiles * kRows, kK}, {kK}, {64, 64},
                      &error) &&
      EncodeTensorMap(&args.b, DType::kBF16, b.get(), {kColumns, kK}, {kK}, {64, 64}, &error) &&
      EncodeTensorMap(&args.y, DType::kBF16, y.get(), {kTiles * kRows, kColumns}, {kColumns},
                      {64, 64}, &error) &&
      LoadKernel(kernel, kSmemBytes, &error) &&
      LaunchKernel(kernel, &args, 1, 1, kThreads, kSmemBytes, nullptr, &error);
  EXPECT(launched) << error;
  const std::string failure = simt::Run(seed);
  if (!failure.empty()) return failure;
  const int64_t wrong = simt::CountWrong(y, [&](int64_t i) {
    simt::Sum sum;
    for (int l = 0; l < kK; ++l) sum.Add(a[i / kColumns * kK + l] * b[i % kColumns * kK + l]);
    return sum;
  });
  return wrong == 0 ? "" : std::to_string(wrong) + " wrong numbers";
}

// What the first of the schedules that shows the fault says; empty if none does.
template <Bug kBug>
std::string FirstFailure() {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    const std::string failure = RunProduct<kBug>(seed);
    if (!failure.empty()) return failure;
  }
  return "";
}

// `says`: part of the message; empty: any.
template <Bug kBug>
void ExpectFound(const char* name, const char* says) {
  const std::string failure = FirstFailure<kBug>();
  std::printf("%-14s %s\n", name, failure.substr(0, failure.find('\n')).c_str());
  EXPECT(!failure.empty()) << name << " was not found";
  EXPECT(failure.find(says) != std::string::npos) << name << " was found as: " << failure;
}

TEST(ARightKernelPasses) {
  const std::string failure = FirstFailure<Bug::kNone>();
  EXPECT(failure.empty()) << failure;
}

TEST(FaultsAreFound) {
  ExpectFound<Bug::kNoFullWait>("kNoFullWait", "");
  ExpectFound<Bug::kEarlyRelease>("kEarlyRelease", "wrong numbers");
  ExpectFound<Bug::kWrongParity>("kWrongParity", "deadlock");
  ExpectFound<Bug::kFewBytes>("kFewBytes", "bytes more than");
  ExpectFound<Bug::kManyBytes>("kManyBytes", "deadlock");
  ExpectFound<Bug::kTwiceReleased>("kTwiceReleased", "");
  ExpectFound<Bug::kNoMmaWait>("kNoMmaWait", "");
  ExpectFound<Bug::kNoMmaFence>("kNoMmaFence", "without wgmma.fence");
  ExpectFound<Bug::kNoProxyFence>("kNoProxyFence", "nobody has fenced");
  ExpectFound<Bug::kNoBarrier>("kNoBarrier", "");
  ExpectFound<Bug::kNoReadWait>("kNoReadWait", "wrong numbers");
  ExpectFound<Bug::kEarlyExit>("kEarlyExit", "have ended");
}

// ---- faults inside a warp -----------------------------------------------------------------------

struct WarpArgs {
  int32_t* out;  // [rounds][32]
  int64_t rounds;
  bool sync_after_write, sync_before_reuse, half_mask;
};

// Each round, a lane passes a number to the next lane through shared memory.
__global__ void NeighbourKernel(const __grid_constant__ WarpArgs args) {
  JFLUX_SHARED(int32_t[32], slots);
  const int lane = threadIdx.x;
  for (int round = 0; round < args.rounds; ++round) {
    slots[lane] = 100 * round + lane;
    if (args.sync_after_write) __syncwarp();
    args.out[32 * round + lane] = slots[(lane + 1) % 32];
    if (args.sync_before_reuse) __syncwarp();
  }
  if (args.half_mask && lane < 16) __syncwarp(0xffffffff);
}

std::string RunNeighbours(bool after, bool before, bool half, uint32_t seed) {
  constexpr int kRounds = 4;
  std::vector<int32_t> out(32 * kRounds);
  WarpArgs args{out.data(), kRounds, after, before, half};
  std::string error;
  EXPECT(LaunchKernel(reinterpret_cast<const void*>(&NeighbourKernel), &args, 1, 1, 32, 0, nullptr,
                      &error))
      << error;
  const std::string failure = simt::Run(seed);
  if (!failure.empty()) return failure;
  for (int i = 0; i < 32 * kRounds; ++i) {
    if (out[i] != 100 * (i / 32) + (i + 1) % 32) return "wrong numbers";
  }
  return "";
}

TEST(FaultsInAWarpAreFound) {
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    EXPECT(RunNeighbours(true, true, false, seed).empty());
    EXPECT(RunNeighbours(false, true, false, seed) == "wrong numbers");
    EXPECT(RunNeighbours(true, false, false, seed) == "wrong numbers");
    const std::string failure = RunNeighbours(true, true, true, seed);
    EXPECT(failure.find("__syncwarp") != std::string::npos) << failure;
  }
}

// ---- faults of shared memory --------------------------------------------------------------------

struct StoreArgs {
  int64_t place, number, pad;
};

__global__ void StoreKernel(const __grid_constant__ StoreArgs args) {
  JFLUX_DYNAMIC_SHARED(int32_t, 4, numbers);
  numbers[args.place] = static_cast<int32_t>(args.number);
}

// Empty, or why the launch or the run failed. `place`: of the number that the kernel stores.
std::string RunStore(int smem_bytes, int64_t place) {
  StoreArgs args{place, /*number=*/-1, 0};
  std::string error;
  if (!LaunchKernel(reinterpret_cast<const void*>(&StoreKernel), &args, 1, 1, 32, smem_bytes,
                    nullptr, &error)) {
    return error;
  }
  return simt::Run(1);
}

TEST(LaunchesWithMoreThanTheAllowanceAreRefused) {
  std::string error;
  const auto* kernel = reinterpret_cast<const void*>(&StoreKernel);
  const auto refused = [](const std::string& failure) {
    return failure.find("invalid argument") != std::string::npos;
  };
  EXPECT(RunStore(48 << 10, 0).empty());
  EXPECT(refused(RunStore((48 << 10) + 4, 0)));
  EXPECT(LoadKernel(kernel, 64 << 10, &error)) << error;
  EXPECT(RunStore(64 << 10, 0).empty());
  EXPECT(refused(RunStore((64 << 10) + 4, 0)));
  EXPECT(LoadKernel(kernel, 0, &error)) << error;
  EXPECT(refused(RunStore(4, 0)));
  simt::SetDevice(1);  // the allowance is device 0's
  EXPECT(RunStore(4, 0).empty());
  simt::SetDevice(0);
}

TEST(StoresPastSharedMemoryAreFound) {
  std::string error;
  EXPECT(LoadKernel(reinterpret_cast<const void*>(&StoreKernel), 256, &error)) << error;
  EXPECT(RunStore(256, 63).empty());
  const std::string failure = RunStore(256, 64);
  EXPECT(failure.find("past the kernel's") != std::string::npos) << failure;
}

// The same seed is the same run.
TEST(ARunCanBeRepeated) {
  const std::string first = RunProduct<Bug::kNoFullWait>(3);
  EXPECT(RunProduct<Bug::kNoFullWait>(3) == first);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
