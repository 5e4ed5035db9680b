// Pure functions for the plan of a grouped_matmul_reduce_scatter on GPUs.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CONFIG_H_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CONFIG_H_

#include <string>

#include "ops/grouped_matmul/segments.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "runtime/op.h"

namespace jflux {

// Bytes of an item's sums: enough that a signal, and a wait for it, do not count. The last items
// are what nothing hides, so there should be one for each warp.
inline constexpr int64_t kItemBytes = 8192;
inline constexpr int32_t kMostItemTokens = 16;

// The fewest rows of an expert in a segment for several segments of a rank. The sums that they hide
// take a few percent of the product's time, so reading weights once more needs more rows than in a
// gather to be worthwhile.
inline constexpr int64_t kLeastRowsToScatter = 2 * kLeastRowsOfSegment;

inline int32_t ItemTokens(int64_t row_bytes) {
  return static_cast<int32_t>(
      Max<int64_t>(1, Min<int64_t>(kMostItemTokens, kItemBytes / row_bytes)));
}

inline bool AreItemTokens(int64_t n) { return 0 < n && n <= kMostItemTokens; }

bool PlanGroupedMatmulReduceScatter(const Fields& call, const Machine& machine, Fields* plan,
                                    std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_CONFIG_H_
