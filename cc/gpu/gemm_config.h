// The GEMM configurations that are compiled, and what a configuration means for a call.
// gpu/gemm_choice.h chooses one when a call is planned (runtime/op.h); handlers take what the plan
// says.
#ifndef JFLUX_GPU_GEMM_CONFIG_H_
#define JFLUX_GPU_GEMM_CONFIG_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/platform.h"
#include "core/signal.h"
#include "core/tile_order.h"
#include "gpu/machine.h"

namespace jflux {

struct GemmChoice {
  int32_t tile_n;         // columns per CTA tile; it always has 128 rows
  int32_t cluster_m;      // 2 or 1 CTAs one below the other
  int32_t group_m;        // cluster tile rows that share a raster group over n; 0: all do
  int32_t splits = 1;     // of k, each computed by another CTA of a cluster; of few rows
  bool portable = false;  // by the main loop of gpu/gemm_sm80.cuh, and not gpu/gemm_sm90.cuh

  bool operator==(const GemmChoice& o) const {
    return tile_n == o.tile_n && cluster_m == o.cluster_m && group_m == o.group_m &&
           splits == o.splits && portable == o.portable;
  }
};

// What the portable main loop multiplies in every product (float32 as TF32), and in one that takes
// scales; and the one configuration that it has for each group_m: two CTAs share an SM.
inline constexpr FormatSet kFormats80 = kHalves | SetOf(DType::kF32);
inline constexpr FormatSet kScaledProduct80 =
    kFormats80 | SetOf(DType::kS8, DType::kF8E4M3FN, DType::kF8E5M2);
inline constexpr int32_t kTileN80 = 128, kCtasPerSm80 = 2;
inline constexpr GemmChoice Portable(int32_t group_m) { return {kTileN80, 1, group_m, 1, true}; }
// Whether products are for the portable main loop. On Hopper it has half of wgmma's rate.
inline constexpr bool IsForPortable(const Machine& machine) { return machine.arch < kHopperArch; }
inline constexpr FormatSet FormatsOfLoop(bool portable) {
  return portable ? kFormats80 : kWgmmaFormats;
}
// The same of a product that takes scales in both loops.
inline constexpr FormatSet FormatsOfScaledLoop(bool portable) {
  return portable ? kScaledProduct80 : kWgmmaFormats;
}

// The configurations that have kernels, each with a usual group_m.
inline constexpr GemmChoice kCompiled[] = {{192, 2, 8}, {256, 2, 8}, {224, 2, 8}, {192, 1, 16},
                                           {160, 2, 8}, {128, 2, 8}, {128, 1, 16}};
// With few rows, the CTAs of a cluster may share the k of a tile of kSharedKTile columns. The other
// two constants are the most CTAs that may: in ops that gather, and in ops that sum over ranks.
inline constexpr int32_t kSharedKTile = 128, kGatherSplits = 4, kReduceSplits = 2;
inline constexpr bool CanShareK(int32_t tile_n, int32_t cluster_m) {
  return tile_n == kSharedKTile && cluster_m == 1;
}
// Whether both consumers share a tile of this many columns, whose accumulators do not fit into the
// registers of one. Nothing is multiplied while they finish such a tile.
inline constexpr bool IsShared(int32_t tile_n) { return tile_n > 192; }
// The scales of a product's operands of 8 bits:
//
//   kOfSums      of x's rows and w's columns; sums over k are multiplied by them
//   kOfBlocks    with an entry for each block of k (gpu/block_scales_sm90.cuh): of x's rows, and of
//                blocks of w's columns
//   kOfVectors   the same, of x's rows and w's columns
enum class Scales : int64_t { kNone, kOfSums, kOfBlocks, kOfVectors };
inline constexpr bool IsScales(int64_t number) { return 0 <= number && number <= 3; }
inline constexpr bool HasEntriesOfK(Scales s) { return s > Scales::kOfSums; }
// Whether kernels whose x is of a format have scales with entries of k.
inline constexpr bool HasBlockScales(DType t) {
  return t == DType::kF8E4M3FN || t == DType::kF8E5M2;
}
inline constexpr bool HasVectorScales(DType t) { return t == DType::kF8E4M3FN; }
// The elements of k, or of another dimension, that share an entry of such a scale. Those of k are a
// k-block of the main loop.
inline constexpr int kScaleBlock = 128;
// Whether a tile of this many columns can have them: a thread then has the sums of one k-block
// beside a tile's, those of all columns, or of one of two blocks of columns.
// `gates`: of an op that has gates, in which a tile of two blocks is worth it.
inline constexpr bool CanHave(Scales s, int32_t tile_n, bool gates) {
  return !HasEntriesOfK(s) ||
         (s == Scales::kOfVectors ? tile_n == 128 || tile_n == 192
                                  : !IsShared(tile_n) || (gates && tile_n == 2 * kScaleBlock));
}
// Whether kernels whose results are quantised have a tile of this many columns, with such scales:
// with a gate, half of them, a block, are results.
inline constexpr int32_t kQuantizingTile = 256;
// How results are quantised: as e4m3, of which 1 x kScaleBlock share a scale.
enum class Quantizing : int64_t { kNone, kByAnyScale, kByPowersOfTwo };
inline constexpr DType kQuantized = DType::kF8E4M3FN;  // and operands of these kernels
inline constexpr bool IsQuantizing(int64_t number) { return 0 <= number && number <= 2; }
inline constexpr bool CanQuantize(Scales s, int32_t tile_n) {
  return tile_n == kQuantizingTile && (s == Scales::kOfSums || s == Scales::kOfBlocks);
}

inline constexpr int32_t kGemmTileM = 128;
// The rows of a box of A. A box does not reach past the end of an array of fewer than kGemmTileM
// rows: TMA would fill the other rows with zeros, which takes longer than reading as many. The
// tile's other rows in shared memory hold anything, and nobody stores their products.
inline constexpr int32_t BoxRows(int64_t m) {
  return static_cast<int32_t>(Min<int64_t>(m, kGemmTileM));
}
// The columns of a box that TMA stores.
inline constexpr int32_t StoreColumns(const GemmChoice& c) {
  return c.tile_n / c.splits % 64 == 0 ? 64 : 32;
}

inline constexpr int kMaxWeights = 4;  // of one call
inline constexpr int kMaxGroup = 4096;

// The configuration decides how data travels, so ranks must agree on it too. `site` tells calls of
// a program apart that ranks could otherwise make in different orders.
inline uint32_t SignatureOf(uint32_t call, int64_t site, const GemmChoice& c) {
  SignatureBuilder builder;
  builder.Add(call).Add(site).Add(c.tile_n).Add(c.cluster_m).Add(c.splits);
  if (c.portable) builder.Add(1);
  return builder.Get();
}

// Whether the kernels can do it: choices also come from files.
inline bool IsPossible(const GemmChoice& c) {
  if (c.portable) return c == Portable(c.group_m) && 0 <= c.group_m && c.group_m <= kMaxGroup;
  bool compiled = false;
  for (const GemmChoice& k : kCompiled) {
    compiled |= k.tile_n == c.tile_n && k.cluster_m == c.cluster_m;
  }
  return compiled && 0 <= c.group_m && c.group_m <= kMaxGroup &&
         (c.splits == 1 || (CanShareK(c.tile_n, c.cluster_m) && (c.splits == 2 || c.splits == 4)));
}

// The choice for a call of m rows, in which every CTA has some of k (of the first term's, if there
// are several): at most `most` of them share it. `row_bytes`: of k elements.
inline GemmChoice FitSplits(GemmChoice c, int64_t m, int64_t row_bytes, int32_t most) {
  c.splits = m <= kGemmTileM ? Min(c.splits, most) : 1;
  while (c.splits > 1 && CeilDiv<int64_t>(row_bytes, kBlockBytes) < c.splits) c.splits /= 2;
  return c;
}

// Whether c.splits CTAs can share the k of a product of m rows; at most `most` may.
inline bool SharesK(const GemmChoice& c, int64_t m, int64_t row_bytes, int32_t most) {
  return FitSplits(c, m, row_bytes, most) == c;
}

// Why the kernels of a product do not take operands of these formats and sizes; empty if they do.
// k, n: of each weight. Rows are whole vectors, of operands and results.
inline std::string WhyNotOperands(const OpFormats& op, FormatSet machine, DType dtype,
                                  DType w_dtype, DType out_dtype, int64_t k, int64_t n,
                                  bool transpose_rhs) {
  std::string why = WhyNotFormats(op, machine, dtype, w_dtype, out_dtype);
  if (!why.empty()) return why;
  if (FormatOf(w_dtype).k_major && !transpose_rhs) {
    return std::string("w of ") + FormatOf(w_dtype).name + " must be stored [n, k]";
  }
  const int64_t vector = kVectorBytes / SizeOf(dtype);
  if (k % vector == 0 && n % vector == 0) return "";
  return "k and n must be multiples of " + std::to_string(vector);
}
// Tiles of ops that exchange rows of shards: the rows of a tile must follow each other.
inline constexpr char kStraddlingTiles[] =
    "with leading dimensions, shards must have a multiple of 128 rows";

// WhyNotOperands of a product with an all-to-all.
template <typename Params>
std::string WhyNotShards(const OpFormats& op, FormatSet machine, const Params& p, DType w_dtype) {
  const bool strided = p.rows.outer > 1 && (p.split_rows || p.concat_rows);
  if (strided && p.rows.inner % kGemmTileM != 0) return kStraddlingTiles;
  return WhyNotOperands(op, machine, p.dtype, w_dtype, p.out_dtype, p.k, p.n, p.transpose_rhs);
}

// The choice for a call with such scales, of an op that has gates or not. `most`: CTAs that may
// share k with kOfBlocks.
inline GemmChoice ForScales(GemmChoice c, Scales scales, bool gates = false, int32_t most = 1) {
  if (!HasEntriesOfK(scales)) return c;
  if (!CanHave(scales, c.tile_n, gates)) c.tile_n = 192;
  c.splits = Min(c.splits, scales == Scales::kOfBlocks ? most : 1);
  return c;
}

// The columns of a tile of int8 in ops that have few kernels for it, one for each cluster_m; and
// the choice that such an op makes of another.
inline constexpr int32_t FewTileN(int32_t cluster_m) { return cluster_m == 2 ? 192 : 128; }
inline GemmChoice ForFew(GemmChoice c, DType dtype) {
  if (dtype == DType::kS8) c.tile_n = FewTileN(c.cluster_m);
  return c;
}

// The choice for a call whose results are quantised, with groups of as many rows.
inline GemmChoice ForQuantizing(const GemmChoice& c) {
  return {kQuantizingTile, 2, c.cluster_m == 2 ? c.group_m : CeilDiv(c.group_m, 2)};
}

// CTAs that run at once. Not all SMs are in groups of four: 120 of 132.
inline int AtOnce(const GemmChoice& c, int sm_count) {
  if (c.portable) return kCtasPerSm80 * sm_count;
  return c.splits == 4 ? sm_count / 11 * 10 : sm_count;
}

// Whether so many cluster tiles are all computed at the same time.
inline bool IsOneWave(const GemmChoice& c, int32_t tiles, int sm_count) {
  return tiles <= sm_count / c.cluster_m;
}

inline TileGrid GridOf(const GemmChoice& c, int64_t m, int64_t n, int sm_count) {
  return TileGrid{static_cast<int32_t>(CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m)),
                  static_cast<int32_t>(CeilDiv<int64_t>(n, c.tile_n)), c.group_m,
                  (c.portable ? kCtasPerSm80 : 1) * sm_count / c.cluster_m};
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CONFIG_H_
