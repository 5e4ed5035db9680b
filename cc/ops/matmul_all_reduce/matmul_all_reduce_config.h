// Which GEMM configuration a matmul_all_reduce takes where nothing was measured: a pure function.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_

#include "gpu/gemm_config.h"

namespace jflux {

// Whether the kernel is that of few_rows_sm90.cuh: all rows are one tile, of two ranks.
inline bool AreFewRows(int world, int64_t rows) { return world == 2 && rows <= kGemmTileM; }

// Columns of a tile of few rows, and the CTAs that may share its k.
inline constexpr int32_t kFewRowsTile = 128, kFewRowsSplits = 2;

// The choice that has a kernel, in which every CTA has some of k.
inline GemmChoice FewRowsChoice(bool splits, int64_t k) {
  const bool all_have_some = k > (kFewRowsSplits - 1) * kGemmTileK;
  return GemmChoice{kFewRowsTile, 1, 1, splits && all_have_some ? kFewRowsSplits : 1};
}

inline GemmChoice ChooseFewRows(int64_t m, int64_t n, int64_t k, int sm_count) {
  // A block's sum over a cluster takes .7 us, and there are one or two.
  const auto cost = [&](const GemmChoice& c) {
    return EstimateFew(c, m, n, k, sm_count, /*first_sum=*/2);
  };
  const GemmChoice whole = FewRowsChoice(false, k), split = FewRowsChoice(true, k);
  return cost(split) < cost(whole) ? split : whole;
}

// Up to 4096 rows are one sweep over w, where a reduce-scatter is as fast as with shorter ones
// (docs/design/0003): then tiles are finished, and sent to the peers, from the beginning on.
inline GemmChoice ChooseAllReduce(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  int sm_count) {
  const int64_t m = world * rows_per_rank;
  if (AreFewRows(world, m)) return ChooseFewRows(m, n, k, sm_count);
  // While a wide tile waits for the peers' parts nothing is multiplied.
  GemmChoice c = ChooseGemm(world, rows_per_rank, n, sm_count, /*shared=*/1.03);
  if (m <= 4096) c.group_m = 0;
  return c;
}

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
