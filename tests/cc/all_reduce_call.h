// A call of all_reduce, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
#define JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_

#include <cmath>
#include <vector>

#include "ops/all_reduce/all_reduce.h"
#include "ranks.h"

namespace jflux {

class AllReduceCall : public AnyCall {
 public:
  AllReduceCall(const AllReduceParams& p, uint32_t seed)
      : p_(p), residual_(p.dtype, RandomIntegers(p.residual ? p.count : 0, 15, seed * 100 + 90)) {
    sum_ = p.residual ? RandomIntegers(p.count, 15, seed * 100 + 90) : Values(p.count);
    for (int rank = 0; rank < p.world; ++rank) {
      const Values x = RandomIntegers(p.count, 15, seed * 100 + rank);
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += x[i];
      x_.emplace_back(p.dtype, x);
      y_.emplace_back(p.dtype, p.count);
    }
  }

  PacketLayout Workspace() const { return p_.Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllReduceId);
    return AllReduceCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (const Array& y : y_) wrong += y.Wrong(sum_);
    return wrong;
  }
  int64_t WrongOn(int rank) const { return y_[rank].Wrong(sum_); }

 protected:
  virtual AllReduceArrays ArraysOf(int rank) {
    AllReduceArrays arrays{x_[rank].bytes.data(), y_[rank].bytes.data()};
    if (p_.residual) arrays.residual = residual_.bytes.data();
    return arrays;
  }

  const AllReduceParams p_;
  Values sum_;

 private:
  Array residual_;
  std::vector<Array> x_, y_;
};

// With a norm: the sums are exact, the normalised rows are close to the definition.
class NormCall : public AllReduceCall {
 public:
  NormCall(const AllReduceParams& p, bool wide_scale, bool bias, uint32_t seed)
      : AllReduceCall(p, seed), wide_scale_(wide_scale), bias_(bias) {
    const DType factors = wide_scale ? DType::kF32 : p.dtype;
    for (uint32_t i : {0, 1}) {
      values_[i] = RandomIntegers(p.width, 3, seed * 100 + 70 + i);
      factors_.emplace_back(factors, values_[i]);
    }
    for (int rank = 0; rank < p.world; ++rank) normalised_.emplace_back(p.dtype, p.count);
  }
  int64_t Wrong() const override {
    int64_t wrong = AllReduceCall::Wrong();
    const double relative = p_.dtype == DType::kBF16  ? 1. / 128
                            : p_.dtype == DType::kF16 ? 1. / 1024
                                                      : 1e-5;
    for (const Array& array : normalised_) {
      Values got(p_.count);
      Convert(array.bytes.data(), p_.dtype, got.data(), DType::kF64, p_.count);
      for (int64_t row = 0; row < p_.count; row += p_.width) {
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < p_.width; ++i) mean += sum_[row + i] / p_.width;
        if (p_.norm == Norm::kRms) mean = 0;
        for (int64_t i = 0; i < p_.width; ++i) {
          squares += (sum_[row + i] - mean) * (sum_[row + i] - mean) / p_.width;
        }
        const double factor = 1 / std::sqrt(squares + p_.epsilon);
        for (int64_t i = 0; i < p_.width; ++i) {
          const double scaled = (sum_[row + i] - mean) * factor * values_[0][i];
          const double want = scaled + (bias_ ? values_[1][i] : 0);
          wrong += !(std::abs(got[row + i] - want) <=
                     relative * (std::abs(scaled) + std::abs(want)) + 1e-5);
        }
      }
    }
    return wrong;
  }

 protected:
  AllReduceArrays ArraysOf(int rank) override {
    AllReduceArrays arrays = AllReduceCall::ArraysOf(rank);
    arrays.normalised = normalised_[rank].bytes.data();
    arrays.scale = factors_[0].bytes.data();
    if (bias_) arrays.bias = factors_[1].bytes.data();
    arrays.wide_scale = wide_scale_;
    return arrays;
  }

 private:
  bool wide_scale_, bias_;
  Values values_[2];
  std::vector<Array> factors_, normalised_;
};

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
