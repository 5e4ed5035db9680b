// Which of the compiled GEMM configurations to use: data, and pure functions that choose. They are
// called when a call is planned (runtime/op.h); handlers take what the plan says.
#ifndef JFLUX_GPU_GEMM_CONFIG_H_
#define JFLUX_GPU_GEMM_CONFIG_H_

#include <cstdint>
#include <initializer_list>

#include "core/platform.h"
#include "core/signal.h"
#include "core/tile_order.h"
#include "gpu/machine.h"

namespace jflux {

struct GemmChoice {
  int32_t tile_n;      // columns per CTA tile; it always has 128 rows
  int32_t cluster_m;   // 2 or 1 CTAs one below the other
  int32_t group_m;     // cluster tile rows that share a raster group over n; 0: all do
  int32_t splits = 1;  // of k, each computed by another CTA of a cluster; of few rows

  bool operator==(const GemmChoice& o) const {
    return tile_n == o.tile_n && cluster_m == o.cluster_m && group_m == o.group_m &&
           splits == o.splits;
  }
};

// Those that have kernels, each with a usual group.
inline constexpr GemmChoice kCompiled[] = {{192, 2, 8}, {256, 2, 8}, {224, 2, 8}, {192, 1, 16},
                                           {160, 2, 8}, {128, 2, 8}, {128, 1, 16}};
// Of few rows, the CTAs of a cluster may share the k of a tile of this many columns; at most so
// many of them, by op.
inline constexpr int32_t kSharedKTile = 128, kGatherSplits = 4, kReduceSplits = 2;
inline constexpr bool CanShareK(int32_t tile_n, int32_t cluster_m) {
  return tile_n == kSharedKTile && cluster_m == 1;
}
// Whether both consumers share a tile of so many columns, since one of them has no registers for
// it: then nothing is multiplied while it is finished.
inline constexpr bool IsShared(int32_t tile_n) { return tile_n > 192; }

inline constexpr int32_t kGemmTileM = 128;
// Of a box of A. Rows past the array's end would be filled with zeros, which takes longer than
// reading as many; what multiplies the tile's other rows is nonsense that nobody stores.
inline constexpr int32_t BoxRows(int64_t m) {
  return static_cast<int32_t>(Min<int64_t>(m, kGemmTileM));
}
// Of a box that TMA stores.
inline constexpr int32_t StoreColumns(const GemmChoice& c) {
  return c.tile_n / c.splits % 64 == 0 ? 64 : 32;
}

inline constexpr int kGemmTileK = 64;
inline constexpr int kUnitBytes = 16;  // rows of operands and results are whole units
inline constexpr int kMaxWeights = 4;  // of one call
inline constexpr int kMaxGroup = 4096;

// What tiles that consumers share, and tiles of 128 columns, cost in an op, compared with an
// all-gather. In a reduce-scatter nothing is multiplied while shared ones wait for parts, and small
// ones have parts to send sooner. (An all-to-all sends tiles too.) And how much of a wave nothing
// hides if all rows are one raster group: the tiles of an all-gather then wait for the same rows,
// whatever their size (666 x 11040 x 4104 on 2 x H200: 62 us in one wave, 88 in two of half as wide
// tiles).
struct TileCosts {
  double shared, narrow, exposed_in_single_group;
};
inline constexpr double kExposed = 0.5;  // what the first tiles wait for, and the last ones send
inline constexpr TileCosts kGatherCosts{1, 1, 0}, kScatterCosts{1.02, 0.96, kExposed};

// Waves of tiles on the machine's SMs, times what a tile costs, per k: a fit to 38 calls of three
// ops on 2 x H200 and 48 products on one, in the mean of normal numbers, where power is the limit,
// and of zeros, where it is not. It chooses what was measured as the fastest, or for the calls at
// most 2.7 % slower (docs/experiments/0017).
inline double EstimateCost(const GemmChoice& c, int64_t m, int64_t n, int64_t k,
                           const Machine& machine, const TileCosts& costs = kGatherCosts,
                           double exposed = kExposed) {
  const int64_t tiles =
      CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m) * CeilDiv<int64_t>(n, c.tile_n);
  const int64_t waves = CeilDiv<int64_t>(tiles, machine.sm_count / c.cluster_m);
  // Wider tiles use what they read more often. A CTA alone shares w with none.
  const double per_column = c.tile_n == 256    ? 0.94
                            : c.tile_n == 224  ? 0.965
                            : c.tile_n == 192  ? (c.cluster_m == 1 ? 1.03 : 1.0)
                            : c.cluster_m == 1 ? 1.15
                            : c.tile_n == 160  ? 1.06
                                               : 1.08;
  // While a shared tile is finished nothing is multiplied: for as long as 350 columns of a k block
  // take.
  const double finish = IsShared(c.tile_n) ? 350.0 * kGemmTileK / static_cast<double>(k) : 0.0;
  const double op = IsShared(c.tile_n) ? costs.shared : c.tile_n == 128 ? costs.narrow : 1;
  return (static_cast<double>(waves) + exposed) * (c.tile_n * per_column + finish) * op;
}

// Whether all rows share one raster group over w, so that it is read once. The tiles of other
// ranks' rows then begin together with the own ones, and wait for what is on its way, or in the end
// for what others have to send; with few rows, or fast links, that is not long. On 2 x H200 two
// raster groups were 1 to 3 % slower at 512 rows, and up to 3 % faster at 1024
// (docs/experiments/0027); but in two raster groups ranks with fewer rows than a cluster's can have
// no clusters. If ranks share tiles, own rows by themselves cost another raster group for those.
inline bool InOneRasterGroup(int world, int64_t rows_per_rank, const Machine& machine) {
  const auto others = static_cast<double>((world - 1) * rows_per_rank);
  if (others == 0) return false;
  const double links = machine.LinkShare();
  if (rows_per_rank % kGemmTileM != 0) return others <= 1600 * links;
  const bool few = world * rows_per_rank < 1024 || rows_per_rank < 2 * kGemmTileM;
  return few && others < 1024 * links;
}

// For world ranks' rows, n columns per rank. A cluster's rows are two ranks' in one raster group
// only: it waits for both.
inline GemmChoice ChooseGemm(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                             const Machine& machine, const TileCosts& costs = kGatherCosts) {
  const bool single_group = InOneRasterGroup(world, rows_per_rank, machine);
  const int64_t m = world * rows_per_rank;
  const double exposed =
      (single_group ? costs.exposed_in_single_group : kExposed) / machine.LinkShare();
  const auto cost = [&](const GemmChoice& c) {
    return EstimateCost(c, m, n, k, machine, costs, exposed);
  };
  GemmChoice best{192, 1, 16};
  for (const GemmChoice& c : kCompiled) {
    if (c.cluster_m > 1 && !single_group && rows_per_rank < kGemmTileM * c.cluster_m) continue;
    if (cost(c) < cost(best)) best = c;
  }
  if (single_group) {
    best.group_m = 0;
  } else if (best.cluster_m == 2 && m > kGemmTileM * best.cluster_m * best.group_m) {
    // Raster groups of 1024 rows, where not all rows are one raster group: on 2 x H200, from 4096
    // rows on, faster than raster groups of 2048, by up to 3 % on normal numbers and 20 % on zeros.
    best.group_m = 4;
  }
  return best;
}

// The configuration decides how data travels, so ranks must agree on it too. `site` tells calls of
// a program apart that ranks could otherwise make in different orders.
inline uint32_t SignatureOf(uint32_t call, int64_t site, const GemmChoice& c) {
  return SignatureBuilder().Add(call).Add(site).Add(c.tile_n).Add(c.cluster_m).Add(c.splits).Get();
}

// Tile rows that share a raster group over w while an all-gather goes on. Many save reading w
// again, but a raster group needs all of its rows at once: its first wave of tiles reads from each.
// With q the time that a row takes to arrive over that of its product, and R rows per rank, a
// raster group of g rows that begins when p have been computed, R of them own ones, is on time if
// (p - R + g) q <= p. That is hardest for the first raster group, p = R, or, with slow links, for
// the last, p = world R - g.
inline GemmChoice GatherGroups(GemmChoice c, int world, int64_t rows_per_rank, int64_t n,
                               const Machine& machine) {
  if (c.group_m == 0) return c;
  // Columns for which q = 1.
  const double columns = kReferenceColumns * machine.sm_count / kReferenceSms / machine.LinkShare();
  const double q = columns / static_cast<double>(n), r = static_cast<double>(rows_per_rank);
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
  return compiled && 0 <= c.group_m && c.group_m <= kMaxGroup &&
         (c.splits == 1 || (CanShareK(c.tile_n, c.cluster_m) && (c.splits == 2 || c.splits == 4)));
}

// The choice for a call of m rows, in which every CTA has some of k (of the first term's, if there
// are several): at most `most` of them share it.
inline GemmChoice FitSplits(GemmChoice c, int64_t m, int64_t k, int32_t most) {
  c.splits = m <= kGemmTileM ? Min(c.splits, most) : 1;
  while (c.splits > 1 && CeilDiv<int64_t>(k, kGemmTileK) < c.splits) c.splits /= 2;
  return c;
}

// Whether so many CTAs of a cluster can share the k of such a call.
inline bool SharesK(const GemmChoice& c, int64_t m, int64_t k, int32_t most) {
  return FitSplits(c, m, k, most) == c;
}

// CTAs that run at once. Not all SMs are in groups of four: 120 of 132.
inline int AtOnce(const GemmChoice& c, int sm_count) {
  return c.splits == 4 ? sm_count / 11 * 10 : sm_count;
}

// Microseconds that a product of few rows takes, by how long it takes to read w: with whole waves
// from memory, with the last one perhaps as fast as its SMs can. As read on an H200.
inline double EstimateFew(const GemmChoice& c, int64_t m, int64_t n, int64_t k,
                          const Machine& machine) {
  // Bytes per microsecond of memory and of one SM; x's count half, since they are in L2. What
  // sharing k takes, among two or four.
  constexpr double kMemory = 3.7e6, kSm = 5.4e4, kOfX = 0.5, kTwo = 2, kFour = 3;
  const int at_once = AtOnce(c, machine.sm_count);
  const auto units = static_cast<int>(CeilDiv<int64_t>(n, c.tile_n) * c.splits);
  const double column_bytes = 2.0 * static_cast<double>(k) / c.splits;
  const double w = column_bytes * c.tile_n, x = column_bytes * static_cast<double>(m);
  const auto wave = [&](int count) { return Max(count * w / kMemory, (w + kOfX * x) / kSm); };
  const int rest = units % at_once;
  return units / at_once * wave(at_once) + (rest > 0 ? wave(rest) : 0) +
         (c.splits == 4   ? kFour
          : c.splits == 2 ? kTwo
                          : 0);
}

// With few rows, enough SMs should read w all the time. If there are fewer tiles, CTAs may share k.
inline GemmChoice ChooseSplits(GemmChoice best, int64_t m, int64_t n, int64_t k,
                               const Machine& machine, int32_t most) {
  for (int32_t splits = 2; splits <= most; splits *= 2) {
    const GemmChoice c = FitSplits({kSharedKTile, 1, 1, splits}, m, k, most);
    if (CeilDiv<int64_t>(n, c.tile_n) * c.splits > AtOnce(c, machine.sm_count) && c.splits > 2) {
      break;
    }
    if (EstimateFew(c, m, n, k, machine) < EstimateFew(best, m, n, k, machine)) best = c;
  }
  return best;
}
inline GemmChoice ChooseFew(int64_t m, int64_t n, int64_t k, const Machine& machine, int32_t most) {
  GemmChoice best{128, 1, 1};
  for (const GemmChoice& tile : kCompiled) {
    const GemmChoice c{tile.tile_n, 1, 1};
    if (tile.cluster_m > 1) continue;
    if (EstimateFew(c, m, n, k, machine) < EstimateFew(best, m, n, k, machine)) best = c;
  }
  return ChooseSplits(best, m, n, k, machine, most);
}

// For a gate of n columns in all: half of a tile's are one weight's, half the other's, in boxes
// of 64.
inline GemmChoice ForGate(GemmChoice c, int64_t m, int64_t n, int64_t k, const Machine& machine) {
  if (c.tile_n % 128 != 0) {
    const GemmChoice wide{256, 2, c.group_m}, narrow{128, c.cluster_m, c.group_m};
    const bool is_wide = c.cluster_m == 2 && EstimateCost(wide, m, n, k, machine) <
                                                 EstimateCost(narrow, m, n, k, machine);
    c = is_wide ? wide : narrow;
  }
  c.splits = 1;
  return c;
}

// Whether so many cluster tiles are all computed at the same time.
inline bool IsOneWave(const GemmChoice& c, int32_t tiles, int sm_count) {
  return tiles <= sm_count / c.cluster_m;
}

inline TileGrid GridOf(const GemmChoice& c, int64_t m, int64_t n, int sm_count) {
  return TileGrid{static_cast<int32_t>(CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m)),
                  static_cast<int32_t>(CeilDiv<int64_t>(n, c.tile_n)), c.group_m,
                  sm_count / c.cluster_m};
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CONFIG_H_
