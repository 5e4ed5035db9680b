// moe_route on GPUs: a stable counting sort in one kernel, by one cluster of up to 8 CTAs (by
// one CTA in code without clusters).
//
// Each warp of the cluster has a range of consecutive slots, in the order of warps:
//
//   1. it counts its slots of each expert                      histogram[warp][expert]
//   2. scans over warps, then over CTAs (distributed shared memory), then over experts give the row
//      of each warp's first slot of each expert
//   3. it goes through its slots again, in order, and hands out rows
//
// The lanes of a warp that have the same expert find each other by match.any, so no atomics are
// needed and the order is that of the slots.
#include <algorithm>

#include "core/platform.h"
#include "gpu/cluster.cuh"
#include "gpu/machine.h"
#include "gpu/warp_scan.cuh"
#include "ops/moe_route/moe_route.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMostCtas = 8;
// Slots of a warp that are worth another CTA.
constexpr int64_t kSlotsPerWarp = 64;

struct MoeRouteArgs {
  MoeRouteParams params;
  MoeRouteArrays arrays;
  int64_t slots_per_warp;  // a multiple of 32
};

// In shared memory, [experts] each, after the histograms [kWarps][experts].
struct Tables {
  int32_t* histogram;
  int32_t* of_cta;  // slots of this CTA
  int32_t* first;   // row of this CTA's first slot, not counting the capacity
  int32_t* offset;  // [experts + 1], first row of each expert
};
constexpr int kTables = kWarps + 3;
constexpr int64_t SmemBytes(int64_t experts) { return (kTables * experts + 1) * 4; }

constexpr int64_t kMostExperts = 1536, kMostExpertsPortable = 720;
static_assert(SmemBytes(kMostExperts) <= kHopper.smem_bytes &&
              SmemBytes(kMostExpertsPortable) <= kPortable.smem_bytes);

__device__ Tables TablesOf(int32_t* smem, int experts) {
  return Tables{smem, smem + kWarps * experts, smem + (kWarps + 1) * experts,
                smem + (kWarps + 2) * experts};
}

// Calls visit(slot, is_slot, expert, peers) for this warp's slots, 32 at a time and in order; -1:
// no expert. `peers`: the lanes with the same expert.
template <typename Visit>
__device__ void ForEachSlot(const MoeRouteArgs& args, int64_t warp, Visit&& visit) {
  const int lane = threadIdx.x % 32;
  const int64_t end = Min(args.params.slots, (warp + 1) * args.slots_per_warp);
  for (int64_t base = warp * args.slots_per_warp; base < end; base += 32) {
    const int64_t slot = base + lane;
    int32_t expert = slot < end ? __ldg(args.arrays.indices + slot) : -1;
    if (expert < 0 || expert >= args.params.experts) expert = -1;
    visit(slot, slot < end, expert, __match_any_sync(0xffffffff, expert));
    __syncwarp();  // what one lane has counted, the others read in the next round
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    MoeRouteKernel(const __grid_constant__ MoeRouteArgs args) {
  JFLUX_DYNAMIC_SHARED(int32_t, 4, smem);
  const auto cluster = ThisCluster();
  const auto experts = static_cast<int>(args.params.experts);
  const Tables t = TablesOf(smem, experts);
  const int warp_of_cta = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(cluster.block_rank()) * kWarps + warp_of_cta;
  int32_t* counted = t.histogram + warp_of_cta * experts;
  const uint32_t lower = (1u << lane) - 1;

  for (int e = lane; e < experts; e += 32) counted[e] = 0;
  __syncwarp();
  ForEachSlot(args, warp, [&](int64_t, bool, int32_t expert, uint32_t peers) {
    if (expert >= 0 && (peers & lower) == 0) counted[expert] += __popc(peers);
  });
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int32_t of_warp = t.histogram[w * experts + e];
      t.histogram[w * experts + e] = sum;
      sum += of_warp;
    }
    t.of_cta[e] = sum;
  }
  cluster.sync();

  const bool caps = args.params.capacity >= 0;
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int32_t before = 0, all = 0;
    for (unsigned cta = 0; cta < cluster.num_blocks(); ++cta) {
      const int32_t of_cta = cluster.map_shared_rank(t.of_cta, cta)[e];
      if (cta < cluster.block_rank()) before += of_cta;
      all += of_cta;
    }
    t.first[e] = before;
    const int32_t count =
        caps ? static_cast<int32_t>(Min<int64_t>(all, args.params.capacity)) : all;
    t.offset[e + 1] = count;  // scanned below
    if (cluster.block_rank() == 0) args.arrays.counts[e] = count;
  }
  __syncthreads();
  if (warp_of_cta == 0) {
    if (lane == 0) t.offset[0] = 0;
    int32_t before = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + lane;
      const int32_t sum = WarpInclusiveSum(e < experts ? t.offset[e + 1] : 0);
      if (e < experts) t.offset[e + 1] = before + sum;
      before += __shfl_sync(0xffffffff, sum, 31);
    }
  }
  __syncthreads();
  if (cluster.block_rank() == 0) {
    for (int e = threadIdx.x; e <= experts; e += kThreads) args.arrays.offsets[e] = t.offset[e];
  }

  ForEachSlot(args, warp, [&](int64_t slot, bool is_slot, int32_t expert, uint32_t peers) {
    int32_t row = -1;
    if (expert >= 0) {
      const int32_t within = t.first[expert] + counted[expert] + __popc(peers & lower);
      const int32_t count = t.offset[expert + 1] - t.offset[expert];
      if (within < count) row = t.offset[expert] + within;
    }
    __syncwarp();
    if (expert >= 0 && (peers & lower) == 0) counted[expert] += __popc(peers);
    if (!is_slot) return;
    args.arrays.destination[slot] = row;
    if (row >= 0) args.arrays.source[row] = static_cast<int32_t>(slot);
  });
  const int64_t threads = static_cast<int64_t>(cluster.num_blocks()) * kThreads;
  for (int64_t row = t.offset[experts] + warp * 32 + lane; row < args.params.slots;
       row += threads) {
    args.arrays.source[row] = -1;
  }
  cluster.sync();  // of_cta has been read by all
}

}  // namespace

bool LoadMoeRouteKernels(std::string* error) {
  return LoadKernel(reinterpret_cast<const void*>(&MoeRouteKernel),
                    static_cast<int>(SmemBytes(kMostExperts)), error);
}

bool LaunchMoeRoute(const MoeRouteParams& params, const MoeRouteArrays& arrays, cudaStream_t stream,
                    std::string* error) {
  if (params.experts > kMostExperts || params.slots > INT32_MAX) {
    *error = "the kernel takes up to " + std::to_string(kMostExperts) + " experts";
    return false;
  }
  int arch = 0, ctas = 1;
  if (!LoadedArch(&arch, error)) return false;
  const int most_ctas = arch >= kHopperArch ? kMostCtas : 1;
  while (ctas < most_ctas && params.slots > ctas * kWarps * kSlotsPerWarp) ctas *= 2;
  const int64_t warps = ctas * kWarps;
  MoeRouteArgs args{params, arrays, RoundUp<int64_t>(CeilDiv(params.slots, warps), 32)};
  return LoadOnce(LoadMoeRouteKernels, error) &&
         LaunchKernel(reinterpret_cast<const void*>(&MoeRouteKernel), &args, 1, ctas, kThreads,
                      static_cast<int>(SmemBytes(params.experts)), stream, error);
}

}  // namespace jflux
