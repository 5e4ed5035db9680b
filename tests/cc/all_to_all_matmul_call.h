// A call of all_to_all_matmul, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_TO_ALL_MATMUL_CALL_H_
#define JFLUX_TESTS_CC_ALL_TO_ALL_MATMUL_CALL_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ranks.h"

namespace jflux {

// Operands and results of all ranks, and the expected results by the op's definition.
class AllToAllMatmulData : public Call {
 public:
  using Multiply = std::function<Values(const Values& x, const Values& w)>;

  // multiply(all_to_all(x), w): a rank's product.
  AllToAllMatmulData(const AllToAllMatmulParams& p, uint32_t seed, Multiply multiply = {})
      : p_(p), multiply_(std::move(multiply)) {
    const Rows& r = p.rows;
    std::vector<Values> x;
    for (int rank = 0; rank < r.world; ++rank) {
      x.push_back(RandomIntegers(r.Total() * p.k, 2, seed * 100 + rank));
      w_values_.push_back(RandomIntegers(p.KOfW() * p.n, 1, seed * 100 + 50 + rank));
      x_.emplace_back(p.dtype, x.back());
      w_.emplace_back(p.DTypeOfW(), w_values_.back());
      y_.emplace_back(p.out_dtype, p.RowsOfY() * p.n);
      gathered_out_.emplace_back(p.dtype, r.Total() * p.k);
    }
    // Both sides as [outer][rank if rows][inner][rank if columns][k].
    const auto at = [&](bool by_rows, int64_t o, int64_t i, int64_t shard) {
      return by_rows ? ((o * r.world + shard) * r.inner + i) * p.k
                     : ((o * r.inner + i) * r.world + shard) * p.k;
    };
    for (int dst = 0; dst < r.world; ++dst) {
      gathered_.emplace_back(r.Total() * p.k);
      for (int src = 0; src < r.world; ++src) {
        for (int64_t o = 0; o < r.outer; ++o) {
          for (int64_t i = 0; i < r.inner; ++i) {
            const auto from = x[src].begin() + at(p.split_rows, o, i, dst);
            std::copy(from, from + p.k, gathered_[dst].begin() + at(p.concat_rows, o, i, src));
          }
        }
      }
    }
  }

  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int r = 0; r < p_.rows.world; ++r) {
      wrong += y_[r].Wrong(multiply_ ? multiply_(gathered_[r], w_values_[r])
                                     : Product(gathered_[r], w_values_[r], p_.RowsOfY(), p_.KOfW(),
                                               p_.n, p_.transpose_rhs));
      if (p_.return_gathered) wrong += gathered_out_[r].Wrong(gathered_[r]);
    }
    return wrong;
  }

 protected:
  AllToAllMatmulArrays ArraysOf(int r) {
    return {x_[r].bytes.data(), w_[r].bytes.data(), y_[r].bytes.data(),
            p_.return_gathered ? gathered_out_[r].bytes.data() : nullptr};
  }

  const AllToAllMatmulParams p_;

 private:
  const Multiply multiply_;
  std::vector<Values> w_values_, gathered_;
  std::vector<Array> x_, w_, y_, gathered_out_;
};

class AllToAllMatmulCall : public AllToAllMatmulData {
 public:
  AllToAllMatmulCall(const AllToAllMatmulParams& p, const AllToAllMatmulTiling& tiling,
                     uint32_t seed, Multiply multiply = {})
      : AllToAllMatmulData(p, seed, std::move(multiply)), tiling_(tiling) {}

  WorkspaceLayout Workspace() const override {
    return AllToAllMatmulLayout::Make(p_, tiling_.chunk_bytes).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllToAllMatmulId);
    return AllToAllMatmulCpu(p_, tiling_, ArraysOf(view.rank), view, epoch, ctx);
  }

 private:
  AllToAllMatmulTiling tiling_;
};

// way: bit 0 splits rows, bit 1 puts rows together.
inline AllToAllMatmulParams ParamsOf(const Rows& rows, int64_t k, int64_t n, DType in, DType out,
                                     int way, bool transposed, bool gathered) {
  return {rows,
          k,
          n,
          in,
          out,
          transposed,
          /*split_rows=*/(way & 1) != 0,
          /*concat_rows=*/(way & 2) != 0,
          gathered};
}

inline const bool kRandomAllToAllMatmul =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      return std::make_unique<AllToAllMatmulCall>(
          AllToAllMatmulParams{p.rows, p.k / p.rows.world + 1, p.n, p.in, p.out, p.Flip(), p.Flip(),
                               p.Flip(), p.Flip()},
          AllToAllMatmulTiling{p.pick(64, 600), p.tile_m, p.tile_n}, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_TO_ALL_MATMUL_CALL_H_
