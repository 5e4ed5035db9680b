// A call of matmul_all_to_all, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_MATMUL_ALL_TO_ALL_CALL_H_
#define JFLUX_TESTS_CC_MATMUL_ALL_TO_ALL_CALL_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ranks.h"

namespace jflux {

class MatmulAllToAllCall : public Call {
 public:
  // multiply(x, w): a rank's product.
  MatmulAllToAllCall(const MatmulAllToAllParams& p, const ShardTiling& tiling, uint32_t seed,
                     const std::function<Values(const Values&, const Values&)>& multiply = {})
      : p_(p), tiling_(tiling) {
    const int64_t rows = p.rows.PerRank() * (p.split_rows ? p.rows.world : 1);
    const int64_t columns = p.n * (p.split_rows ? 1 : p.rows.world);
    for (int rank = 0; rank < p.rows.world; ++rank) {
      const Values x = RandomIntegers(rows * p.k, 2, seed * 100 + rank);
      const Values w = RandomIntegers(p.k * columns, 1, seed * 100 + 50 + rank);
      products_.push_back(multiply ? multiply(x, w)
                                   : Product(x, w, rows, p.k, columns, p.transpose_rhs));
      x_.emplace_back(p.dtype, x);
      w_.emplace_back(p.DTypeOfW(), w);
      y_.emplace_back(p.out_dtype, p.rows.Total() * p.n);
    }
  }

  WorkspaceLayout Workspace() const override {
    return AllToAllLayout::Make(p_, tiling_.tile_m, tiling_.tile_n).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kMatmulAllToAllId);
    return MatmulAllToAllCpu(p_, tiling_, ArraysOf(view.rank), view, epoch, ctx);
  }
  // Both sides as [outer][rank if rows][inner][rank if columns][n].
  int64_t Wrong() const override {
    const Rows& r = p_.rows;
    const auto at = [&](bool by_rows, int64_t o, int64_t i, int64_t shard) {
      return by_rows ? ((o * r.world + shard) * r.inner + i) * p_.n
                     : ((o * r.inner + i) * r.world + shard) * p_.n;
    };
    int64_t wrong = 0;
    for (int dst = 0; dst < r.world; ++dst) {
      Values want(r.Total() * p_.n);
      for (int src = 0; src < r.world; ++src) {
        for (int64_t o = 0; o < r.outer; ++o) {
          for (int64_t i = 0; i < r.inner; ++i) {
            const auto from = products_[src].begin() + at(p_.split_rows, o, i, dst);
            std::copy(from, from + p_.n, want.begin() + at(p_.concat_rows, o, i, src));
          }
        }
      }
      wrong += y_[dst].Wrong(want);
    }
    return wrong;
  }

 protected:
  MatmulAllToAllArrays ArraysOf(int rank) {
    return {x_[rank].bytes.data(), w_[rank].bytes.data(), y_[rank].bytes.data()};
  }

  const MatmulAllToAllParams p_;

 private:
  ShardTiling tiling_;
  std::vector<Values> products_;
  std::vector<Array> x_, w_, y_;
};

inline const bool kRandomMatmulAllToAll =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      return std::make_unique<MatmulAllToAllCall>(
          MatmulAllToAllParams{p.rows, p.k, p.n, p.in, p.out, p.Flip(), p.Flip(), p.Flip()},
          ShardTiling{p.tile_m, p.tile_n}, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MATMUL_ALL_TO_ALL_CALL_H_
