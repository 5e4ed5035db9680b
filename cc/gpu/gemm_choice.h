// Which of the compiled GEMM configurations (gpu/gemm_config.h) a product takes if nothing was
// measured: pure functions, called when a call is planned (runtime/op.h).
#ifndef JFLUX_GPU_GEMM_CHOICE_H_
#define JFLUX_GPU_GEMM_CHOICE_H_

#include <cstdint>

#include "core/platform.h"
#include "gpu/gemm_config.h"
#include "gpu/machine.h"

namespace jflux {

// Costs of tiles in an op, as factors; those of an all-gather are 1.
//
//   shared   tiles that both consumers share. In a reduce-scatter nothing is multiplied while such
//            a tile waits for its parts
//   narrow   tiles of 128 columns. In a reduce-scatter, or an all-to-all, their parts are sent
//            sooner
//   exposed_in_single_group   the part of a wave that nothing hides if all rows are one raster
//            group. It is 0 for an all-gather: all tiles wait for the same rows, whatever their
//            width (666 x 11040 x 4104 on 2 x H200: 62 us in one wave, 88 in two of half as wide
//            tiles)
//   of_224, of_256   a column of such a tile; of one of 192 it is 1
//   x_load, w_load   how much longer rows of x and w take to load than aligned rows (RowLoad)
struct TileCosts {
  double shared, narrow, exposed_in_single_group;
  double x_load = 1, w_load = 1;
  double of_224 = 0.965, of_256 = 0.94;
};
inline constexpr double kExposed = 0.5;  // what the first tiles wait for, and the last ones send
inline constexpr TileCosts kGatherCosts{1, 1, 0}, kScatterCosts{1.02, 0.96, kExposed};
// Of operands of 8 bits in an op whose tiles may lend a stage: a fit to six products on one H200,
// for each of which it chooses what was the fastest (docs/experiments/0056).
inline constexpr TileCosts kGatherCosts8{1, 1, 0, 1, 1, 1, 1.02};
// The same with scales of blocks, which tiles of 224 columns cannot have.
inline constexpr TileCosts kGatherCostsOfBlocks{1, 1.11, 0, 1, 1, 1e3, 1.045};

// How much longer a k-block of a row takes to load than if rows were multiples of 64 bytes. With
// rows of an odd number of 16 bytes TMA reads parts of sectors, with rows of an odd number of 32
// bytes parts of more lines.
inline double RowLoad(int64_t row_bytes) {
  return row_bytes % 32 != 0 ? 1.75 : row_bytes % 64 != 0 ? 1.25 : 1;
}
// `costs` with x_load and w_load, for rows of x of k_bytes, and rows of w of n_bytes, or of k_bytes
// if transpose_rhs. `gathered`: how many ranks an x is gathered from. Only a rank's own part of x
// then has such rows; the peers' parts arrive in panels, which are aligned.
inline TileCosts Loading(TileCosts costs, int64_t k_bytes, int64_t n_bytes, bool transpose_rhs,
                         int gathered = 1) {
  costs.x_load = 1 + (RowLoad(k_bytes) - 1) / gathered;
  costs.w_load = RowLoad(transpose_rhs ? k_bytes : n_bytes);
  return costs;
}
// How much longer a k-block takes with such operands. Tensor cores multiply it by a tile of N
// columns in 4 N cycles, and an aligned row of a box takes 2.5 to arrive; CTAs of a cluster share
// what they load of w. These numbers and RowLoad's are a fit to 78 reduce-scatters on 2 x H100 and
// 2 x H200 (docs/experiments/0053).
inline double LoadFactor(const GemmChoice& c, const TileCosts& costs) {
  const auto cycles = [&](double x, double w) {
    return Max(4.0 * c.tile_n, 2.5 * (kGemmTileM * x + c.tile_n * w / c.cluster_m));
  };
  return cycles(costs.x_load, costs.w_load) / cycles(1, 1);
}

// Waves of tiles on the machine's SMs, times what a k-block of a tile costs: a fit to 38 calls of
// three ops on 2 x H200 and 48 products on one, in the mean of normal numbers, where power is the
// limit, and of zeros, where it is not. It chooses what was measured as the fastest, or for the
// calls at most 2.7 % slower (docs/experiments/0017).
inline double EstimateCost(const GemmChoice& c, int64_t m, int64_t n, int64_t k_bytes,
                           const Machine& machine, const TileCosts& costs = kGatherCosts,
                           double exposed = kExposed) {
  const int64_t tiles =
      CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m) * CeilDiv<int64_t>(n, c.tile_n);
  const int64_t waves = CeilDiv<int64_t>(tiles, machine.sm_count / c.cluster_m);
  // Wider tiles use what they read more often. A CTA alone shares w with none.
  const double per_column = c.tile_n == 256    ? costs.of_256
                            : c.tile_n == 224  ? costs.of_224
                            : c.tile_n == 192  ? (c.cluster_m == 1 ? 1.03 : 1.0)
                            : c.cluster_m == 1 ? 1.15
                            : c.tile_n == 160  ? 1.06
                                               : 1.08;
  // Nothing is multiplied while consumers finish a tile that they share, which takes as long as 350
  // columns of a k-block.
  const double finish =
      IsShared(c.tile_n) ? 350.0 * kBlockBytes / static_cast<double>(k_bytes) : 0.0;
  // A last column of tiles with few columns takes away what narrow tiles gain
  // (docs/experiments/0053).
  const bool is_narrow = c.tile_n == 128 && n % c.tile_n == 0;
  const double op = IsShared(c.tile_n) ? costs.shared : is_narrow ? costs.narrow : 1;
  return (static_cast<double>(waves) + exposed) * (c.tile_n * per_column + finish) * op *
         LoadFactor(c, costs);
}

// Whether all rows share one raster group over w, so that w is read once. Tiles of other ranks'
// rows then begin together with tiles of own rows, and wait for rows that are on their way, or at
// the end for parts that peers have yet to send. With few rows, or fast links, this wait is short.
// On 2 x H200 two raster groups were 1 to 3 % slower at 512 rows, and up to 3 % faster at 1024
// (docs/experiments/0027). Two more cases favour one raster group. With two, a rank that has fewer
// rows than a cluster can have no clusters. And if ranks share tiles, these tiles would be a third
// raster group.
inline bool InOneRasterGroup(int world, int64_t rows_per_rank, const Machine& machine) {
  const auto others = static_cast<double>((world - 1) * rows_per_rank);
  if (others == 0) return false;
  const double links = machine.LinkShare();
  if (rows_per_rank % kGemmTileM != 0) return others <= 1600 * links;
  const bool few = world * rows_per_rank < 1024 || rows_per_rank < 2 * kGemmTileM;
  return few && others < 1024 * links;
}

// The configuration for the rows of `world` ranks and n columns per rank. The rows of a cluster
// belong to one rank, except in a single raster group, where a cluster may wait for two ranks.
inline GemmChoice ChooseGemm(int world, int64_t rows_per_rank, int64_t n, int64_t k_bytes,
                             const Machine& machine, const TileCosts& costs = kGatherCosts) {
  const bool single_group = InOneRasterGroup(world, rows_per_rank, machine);
  const int64_t m = world * rows_per_rank;
  const double exposed =
      (single_group ? costs.exposed_in_single_group : kExposed) / machine.LinkShare();
  const auto cost = [&](const GemmChoice& c) {
    return EstimateCost(c, m, n, k_bytes, machine, costs, exposed);
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

// The portable main loop's: raster groups of 1024 rows, unless all rows are one.
inline GemmChoice ChoosePortable(int world, int64_t rows_per_rank, const Machine& machine) {
  const int64_t m = world * rows_per_rank;
  const bool single_group = m <= kGemmTileM || InOneRasterGroup(world, rows_per_rank, machine);
  return Portable(single_group ? 0 : 8);
}

// The configuration for shards of `rows` rows. Each has whole tiles of its own, so the estimate
// counts the padding of every shard's last tiles.
inline GemmChoice ChooseForShards(int64_t shards, int64_t rows, int64_t n, int64_t k_bytes,
                                  const Machine& machine, const TileCosts& costs) {
  const auto cost = [&](const GemmChoice& c) {
    const int64_t m = shards * RoundUp<int64_t>(rows, kGemmTileM * c.cluster_m);
    return EstimateCost(c, m, n, k_bytes, machine, costs, kExposed / machine.LinkShare());
  };
  GemmChoice best{192, 1, 16};
  for (const GemmChoice& c : kCompiled) {
    if (cost(c) < cost(best)) best = c;
  }
  // Shorter raster groups if a shard has more than one, as in ChooseGemm.
  if (best.cluster_m == 2 && rows > kGemmTileM * best.cluster_m * best.group_m) best.group_m = 4;
  return best;
}

// The most of some tile rows, up to `most`, that cut them into raster groups of one size.
inline int64_t EvenGroup(int64_t tiles_m, int64_t most) {
  return CeilDiv(tiles_m, CeilDiv(tiles_m, Max<int64_t>(1, most)));
}

// Tile rows that share a raster group over w while an all-gather goes on. Many save reading w
// again, but a raster group needs all of its rows at once: its first wave of tiles reads from each.
// With q the time that a row takes to arrive over that of its product, and R rows per rank, a
// raster group of g rows that begins when p have been computed, R of them own ones, is on time if
// (p - R + g) q <= p. That is hardest for the first raster group, p = R, or, with slow links, for
// the last, p = world R - g.
//
// A raster group has at least as many of a rank's rows as fit into half a wave, cut evenly. If it
// had fewer, tiles of the next raster group would run beside it. They would wait in their first
// k-block until all of k has arrived for the rows of the first raster group
// (docs/experiments/0027).
inline GemmChoice GatherGroups(GemmChoice c, int world, int64_t rows_per_rank, int64_t n,
                               const Machine& machine) {
  if (c.group_m == 0) return c;
  // Columns for which q = 1.
  const double columns = kReferenceColumns * machine.sm_count / kReferenceSms / machine.LinkShare();
  const double q = columns / static_cast<double>(n), r = static_cast<double>(rows_per_rank);
  const double rows = Min(r / q, world * r - (world - 1) * r * q);
  const int32_t tile_rows = kGemmTileM * c.cluster_m;
  const int64_t half_a_wave = machine.sm_count / c.cluster_m / CeilDiv<int64_t>(n, c.tile_n) / 2;
  const int64_t own = Max<int64_t>(1, rows_per_rank / tile_rows);
  const auto least = static_cast<double>(EvenGroup(own, half_a_wave));
  const double tiles = Max(rows / tile_rows, least);
  c.group_m = static_cast<int32_t>(Min(tiles, static_cast<double>(c.group_m)));
  return c;
}

// Microseconds that a product of few rows takes, estimated as the time to read w. Memory limits a
// whole wave; a last wave of few tiles may be limited by its SMs. The rates were read on an H200.
inline double EstimateFew(const GemmChoice& c, int64_t m, int64_t n, int64_t k_bytes,
                          const Machine& machine) {
  // Bytes per microsecond of memory and of one SM; x's count half, since they are in L2. What
  // sharing k takes, among two or four.
  constexpr double kMemory = 3.7e6, kSm = 5.4e4, kOfX = 0.5, kTwo = 2, kFour = 3;
  const int at_once = AtOnce(c, machine.sm_count);
  const auto ctas = static_cast<int>(CeilDiv<int64_t>(n, c.tile_n) * c.splits);
  const double column_bytes = static_cast<double>(k_bytes) / c.splits;
  const double w = column_bytes * c.tile_n, x = column_bytes * static_cast<double>(m);
  const auto wave = [&](int count) { return Max(count * w / kMemory, (w + kOfX * x) / kSm); };
  const int rest = ctas % at_once;
  return ctas / at_once * wave(at_once) + (rest > 0 ? wave(rest) : 0) +
         (c.splits == 4   ? kFour
          : c.splits == 2 ? kTwo
                          : 0);
}

// With few rows, enough SMs should read w all the time. If there are fewer tiles, CTAs may share k.
inline GemmChoice ChooseSplits(GemmChoice best, int64_t m, int64_t n, int64_t k_bytes,
                               const Machine& machine, int32_t most) {
  for (int32_t splits = 2; splits <= most; splits *= 2) {
    const GemmChoice c = FitSplits({kSharedKTile, 1, 1, splits}, m, k_bytes, most);
    if (CeilDiv<int64_t>(n, c.tile_n) * c.splits > AtOnce(c, machine.sm_count) && c.splits > 2) {
      break;
    }
    if (EstimateFew(c, m, n, k_bytes, machine) < EstimateFew(best, m, n, k_bytes, machine))
      best = c;
  }
  return best;
}
inline GemmChoice ChooseFew(int64_t m, int64_t n, int64_t k_bytes, const Machine& machine,
                            int32_t most) {
  GemmChoice best{128, 1, 1};
  for (const GemmChoice& tile : kCompiled) {
    const GemmChoice c{tile.tile_n, 1, 1};
    if (tile.cluster_m > 1) continue;
    if (EstimateFew(c, m, n, k_bytes, machine) < EstimateFew(best, m, n, k_bytes, machine))
      best = c;
  }
  return ChooseSplits(best, m, n, k_bytes, machine, most);
}

// A configuration for a gate of n columns in all. Half of a tile's columns belong to one weight and
// half to the other, in boxes of 128 bytes.
inline GemmChoice ForGate(GemmChoice c, int64_t m, int64_t n, int64_t k_bytes,
                          const Machine& machine, const TileCosts& costs = kGatherCosts) {
  if (c.tile_n % 128 != 0) {
    const GemmChoice wide{256, 2, c.group_m}, narrow{128, c.cluster_m, c.group_m};
    const bool is_wide =
        c.cluster_m == 2 && EstimateCost(wide, m, n, k_bytes, machine, costs) <
                                EstimateCost(narrow, m, n, k_bytes, machine, costs);
    c = is_wide ? wide : narrow;
  }
  c.splits = 1;
  return c;
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CHOICE_H_
