// Which of the compiled GEMM configurations to use: data, and a pure function that chooses.
#ifndef JFLUX_GPU_GEMM_CONFIG_H_
#define JFLUX_GPU_GEMM_CONFIG_H_

#include <cstdint>
#include <initializer_list>

#include "core/platform.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace jflux {

struct GemmChoice {
  int32_t tile_n;      // 256, 192 or 128 columns per CTA tile; always 128 rows
  int32_t cluster_m;   // 2 or 1 CTAs one below the other
  int32_t group_m;     // cluster tile rows that share a sweep over n
  int32_t splits = 1;  // of k, each computed by another CTA; up to 16, and without clusters

  bool operator==(const GemmChoice& o) const {
    return tile_n == o.tile_n && cluster_m == o.cluster_m && group_m == o.group_m &&
           splits == o.splits;
  }
};

// Those that have kernels, each with a usual group.
inline constexpr GemmChoice kCompiled[] = {
    {256, 2, 8}, {256, 1, 16}, {192, 2, 8}, {128, 2, 8}, {128, 1, 16}};

inline constexpr int32_t kGemmTileM = 128;
inline constexpr int kGemmTileK = 64;
inline constexpr int kMaxWeights = 4;  // of one call
inline constexpr int kMaxSplits = 16;  // of k

// Waves of tiles on `sm_count` SMs, times what a tile costs.
inline double EstimateCost(const GemmChoice& c, int64_t m, int64_t n, int sm_count) {
  const int64_t tiles =
      CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m) * CeilDiv<int64_t>(n, c.tile_n);
  const int64_t waves = CeilDiv<int64_t>(tiles, sm_count / c.cluster_m);
  // Half the columns is more than half the time (operands from shared memory are used half as
  // often), and a tile that shares nothing reads more from L2.
  const double tile_cost = c.tile_n == 128 ? 0.56 : c.cluster_m == 1 ? 1.04 : 1.0;
  return static_cast<double>(waves) * tile_cost;
}

// For m rows in all, n columns per rank.
inline GemmChoice ChooseGemm(int64_t m, int64_t n, int sm_count) {
  GemmChoice best{256, 2, 8};
  for (const GemmChoice c : {GemmChoice{256, 1, 16}, GemmChoice{128, 1, 16}}) {
    if (EstimateCost(c, m, n, sm_count) < EstimateCost(best, m, n, sm_count)) best = c;
  }
  return best;
}

// The configuration decides how data travels, so ranks must agree on it too. `site` tells calls of
// a program apart that ranks could otherwise make in different orders.
inline uint32_t SignatureOf(uint32_t call, int64_t site, const GemmChoice& c) {
  return SignatureBuilder().Add(call).Add(site).Add(c.tile_n).Add(c.cluster_m).Get();
}

// Tile rows that share a sweep over w while an all-gather goes on. Many save reading w again, but a
// sweep needs all of its rows at once: its first wave of tiles reads from each. With q the time
// that a row takes to arrive over that of its product, and R rows per rank, a sweep of g rows that
// begins when p have been computed, R of them own ones, is on time if (p - R + g) q <= p. That is
// hardest for the first sweep, p = R, or, with slow links, for the last, p = world R - g.
inline GemmChoice GatherGroups(GemmChoice c, int world, int64_t rows_per_rank, int64_t n) {
  // Columns for which q = 1. A row is 2 k bytes, at 220 GB/s, and 2 k n operations, at 650 TFLOP/s,
  // as both were read on 4 x H200 while the other went on.
  constexpr double kColumns = 3000;
  const double q = kColumns / static_cast<double>(n), r = static_cast<double>(rows_per_rank);
  const double rows = Min(r / q, world * r - (world - 1) * r * q);
  const double tiles = rows / (kGemmTileM * c.cluster_m);
  c.group_m = static_cast<int32_t>(Max(1.0, Min(tiles, static_cast<double>(c.group_m))));
  return c;
}

// Whether the kernels can do it: choices also come from files.
inline bool IsPossible(const GemmChoice& c) {
  bool compiled = false;
  for (const GemmChoice& k : kCompiled) {
    compiled |= k.tile_n == c.tile_n && k.cluster_m == c.cluster_m;
  }
  return compiled && c.group_m >= 1 && 1 <= c.splits && c.splits <= kMaxSplits &&
         (c.splits == 1 || c.cluster_m == 1);
}

// Splits that each have something of k.
inline int32_t SplitsOf(const GemmChoice& c, int64_t k) {
  return static_cast<int32_t>(Min<int64_t>(c.splits, CeilDiv<int64_t>(k, kGemmTileK)));
}

// With few rows, a product is bound by reading w: it should keep all SMs reading all the time.
inline GemmChoice SplitFew(GemmChoice c, int64_t m, int64_t n, int64_t k, int sm_count) {
  const int64_t rows = CeilDiv<int64_t>(m, kGemmTileM), tiles = rows * CeilDiv<int64_t>(n, 128);
  if (rows > 2 || tiles >= sm_count) return c;
  GemmChoice best{128, 1, static_cast<int32_t>(rows)};
  double least = 1e9;
  for (int32_t splits = 1; splits <= 8; ++splits) {
    // Each sum is written and read in float32, which costs less than reading as much of w, since
    // it does not leave L2.
    constexpr double kOfReadingW = 0.3;
    const double sums = static_cast<double>((splits - 1) * rows * kGemmTileM * 4) / k;
    const double waves = static_cast<double>(CeilDiv<int64_t>(tiles * splits, sm_count)) / splits;
    const double cost = waves * (1 + kOfReadingW * sums);
    if (cost < least) {
      least = cost;
      best.splits = splits;
    }
  }
  return best;
}

// For a call of either op: with world ranks and rows_per_rank rows of each.
inline GemmChoice ChooseAllGather(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  int sm_count) {
  const int64_t m = world * rows_per_rank;
  return SplitFew(GatherGroups(ChooseGemm(m, n, sm_count), world, rows_per_rank, n), m, n, k,
                  sm_count);
}
inline GemmChoice ChooseReduceScatter(int world, int64_t rows_per_rank, int64_t n, int sm_count) {
  return ChooseGemm(world * rows_per_rank, n, sm_count);
}

inline TileGrid GridOf(const GemmChoice& c, int64_t m, int64_t n, int sm_count) {
  return TileGrid{static_cast<int32_t>(CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m)),
                  static_cast<int32_t>(CeilDiv<int64_t>(n, c.tile_n)), c.group_m,
                  sm_count / c.cluster_m};
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CONFIG_H_
