// The product of some rows of a group, and what follows it, on the CPU back end.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_

#include <cstdint>
#include <vector>

#include "core/gathered_tiles.h"
#include "core/signal.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/cpu_matmul.h"

namespace jflux {

// The weights of one group, converted once. They outlive it.
class GroupRowsCpu {
 public:
  GroupRowsCpu(const GroupedMatmulParams& p, const void* const (&w)[2], int64_t group);

  // Multiplies the rows x [count, k]. The results are rows [first, first + count) of y and of the
  // sums; `row_scale` begins at row 0. `second`: x of the second term, if there are two.
  void Multiply(const void* x, int64_t first, int64_t count, const float* row_scale, void* y,
                void* const (&sums)[2], const void* second = nullptr) const;

 private:
  GroupedMatmulParams p_;
  std::vector<CpuRhs> weights_;
};

// Fills the rows of the results from `first` on (GroupedMatmulParams::fill).
void FillRowsCpu(const GroupedMatmulParams& p, int64_t first, void* y, void* const (&sums)[2]);

// Whether the first rows of the groups of a product over ranks, offsets [groups + 1], are possible
// ones. If not, reports a fault.
bool OffsetsAreRight(const GroupedMatmulParams& p, const int32_t* offsets, const WaitContext& ctx);

// How many of the rows [begin, end) of a group have tokens of segments before `segment`; of
// Segments(): all.
inline int32_t RowsBefore(const SegmentedTiles& order, int32_t segment, int32_t begin, int32_t end,
                          int64_t tokens_per_rank, int32_t choices, const int32_t* source) {
  if (segment == order.Segments()) return end - begin;
  const int64_t slot = order.FirstToken(segment, tokens_per_rank) * choices;
  return LowerBound(begin, end, slot, [&](int32_t row) { return source[row]; }) - begin;
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_
