// Which of the compiled kernels a grouped product takes: pure functions of the call and the GPU.
// How the rows are distributed is known on the device only, so the choice is for equal groups whose
// last tile is half full.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_

#include <cstdint>

#include "gpu/gemm_config.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

// Both kernels'. A gate takes half of a tile's columns for each weight, in boxes of 64.
inline constexpr GemmChoice kGroupedCompiled[] = {
    {256, 2, 8}, {256, 1, 16}, {192, 1, 16}, {128, 1, 16}};

// The one with the least cost(choice) among those that take such a call.
template <typename Cost>
GemmChoice CheapestGrouped(bool gated, Cost&& cost) {
  GemmChoice best = kGroupedCompiled[0];
  for (const GemmChoice& c : kGroupedCompiled) {
    if (gated && c.tile_n % 128 != 0) continue;
    if (cost(c) < cost(best)) best = c;
  }
  return best;
}

inline GemmChoice ChooseGrouped(const GroupedMatmulParams& p, const Machine& machine) {
  return CheapestGrouped(p.gated, [&](const GemmChoice& c) {
    const int64_t rows = kGemmTileM * c.cluster_m;
    return EstimateCost(c, p.m + p.groups * rows / 2, p.n * p.Weights(), p.k, machine);
  });
}

inline GemmChoice ChooseGroupedDw(const GroupedMatmulDwParams& p, const Machine& machine) {
  return CheapestGrouped(/*gated=*/false, [&](const GemmChoice& c) {
    const int64_t rows = RoundUp<int64_t>(p.k, kGemmTileM * c.cluster_m);
    return EstimateCost(c, p.groups * rows, p.n, CeilDiv(p.m, p.groups), machine);
  });
}

// Rows of a box of A: with few rows of each group, boxes that hold none of them are not loaded.
inline int32_t GroupedBoxRows(const GroupedMatmulParams& p) {
  const int64_t most = p.m <= 64 * p.groups ? 64 : kGemmTileM;
  return static_cast<int32_t>(Min<int64_t>(p.m, most));
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_CONFIG_H_
