// What an all_gather_grouped_matmul on GPUs is planned with: pure functions.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_

#include <string>

#include "gpu/senders.h"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/grouped_matmul/segments.h"
#include "runtime/op.h"

namespace jflux {

// Four boxes of this size pass through a send warp's shared memory, and are a chunk. The rest of
// that memory holds the table of segments.
inline constexpr int32_t kTokenBoxes = 4, kTokenBoxBytes = 3328;
inline constexpr int64_t kTokenChunkBytes = kTokenBoxes * kTokenBoxBytes;
inline TokenLayout CudaLayoutOf(const AllGatherGroupedMatmulParams& p) {
  return TokenLayout::Make(p, kTokenChunkBytes);
}

// CTAs that may send. mean_rows: SegmentedCall's.
inline int32_t TokenSenders(const AllGatherGroupedMatmulParams& p, int64_t mean_rows,
                            const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  const int64_t columns = p.product.n * p.product.Weights();
  return SendingCtas(p.world, Max<int64_t>(1, columns * mean_rows / (p.world * p.tokens)), used);
}

// Why no kernel takes the call; empty if one does.
inline std::string WhyNoKernel(const AllGatherGroupedMatmulParams& p) {
  const std::string why = WhyNoSegmentedKernel(p.product);
  if (!why.empty()) return why;
  constexpr int64_t kMostChunks = int64_t{1} << 29;
  return p.ShardBytes() / kTokenChunkBytes > kMostChunks / p.world ? "a dimension is too large"
                                                                   : "";
}

bool PlanAllGatherGroupedMatmul(const Fields& call, const Machine& machine, Fields* plan,
                                std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
