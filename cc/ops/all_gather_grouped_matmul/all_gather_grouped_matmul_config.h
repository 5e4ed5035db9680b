// What an all_gather_grouped_matmul on GPUs is planned with: pure functions.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_

#include <string>

#include "gpu/senders.h"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/grouped_matmul/grouped_matmul_config.h"
#include "runtime/op.h"

namespace jflux {

// Four boxes of this size pass through a send warp's shared memory, and are a chunk. The rest of
// that memory holds the table of segments.
inline constexpr int32_t kTokenBoxes = 4, kTokenBoxBytes = 3328;
inline constexpr int64_t kTokenChunkBytes = kTokenBoxes * kTokenBoxBytes;
// Groups times segments, which the table has room for.
inline constexpr int32_t kMostSpans = 767;

inline TokenLayout CudaLayoutOf(const AllGatherGroupedMatmulParams& p) {
  return TokenLayout::Make(p, kTokenChunkBytes);
}

// Rows that an expert gets of a segment in the mean, from which on its weights may be read once for
// each segment: a product of so many rows takes about as long as reading its weights.
inline constexpr int64_t kLeastRowsOfSegment = 256;
// Segments of a rank that are worth waiting for one by one. The first group of a class waits for
// all of its segment, so with one for each rank the product of the last segment begins when all
// tokens have arrived.
inline constexpr int32_t kMostParts = 4;

// With few rows all tiles wait for all tokens, and weights are read once: no order hides anything.
inline int32_t ChooseParts(int32_t world, int64_t m, int64_t groups) {
  if (world == 1) return 0;
  int32_t parts = 0;
  for (int32_t p = 1; p <= kMostParts; p *= 2) {
    const int64_t spans = groups * world * p;
    if (spans <= kMostSpans && m >= kLeastRowsOfSegment * spans) parts = p;
  }
  return parts;
}

inline bool ArePossibleParts(int32_t parts, int32_t world, int64_t groups) {
  return parts == 0 ? groups <= kMostSpans
                    : 0 < parts && parts <= kMostParts && groups * world * parts <= kMostSpans;
}

// CTAs that may send.
inline int32_t TokenSenders(const AllGatherGroupedMatmulParams& p, const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  return SendingCtas(p.world, p.product.n * p.product.Weights() * p.choices, used);
}

// The configuration that a plan or a table names; empty if no kernel has it.
inline bool IsGroupedChoice(const GemmChoice& c, bool gated) {
  return c.splits == 1 && 1 <= c.group_m && c.group_m <= kMaxGroup && c.tile_n != 0 &&
         IsGroupedTile(gated, TileChoice{c.tile_n, c.cluster_m});
}

// Why no kernel takes the call; empty if one does.
inline std::string WhyNoKernel(const AllGatherGroupedMatmulParams& p) {
  const GroupedMatmulParams& product = p.product;
  if (SizeOf(product.dtype) != 2) return "the kernel takes bfloat16 and float16";
  if (product.out_dtype != product.dtype && product.out_dtype != DType::kF32) {
    return "the kernel's results have the operands' type, or float32";
  }
  if (product.k % 8 != 0 || product.n % 8 != 0) {
    return "rows of operands and results must be multiples of 16 bytes";
  }
  if (product.groups > kMostSpans) {
    return "more than " + std::to_string(kMostSpans) + " groups";
  }
  constexpr int64_t kMost = int64_t{1} << 29;
  if (product.m > kMost || product.k > kMost || product.n > kMost ||
      product.groups * CeilDiv<int64_t>(product.n, 64) > kMost ||
      p.ShardBytes() / kTokenChunkBytes > kMost / p.world) {
    return "a dimension is too large";
  }
  return "";
}

bool PlanAllGatherGroupedMatmul(const Fields& call, const Machine& machine, Fields* plan,
                                std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_CONFIG_H_
