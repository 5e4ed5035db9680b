// The blocks of groups whose sizes are on the device, where each group begins a block.
#ifndef JFLUX_GPU_GROUP_BLOCKS_CUH_
#define JFLUX_GPU_GROUP_BLOCKS_CUH_

#include <cstdint>

#include "core/platform.h"
#include "gpu/warp_scan.cuh"

namespace jflux {

// A block's first row, and how many rows of its group it has; 0: no group has the block.
struct GroupBlock {
  int32_t row, rows;
};

// Block number `block`, of kRows rows. Sizes that make no sense are cut off, as in GroupTable
// (gpu/group_table.cuh). Called by a full warp, of which each lane takes groups that follow each
// other: one scan does for all groups.
template <int kRows>
__device__ __forceinline__ GroupBlock FindGroupBlock(const int32_t* sizes, int32_t groups,
                                                     int64_t rows, int32_t block) {
  const int32_t lane = threadIdx.x % 32, share = CeilDiv(groups, 32);
  const int32_t first = Min(lane * share, groups), last = Min(first + share, groups);
  const auto size_of = [&](int32_t group) {
    return static_cast<int64_t>(Max(__ldg(sizes + group), 0));
  };
  int64_t size = 0;
  for (int32_t group = first; group < last; ++group) size += size_of(group);
  const int64_t before = WarpInclusiveSum(size) - size;  // not cut off
  // Calls visit(first row, rows) for the lane's groups.
  const auto for_each = [&](auto&& visit) {
    int64_t begin = before;
    for (int32_t group = first; group < last; ++group) {
      const int64_t end = begin + size_of(group);
      const auto row = static_cast<int32_t>(Min(rows, begin));
      visit(row, static_cast<int32_t>(Min(rows, end)) - row);
      begin = end;
    }
  };
  int32_t blocks = 0;
  for_each([&](int32_t, int32_t count) { blocks += CeilDiv(count, kRows); });
  int32_t at = block - (WarpInclusiveSum(blocks) - blocks);  // among those of the lane
  const uint32_t has = __ballot_sync(0xffffffff, 0 <= at && at < blocks);
  if (has == 0) return GroupBlock{0, 0};
  GroupBlock found{0, 0};
  for_each([&](int32_t row, int32_t count) {
    const int32_t of_group = CeilDiv(count, kRows);
    if (0 <= at && at < of_group) {
      found = GroupBlock{row + at * kRows, Min(kRows, count - at * kRows)};
    }
    at -= of_group;
  });
  const int owner = __ffs(has) - 1;
  return GroupBlock{__shfl_sync(0xffffffff, found.row, owner),
                    __shfl_sync(0xffffffff, found.rows, owner)};
}

}  // namespace jflux

#endif  // JFLUX_GPU_GROUP_BLOCKS_CUH_
