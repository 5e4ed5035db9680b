// Which of the compiled GEMM configurations to use: data, and a pure function that chooses.
#ifndef JFLUX_GPU_GEMM_CONFIG_H_
#define JFLUX_GPU_GEMM_CONFIG_H_

#include <cstdint>

#include "core/platform.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace jflux {

struct GemmChoice {
  int32_t tile_n;     // 256 or 128 columns per CTA tile; always 128 rows
  int32_t cluster_m;  // 2 or 1 CTAs one below the other
  int32_t group_m;    // cluster tile rows that share a sweep over n

  bool operator==(const GemmChoice& o) const {
    return tile_n == o.tile_n && cluster_m == o.cluster_m && group_m == o.group_m;
  }
};

inline constexpr int32_t kGemmTileM = 128;

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

// The configuration decides how data travels, so ranks must agree on it too. `site` tells equal
// calls of a program apart, which ranks could otherwise make in different orders.
inline uint32_t SignatureOf(uint32_t call, int64_t site, const GemmChoice& c) {
  return SignatureBuilder().Add(call).Add(site).Add(c.tile_n).Add(c.cluster_m).Get();
}

// Tile rows that share a sweep over w while an all-gather goes on. Many save reading w again, but a
// sweep needs all of its rows at once: its first wave of tiles reads from each. The rows that
// follow a rank's own have the time of the own rows' product to arrive in. A rank's rows take 2 k
// rows / rate bytes to arrive and 2 k n rows / speed to multiply, hence the ratio below.
inline GemmChoice GatherGroups(GemmChoice c, int64_t rows_per_rank, int64_t n) {
  // Columns for which a row arrives in the time of its product: 650 TFLOP/s over 300 GB/s, as both
  // were read on 4 x H200 while the other went on.
  constexpr int64_t kColumnsOfArrival = 2200;
  const int64_t rows = rows_per_rank * n / kColumnsOfArrival;
  const int64_t tiles = rows / (kGemmTileM * c.cluster_m);
  c.group_m = static_cast<int32_t>(Max<int64_t>(1, Min<int64_t>(tiles, c.group_m)));
  return c;
}

inline TileGrid GridOf(const GemmChoice& c, int64_t m, int64_t n) {
  return TileGrid{static_cast<int32_t>(CeilDiv<int64_t>(m, kGemmTileM * c.cluster_m)),
                  static_cast<int32_t>(CeilDiv<int64_t>(n, c.tile_n)), c.group_m};
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_CONFIG_H_
