// A call of matmul_reduce_scatter, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_MATMUL_REDUCE_SCATTER_CALL_H_
#define JFLUX_TESTS_CC_MATMUL_REDUCE_SCATTER_CALL_H_

#include <functional>
#include <memory>
#include <vector>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "ranks.h"

namespace jflux {

class MatmulReduceScatterCall : public Call {
 public:
  // multiply(x, w): a rank's product.
  MatmulReduceScatterCall(const MatmulReduceScatterParams& p, const ScatterTiling& tiling,
                          uint32_t seed,
                          const std::function<Values(const Values&, const Values&)>& multiply = {})
      : p_(p), sum_(p.rows.Total() * p.n), tiling_(tiling) {
    for (int rank = 0; rank < p.rows.world; ++rank) {
      const Values x = RandomIntegers(p.rows.Total() * p.k, 2, seed * 100 + rank);
      const Values w = RandomIntegers(p.k * p.n, 1, seed * 100 + 50 + rank);
      const Values part =
          multiply ? multiply(x, w) : Product(x, w, p.rows.Total(), p.k, p.n, p.transpose_rhs);
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += part[i];
      x_.emplace_back(p.dtype, x);
      w_.emplace_back(p.DTypeOfW(), w);
      y_.emplace_back(p.out_dtype, p.rows.PerRank() * p.n);
    }
  }

  WorkspaceLayout Workspace() const override {
    return ReduceScatterLayout::Make(p_, tiling_.tile_m, tiling_.tile_n, 1).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    const int r = view.rank;
    ctx.op = static_cast<uint32_t>(kMatmulReduceScatterId);
    const MatmulReduceScatterArrays arrays{x_[r].bytes.data(), w_[r].bytes.data(),
                                           y_[r].bytes.data()};
    return MatmulReduceScatterCpu(p_, tiling_, arrays, view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.rows.world; ++rank) {
      wrong += y_[rank].Wrong(ShardOf(sum_, rank));
    }
    return wrong;
  }

 protected:
  // The rows of a rank, of an array of all rows.
  Values ShardOf(const Values& all, int rank) const {
    const Rows& r = p_.rows;
    Values shard;
    for (int64_t o = 0; o < r.outer; ++o) {
      const auto first = all.begin() + (o * r.world + rank) * r.inner * p_.n;
      shard.insert(shard.end(), first, first + r.inner * p_.n);
    }
    return shard;
  }

  const MatmulReduceScatterParams p_;
  Values sum_;  // of all rows
  std::vector<Array> x_, w_, y_;

 private:
  ScatterTiling tiling_;
};

inline const bool kRandomMatmulReduceScatter =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      return std::make_unique<MatmulReduceScatterCall>(
          MatmulReduceScatterParams{p.rows, p.k, p.n, p.in, p.out, p.Flip()},
          ScatterTiling{p.tile_m, p.tile_n}, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MATMUL_REDUCE_SCATTER_CALL_H_
