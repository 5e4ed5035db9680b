// Which GEMM configuration a matmul_all_to_all takes where nothing was measured: a pure function.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_

#include "gpu/gemm_config.h"

namespace jflux {

// For world shards of so many rows and columns. Each shard has whole tiles of its own, so what the
// last ones are cut short by is computed too, and a configuration that wastes less of it wins.
inline GemmChoice ChooseAllToAll(int world, int64_t rows, int64_t n, int64_t k, int sm_count) {
  const auto cost = [&](const GemmChoice& c) {
    const int64_t m = world * RoundUp<int64_t>(rows, kGemmTileM * c.cluster_m);
    return EstimateCost(c, m, n, k, sm_count, kScatterCosts);
  };
  GemmChoice best{192, 1, 16};
  for (const GemmChoice& c : kCompiled) {
    if (cost(c) < cost(best)) best = c;
  }
  // Shorter raster groups, as ChooseGemm has them, where one shard is several.
  if (best.cluster_m == 2 && rows > kGemmTileM * best.cluster_m * best.group_m) best.group_m = 4;
  return best;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_
