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

// With kSorted, the groups with the most rows have the first tiles, if there are at most
// kMostSorted groups: where a tile's cost grows with its group's rows, that shares the work out.
//
// With kBlock > 1 each group begins a block of so many rows: rows are numbered so, and what fills
// up its last block counts as rows of the group (gpu/group_blocks.cuh finds the same).
template <typename Config, bool kSorted = false, int kBlock = 1>
class GroupTable {
 public:
  // Two words each, and one more. Sorted groups have a third.
  static_assert(8 * (kMostGroups + 1) <= Config::kSendBoxes * Config::kSendBoxBytes);
  static constexpr int32_t kMostSorted = 256;  // the ranks of more take longer than they save

  // count(rows) -> number of tiles of a group. If !leads, the table is not made.
  template <typename Count>
  __device__ GroupTable(const GemmSmem<Config>& smem, const int32_t* sizes, int32_t groups,
                        int64_t rows, bool leads, Count&& count)
      : rows_(smem.SendBox(0)),
        tiles_(rows_ + 4 * (groups + 1)),
        order_(kSorted && groups <= kMostSorted ? tiles_ + 4 * (groups + 1) : 0),
        groups_(groups) {
    if (!leads) return;
    const int lane = threadIdx.x % 32;
    int32_t filled = 0;  // rows of earlier groups, in whole blocks
    ForEachGroup(sizes, groups, rows, [&](int32_t first, bool is_group, GroupRows r) {
      auto end = static_cast<int32_t>(r.end);
      if constexpr (kBlock > 1) {
        const auto count = static_cast<int32_t>(r.end - r.begin);
        end = filled + WarpInclusiveSum(is_group ? RoundUp(count, kBlock) : 0);
        filled = __shfl_sync(0xffffffff, end, 31);
      }
      if (is_group) Store(rows_, first + lane + 1, end);
    });
    if (lane == 0) {
      Store(rows_, 0, 0);
      Store(tiles_, 0, 0);
    }
    __syncwarp();
    if (order_ != 0) Sort();
    int32_t tiles_before = 0;
    for (int32_t first = 0; first < groups; first += 32) {
      const int32_t at = first + lane;
      const int32_t tiles = at < groups ? count(RowsOf(GroupAt(at))) : 0;
      const int32_t sum = WarpInclusiveSum(tiles);
      if (at < groups) Store(tiles_, at + 1, tiles_before + sum);
      tiles_before += __shfl_sync(0xffffffff, sum, 31);
    }
    __syncwarp();
  }

  // Moves to the group that has tile t. False if there is no such tile. t does not decrease.
  __device__ bool Find(int32_t t) {
    const int lane = threadIdx.x % 32;
    for (; at_ < groups_; at_ += 32) {
      const int32_t end = Load(tiles_, Min(at_ + lane + 1, groups_));
      const uint32_t after = __ballot_sync(0xffffffff, t < end);
      if (after == 0) continue;
      at_ += __ffs(after) - 1;
      return at_ < groups_;
    }
    return false;
  }

  // The number, first tile and rows of the group that Find has moved to.
  __device__ int32_t group() const { return GroupAt(at_); }
  __device__ int32_t FirstTile() const { return Load(tiles_, at_); }
  __device__ int32_t FirstRow() const { return Load(rows_, group()); }
  __device__ int32_t EndRow() const { return Load(rows_, group() + 1); }

 private:
  __device__ int32_t GroupAt(int32_t at) const { return order_ == 0 ? at : Load(order_, at); }
  __device__ int32_t RowsOf(int32_t group) const {
    return Load(rows_, group + 1) - Load(rows_, group);
  }

  // A group's place is the number of groups with more rows, and of earlier ones with as many.
  __device__ void Sort() {
    const int lane = threadIdx.x % 32;
    for (int32_t first = 0; first < groups_; first += 32) {
      const int32_t group = first + lane;
      const int32_t rows = RowsOf(Min(group, groups_ - 1));
      int32_t place = 0;
      for (int32_t others = 0; others < groups_; others += 32) {
        const int32_t theirs = others + lane < groups_ ? RowsOf(others + lane) : -1;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int32_t other = __shfl_sync(0xffffffff, theirs, i);
          place += other > rows || (other == rows && others + i < group);
        }
      }
      if (group < groups_) Store(order_, place, group);
    }
    __syncwarp();
  }

  static __device__ void Store(uint32_t table, int32_t i, int32_t v) {
    ptx::StoreShared4(table + 4 * i, v);
  }
  static __device__ int32_t Load(uint32_t table, int32_t i) {
    return ptx::LoadShared4(table + 4 * i);
  }

  uint32_t rows_, tiles_;  // addresses of [groups + 1] words each
  uint32_t order_;         // address of [groups] words: which group has a place; 0: its own
  int32_t groups_, at_ = 0;
};

}  // namespace jflux

#endif  // JFLUX_GPU_GROUP_TABLE_CUH_
