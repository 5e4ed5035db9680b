// Which GEMM configuration a matmul_all_reduce takes where nothing was measured: a pure function.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_

#include "gpu/gemm_config.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"

namespace jflux {

// Whether the protocol is that of few_rows.h: all rows are one tile, of two ranks.
inline bool AreFewRows(int world, int64_t rows) { return world == 2 && rows <= kGemmTileM; }
inline bool AreFewRows(const MatmulAllReduceParams& p) {
  return AreFewRows(p.scatter.rows.world, p.scatter.rows.Total());
}

// Measured as kScatterCosts.
inline constexpr TileCosts kReduceCosts{1.04, kScatterCosts.narrow, kExposed};

// Up to 2048 rows are one raster group over w: then tiles are finished, and sent to the peers, from
// the beginning on. More are shorter raster groups: faster at 4096 (docs/design/0010).
inline GemmChoice ChooseAllReduce(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  int sm_count) {
  const int64_t m = world * rows_per_rank;
  if (AreFewRows(world, m)) {
    return ChooseSplits(GemmChoice{kSharedKTile, 1, 1}, m, n, k, sm_count, kReduceSplits);
  }
  GemmChoice c = ChooseGemm(world, rows_per_rank, n, k, sm_count, kReduceCosts);
  if (m <= 2048) c.group_m = 0;
  return c;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
