// A call of matmul_all_reduce, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_MATMUL_ALL_REDUCE_CALL_H_
#define JFLUX_TESTS_CC_MATMUL_ALL_REDUCE_CALL_H_

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ranks.h"

namespace jflux {

// Partial products are rounded to y's type, and so is their sum with the residual, once. |x| <=
// bound; from 3 on the rounding shows. With a residual and 8 ranks, k <= 15 keeps sums exact in
// bf16 below.
class MatmulAllReduceCall : public Call {
 public:
  // multiply(x, w): a rank's product.
  MatmulAllReduceCall(const MatmulAllReduceParams& p, const ScatterTiling& tiling, uint32_t seed,
                      bool residual = false, int bound = 2,
                      const std::function<Values(const Values&, const Values&)>& multiply = {})
      : p_(p), tiling_(tiling), sum_(p.scatter.rows.Total() * p.scatter.n) {
    const auto& s = p.scatter;
    if (residual) {
      const Values added = RandomIntegers(static_cast<int64_t>(sum_.size()), 8 * bound - 1, seed);
      residual_.emplace(s.out_dtype, added);
      sum_ = residual_->AsValues();
    }
    for (int rank = 0; rank < s.rows.world; ++rank) {
      const Values x = RandomIntegers(s.rows.Total() * s.k, bound, seed * 100 + rank);
      const Values w = RandomIntegers(s.k * s.n, bound / 2, seed * 100 + 50 + rank);
      const Array part(s.out_dtype, multiply
                                        ? multiply(x, w)
                                        : Product(x, w, s.rows.Total(), s.k, s.n, s.transpose_rhs));
      const Values sent = part.AsValues();
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += sent[i];
      x_.emplace_back(s.dtype, x);
      w_.emplace_back(s.DTypeOfW(), w);
      y_.emplace_back(s.out_dtype, s.rows.Total() * s.n);
    }
    sum_ = Array(s.out_dtype, sum_).AsValues();
  }

  WorkspaceLayout Workspace() const override {
    return MatmulAllReduceLayout::Make(p_, tiling_.tile_m, tiling_.tile_n, 1).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kMatmulAllReduceId);
    return MatmulAllReduceCpu(p_, tiling_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (const Array& y : y_) wrong += y.Wrong(sum_);
    return wrong;
  }
  int64_t WrongOn(int rank) const { return y_[rank].Wrong(sum_); }

 protected:
  MatmulAllReduceArrays ArraysOf(int rank) {
    return {x_[rank].bytes.data(), w_[rank].bytes.data(), y_[rank].bytes.data(),
            residual_ ? residual_->bytes.data() : nullptr};
  }

  const MatmulAllReduceParams p_;
  std::vector<Array> y_;

 private:
  ScatterTiling tiling_;
  Values sum_;
  std::optional<Array> residual_;
  std::vector<Array> x_, w_;
};

// The same with the protocol for few rows.
class FewRowsCall : public MatmulAllReduceCall {
 public:
  FewRowsCall(const MatmulAllReduceParams& p, int32_t slice_n, uint32_t seed, bool residual = false,
              int bound = 2)
      : MatmulAllReduceCall(p, {}, seed, residual, bound), slice_n_(slice_n) {}

  bool SameBits() const { return y_[0].bytes == y_[1].bytes; }

  WorkspaceLayout Workspace() const override { return FewRowsLayoutOf(p_, slice_n_).Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kMatmulAllReduceId);
    return FewRowsCpu(p_, slice_n_, ArraysOf(view.rank), view, epoch, ctx);
  }

 private:
  int32_t slice_n_;
};

inline const bool kRandomMatmulAllReduce =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      const Rows rows{p.rows.world, 1, p.rows.inner};
      return std::make_unique<MatmulAllReduceCall>(
          MatmulAllReduceParams{{rows, p.k, p.n, p.in, p.out, p.Flip()}},
          ScatterTiling{p.tile_m, p.tile_n}, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MATMUL_ALL_REDUCE_CALL_H_
