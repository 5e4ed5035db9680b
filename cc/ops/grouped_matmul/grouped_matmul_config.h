// Which of the compiled kernels a grouped product takes: pure functions of the call and the GPU.
// Only the device knows the sizes of the groups, so the choice assumes that the last tile of each
// group is 3/5 full.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_

#include <cstdint>

#include "gpu/gemm_choice.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

// The configurations that both grouped kernels have. A gate takes half of a tile's columns for each
// weight, in boxes of 64.
inline constexpr GemmChoice kGroupedCompiled[] = {
    {256, 2, 8}, {256, 1, 16}, {192, 1, 16}, {128, 1, 16}};

// Whether kernel `c` takes such a call.
inline bool TakesGrouped(const GemmChoice& c, bool gated, TileChoice tile) {
  const bool is_wanted =
      tile.columns == 0 || (tile.columns == c.tile_n && tile.cluster_m == c.cluster_m);
  return is_wanted && (!gated || c.tile_n % 128 == 0);
}

inline bool IsGroupedTile(bool gated, TileChoice tile) {
  for (const GemmChoice& c : kGroupedCompiled) {
    if (TakesGrouped(c, gated, tile)) return true;
  }
  return false;
}

// The configuration with the least cost(choice) among those that take such a call.
template <typename Cost>
GemmChoice CheapestGrouped(bool gated, TileChoice tile, Cost&& cost) {
  const GemmChoice* best = nullptr;
  for (const GemmChoice& c : kGroupedCompiled) {
    if (!TakesGrouped(c, gated, tile)) continue;
    if (best == nullptr || cost(c) < cost(*best)) best = &c;
  }
  return *best;
}

inline bool HasFewRows(int64_t m, int64_t groups) { return m <= 64 * groups; }

// The cost of a product of `tile_rows` rows: the m rows of the groups, and what fills up their last
// tiles. With few rows in each group reading the weights takes the time, and the widest tile reads
// most at once. On one H100 this choice was 0.9 % slower than the fastest kernel on average over 48
// products of six shapes (docs/experiments/0036).
inline double EstimateGroupedCost(const GemmChoice& c, int64_t m, int64_t groups, int64_t tile_rows,
                                  int64_t n, int64_t k, const Machine& machine) {
  if (HasFewRows(m, groups)) return c.tile_n == 256 && c.cluster_m == 1 ? 0 : 1;
  return EstimateCost(c, tile_rows, n, k, machine) * (c.cluster_m == 2 ? 0.957 : 1);
}

inline GemmChoice ChooseGrouped(const GroupedMatmulParams& p, const Machine& machine) {
  return CheapestGrouped(p.gated, p.tile, [&](const GemmChoice& c) {
    const int64_t past_the_end = p.groups * kGemmTileM * c.cluster_m * 2 / 5;
    return EstimateGroupedCost(c, p.m, p.groups, p.m + past_the_end, p.n * p.Weights(), p.k,
                               machine);
  });
}

inline GemmChoice ChooseGroupedDw(const GroupedMatmulDwParams& p, const Machine& machine) {
  return CheapestGrouped(/*gated=*/false, p.tile, [&](const GemmChoice& c) {
    const int64_t rows = RoundUp<int64_t>(p.k, kGemmTileM * c.cluster_m);
    return EstimateGroupedCost(c, p.m, p.groups, p.groups * rows, p.n, CeilDiv(p.m, p.groups),
                               machine);
  });
}

// Rows of a box of A: with few rows of each group, boxes that hold none of them are not loaded.
inline int32_t GroupedBoxRows(const GroupedMatmulParams& p) {
  const int64_t most = HasFewRows(p.m, p.groups) ? 64 : kGemmTileM;
  return static_cast<int32_t>(Min<int64_t>(p.m, most));
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_
