// Pure functions for the plan of an all_gather_grouped_matmul on GPUs.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_

#include <string>

#include "gpu/senders.h"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/grouped_matmul/segments.h"
#include "runtime/op.h"

namespace jflux {

// A send warp's shared memory: a chunk, which passes through in four boxes, and behind it the table
// of spans. A table of more than 767 spans takes some of the chunk's memory: its last boxes are
// smaller then, or empty.
inline constexpr int32_t kTokenBoxes = 4, kTokenBoxBytes = 3328;
inline constexpr int64_t kMostTokenChunkBytes = kTokenBoxes * kTokenBoxBytes;
inline constexpr int64_t kTokenSendBytes = 16 << 10;
inline constexpr int64_t TokenChunkBytes(int64_t spans) {
  const int64_t table = RoundUp<int64_t>(4 * (spans + 1), 128);
  return Min(kMostTokenChunkBytes, kTokenSendBytes - table);
}
inline TokenLayout CudaLayoutOf(const AllGatherGroupedMatmulParams& p) {
  return TokenLayout::Make(p, TokenChunkBytes(p.product.groups * Max(1, p.world * p.parts)));
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
  return p.ShardBytes() / TokenChunkBytes(kMostSpans) > kMostChunks / p.world
             ? "a dimension is too large"
             : "";
}

bool PlanAllGatherGroupedMatmul(const Fields& call, const Machine& machine, Fields* plan,
                                std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
