// The rows of groups, as all kernels of grouped products see them.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_ROWS_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_ROWS_CUH_

#include <cstdint>

#include "core/signal.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"
#include "gpu/group_table.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// The groups, in both kernels. The first group_sizes[0] of the M rows are the first group's, and so
// on.
struct GroupedRows {
  const int32_t* group_sizes;
  int32_t groups;
  int32_t rows;        // M
  DeviceState* state;  // null without a heap: then sizes that make no sense are not reported
  uint32_t op;
};

// Writes zeros to bytes [begin, end) of `data`, multiples of 16: this warp's share among the grid's
// warps that call it, one of each CTA.
__device__ __forceinline__ void ZeroFill(void* data, int64_t begin, int64_t end) {
  const int64_t step = int64_t{16} * 32 * gridDim.x;
  int64_t at = begin + 16 * (int64_t{32} * blockIdx.x + threadIdx.x % 32);
  for (; at < end; at += step) {
    ptx::StoreGlobal16(static_cast<char*>(data) + at, make_uint4(0, 0, 0, 0));
  }
}

// Zeros for groups without rows in an array of `bytes` for each group. Returns the sum of the sizes
// (ForEachGroup). Called by a full warp of each CTA.
__device__ __forceinline__ int64_t FillEmptyGroups(const GroupedRows& groups, void* data,
                                                   int64_t bytes) {
  return ForEachGroup(groups.group_sizes, groups.groups, groups.rows,
                      [&](int32_t first, bool is_group, GroupRows rows) {
                        uint32_t empty =
                            __ballot_sync(0xffffffff, is_group && rows.begin == rows.end);
                        for (; empty != 0; empty &= empty - 1) {
                          const int64_t group = first + __ffs(empty) - 1;
                          ZeroFill(data, group * bytes, (group + 1) * bytes);
                        }
                      });
}

// Reports sizes that are negative, or sum to more than the rows that there are, and traps. Called
// by a full warp of each CTA.
__device__ __forceinline__ void CheckSizes(const GroupedRows& groups, int64_t sum) {
  if (groups.state == nullptr || blockIdx.x != 0) return;
  const int lane = threadIdx.x % 32;
  int32_t group = -1;  // the one whose size is negative
  for (int32_t i = lane; i < groups.groups; i += 32) {
    if (__ldg(groups.group_sizes + i) < 0) group = i;
  }
  const uint32_t negative = __ballot_sync(0xffffffff, group >= 0);
  if (negative == 0 && sum <= groups.rows) return;
  if (lane != (negative == 0 ? 0 : __ffs(negative) - 1)) return;
  Fault* fault = groups.state->limits.fault;
  if (fault->kind != 0) PauseAndTrap();  // only the first one is recorded
  WaitContext context{};
  context.op = groups.op;
  const int64_t seen = negative == 0 ? sum : __ldg(groups.group_sizes + group);
  WriteRecord(fault, context, FaultKind::kGroupSizes, 0, group, static_cast<uint64_t>(groups.rows),
              static_cast<uint64_t>(seen));
  PauseAndTrap();
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_ROWS_CUH_
