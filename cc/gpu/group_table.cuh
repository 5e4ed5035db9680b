// The groups of a grouped product, as a cluster's leading scheduler warp sees them: where each
// group's rows and tiles begin.
//
//   writes  the scheduler warp, once, from group_sizes in device memory
//   reads   the same warp
//   memory  the main loop's send boxes, which an op without peers does not use
//
// Sizes that make no sense cannot make a kernel read or write outside its arrays: a negative size
// counts as 0, and what exceeds the array's rows is cut off.
//
// All functions are called by a full warp.
#ifndef JFLUX_GPU_GROUP_TABLE_CUH_
#define JFLUX_GPU_GROUP_TABLE_CUH_

#include <cstdint>

#include "core/group_tiles.h"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/warp_scan.cuh"

namespace jflux {

struct GroupRows {
  int64_t begin, end;
};

// Calls visit(first, is_group, group_rows) for 32 groups at a time: lane i has group first + i, if
// there is one, and its rows. Returns the sum of the sizes, which is not cut off.
template <typename Visit>
__device__ __forceinline__ int64_t ForEachGroup(const int32_t* sizes, int32_t groups, int64_t rows,
                                                Visit&& visit) {
  const int lane = threadIdx.x % 32;
  int64_t before = 0;  // of the sizes of earlier groups, not cut off
  for (int32_t first = 0; first < groups; first += 32) {
    const bool is_group = first + lane < groups;
    const int64_t size = is_group ? Max(__ldg(sizes + first + lane), 0) : 0;
    const int64_t sum = WarpInclusiveSum(size);
    visit(first, is_group, GroupRows{Min(rows, before + sum - size), Min(rows, before + sum)});
    before += __shfl_sync(0xffffffff, sum, 31);
  }
  return before;
}

template <typename Config>
class GroupTable {
 public:
  // Two words each, and one more.
  static_assert(8 * (kMostGroups + 1) <= Config::kSendBoxes * Config::kSendBoxBytes);

  // count(rows) -> number of tiles of a group. If !leads, the table is not made.
  template <typename Count>
  __device__ GroupTable(const GemmSmem<Config>& smem, const int32_t* sizes, int32_t groups,
                        int64_t rows, bool leads, Count&& count)
      : rows_(smem.SendBox(0)), tiles_(rows_ + 4 * (groups + 1)), groups_(groups) {
    if (!leads) return;
    const int lane = threadIdx.x % 32;
    int32_t tiles_before = 0;
    ForEachGroup(sizes, groups, rows, [&](int32_t first, bool is_group, GroupRows r) {
      const int32_t tiles = is_group ? count(static_cast<int32_t>(r.end - r.begin)) : 0;
      const int32_t sum = WarpInclusiveSum(tiles);
      if (is_group) {
        Store(rows_, first + lane + 1, static_cast<int32_t>(r.end));
        Store(tiles_, first + lane + 1, tiles_before + sum);
      }
      tiles_before += __shfl_sync(0xffffffff, sum, 31);
    });
    if (lane == 0) {
      Store(rows_, 0, 0);
      Store(tiles_, 0, 0);
    }
    __syncwarp();
  }

  // Moves to the group that has tile t. False if there is no such tile. t does not decrease.
  __device__ bool Find(int32_t t) {
    const int lane = threadIdx.x % 32;
    for (; group_ < groups_; group_ += 32) {
      const int32_t end = Load(tiles_, Min(group_ + lane + 1, groups_));
      const uint32_t after = __ballot_sync(0xffffffff, t < end);
      if (after == 0) continue;
      group_ += __ffs(after) - 1;
      return group_ < groups_;
    }
    return false;
  }

  // Of the group that Find has moved to.
  __device__ int32_t group() const { return group_; }
  __device__ int32_t FirstTile() const { return Load(tiles_, group_); }
  __device__ int32_t FirstRow() const { return Load(rows_, group_); }
  __device__ int32_t EndRow() const { return Load(rows_, group_ + 1); }

 private:
  static __device__ void Store(uint32_t table, int32_t i, int32_t v) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(table + 4 * i), "r"(v) : "memory");
  }
  static __device__ int32_t Load(uint32_t table, int32_t i) {
    int32_t v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(table + 4 * i) : "memory");
    return v;
  }

  uint32_t rows_, tiles_;  // addresses of [groups + 1] words each
  int32_t groups_, group_ = 0;
};

}  // namespace jflux

#endif  // JFLUX_GPU_GROUP_TABLE_CUH_
