// The product of some rows of a group, and what follows it, on the CPU back end.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_

#include <cstdint>
#include <vector>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/cpu_matmul.h"

namespace jflux {

// The weights of one group, converted once. They outlive it.
class GroupRowsCpu {
 public:
  GroupRowsCpu(const GroupedMatmulParams& p, const void* const (&w)[2], int64_t group);

  // Of the rows x [count, k]. The results are rows [first, first + count) of y and of the sums;
  // `row_scale` begins at row 0.
  void Multiply(const void* x, int64_t first, int64_t count, const float* row_scale, void* y,
                void* const (&sums)[2]) const;

 private:
  GroupedMatmulParams p_;
  std::vector<CpuRhs> weights_;
};

// Writes zeros to the rows of the results from `first` on.
void ZeroRowsCpu(const GroupedMatmulParams& p, int64_t first, void* y, void* const (&sums)[2]);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUP_ROWS_CPU_H_
