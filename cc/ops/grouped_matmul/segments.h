// Pure functions that grouped products over ranks share. The rows of their groups are sorted by
// token (core/gathered_tiles.h).
#ifndef JFLUX_OPS_GROUPED_MATMUL_SEGMENTS_H_
#define JFLUX_OPS_GROUPED_MATMUL_SEGMENTS_H_

#include <string>

#include "core/layout.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/op.h"

namespace jflux {

// Spans are groups times segments. A kernel's table has room for kMostSpans, as of 256 groups and 8
// ranks. All kernels have been timed with up to kFewSpans.
inline constexpr int32_t kMostSpans = 2048, kFewSpans = 767;

// The fewest rows of an expert in a segment, on average, for reading the expert's weights once for
// each segment: a product of so many rows takes about as long as reading its weights. The second
// constant is for more than kFewSpans spans, where 256 rows were up to 5 % slower that way on
// 4 x H100, and 512 rows took .89 of the time on 4 x H200 (docs/experiments/0039).
inline constexpr int64_t kLeastRowsOfSegment = 256, kLeastRowsOfManySpans = 512;
// The most segments of a rank, which tiles wait for one by one. The first group of a class waits
// for all of its segment. With one segment for each rank, the product of the last segment begins
// when all tokens have arrived.
inline constexpr int32_t kMostParts = 4;
static_assert(kMaxRanks * kMostParts <= kMostTileClasses);

// How many segments a rank has; 0 if all tiles are one class, as with few rows: weights are then
// read once, and nothing is hidden. Several segments need `least_of_several` rows of an expert
// each. One segment needs at most `most` spans.
inline int32_t ChooseParts(int32_t world, int64_t m, int64_t groups,
                           int64_t least_of_several = kLeastRowsOfSegment,
                           int64_t most = kMostSpans) {
  if (world == 1) return 0;
  int32_t parts = 0;
  for (int32_t p = 1; p <= kMostParts; p *= 2) {
    const int64_t spans = groups * world * p;
    const bool few = spans <= kFewSpans;
    const int64_t least = p > 1 ? least_of_several
                          : few ? kLeastRowsOfSegment
                                : kLeastRowsOfManySpans;
    if (spans <= (p > 1 ? kFewSpans : most) && m >= least * spans) parts = p;
  }
  return parts;
}

inline bool ArePossibleParts(int32_t parts, int32_t world, int64_t groups) {
  return parts == 0 ? groups <= kMostSpans
                    : 0 < parts && parts <= kMostParts && groups * world * parts <= kMostSpans;
}

// The configuration that a plan or a table names; empty if no kernel has it.
inline bool IsGroupedChoice(const GemmChoice& c, bool gated) {
  if (c.portable) return IsPossible(c) && c.group_m > 0;
  return c.splits == 1 && 1 <= c.group_m && c.group_m <= kMaxGroup && c.tile_n != 0 &&
         IsGroupedTile(gated, TileChoice{c.tile_n, c.cluster_m});
}

// The configuration of a call.
inline GemmChoice ChooseSegmented(const GroupedMatmulParams& p, const Machine& machine) {
  return IsForPortable(machine) ? Portable(8) : ChooseGrouped(p, machine);
}

// Why no kernel takes the product; empty if one does.
inline std::string WhyNoSegmentedKernel(const GroupedMatmulParams& product, bool portable) {
  std::string why =
      WhyNotOperands(kGroupedFormats, FormatsOfLoop(portable), product.dtype, product.dtype,
                     product.out_dtype, product.k, product.n, product.transpose_rhs);
  if (!why.empty()) return why;
  if (product.groups > kMostSpans) {
    return "more than " + std::to_string(kMostSpans) + " groups";
  }
  // In portable code a tile's column counts through groups and classes.
  const int64_t kMost = int64_t{1} << 29;
  if (portable && product.groups * CeilDiv<int64_t>(product.n, 64) > kMost / kMostTileClasses) {
    return "a dimension is too large";
  }
  if (product.m > kMost || product.k > kMost || product.n > kMost ||
      product.groups * CeilDiv<int64_t>(product.n, 64) > kMost) {
    return "a dimension is too large";
  }
  return "";
}

// Fields of a call: world, tokens (of a rank), choices, k, n, groups, dtype, out_dtype,
// transpose_rhs; perhaps owners, among which the slots' rows are split; perhaps tile_n and
// cluster_m, which a test forces.
struct SegmentedCall {
  int32_t world;
  int64_t tokens;
  int32_t choices;
  GroupedMatmulParams product;
  int64_t mean_rows;  // of a rank's groups together; product.m is the most

  // The product for which a configuration is chosen.
  GroupedMatmulParams OfMeanRows(GroupedMatmulParams of) const {
    of.m = mean_rows;
    return of;
  }

  // The op reads its own fields and then calls `call.Check`.
  static SegmentedCall Read(CallReader& call) {
    constexpr int64_t kMost = INT32_MAX;
    SegmentedCall c{};
    c.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
    c.tokens = call.Get("tokens", 1, kMost);
    c.choices = static_cast<int32_t>(call.Get("choices", 1, kMost));
    GroupedMatmulParams& product = c.product;
    product.k = call.Get("k", 1, kMost);
    product.n = call.Get("n", 1, kMost);
    product.groups = call.Get("groups", 1, kMost);
    product.dtype = call.GetFormat("dtype");
    product.out_dtype = call.GetFormat("out_dtype");
    product.transpose_rhs = call.Get("transpose_rhs", 0, 1) == 1;
    product.tile.columns = static_cast<int32_t>(call.GetOr("tile_n", 0, 0, kMaxGroup));
    product.tile.cluster_m = static_cast<int32_t>(call.GetOr("cluster_m", 0, 0, 2));
    // Within these limits no size overflows.
    const double rows = static_cast<double>(c.world) * c.tokens * c.choices;
    const double widest = static_cast<double>(Max(product.k, product.n));
    if (rows > kMost || rows * widest > 0x1p48 ||
        widest * widest * static_cast<double>(product.groups) > 0x1p52) {
      call.Refuse("operands of more than 2^31 rows or 2^48 elements");
    } else {
      product.m = c.world * c.tokens * c.choices;
    }
    c.mean_rows = Max<int64_t>(1, product.m / call.GetOr("owners", 1, 1, kMaxRanks));
    return c;
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_SEGMENTS_H_
