// A call of all_reduce, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
#define JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/quantize.h"
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

// With a quantised wire: the bits of its definition (wire_body.h), in plain loops. `nan_at`: the
// element of rank 0's x that is NaN, if there is one.
class WireCall : public AnyCall {
 public:
  WireCall(const AllReduceParams& p, uint32_t seed, int64_t nan_at = -1) : p_(p) {
    const WireLayout layout = p.WireChunks();
    const Array residual = Drawn(p.residual ? p.count : 0, seed * 100 + 90);
    residual_.push_back(residual);
    for (int rank = 0; rank < p.world; ++rank) {
      x_.push_back(Drawn(p.count, seed * 100 + rank, rank == 0 ? nan_at : -1));
      y_.emplace_back(p.dtype, p.count);
    }
    std::vector<Values> x;
    for (const Array& a : x_) x.push_back(a.AsValues());
    const Values added = residual.AsValues();
    want_.resize(p.count);
    for (int64_t first = 0; first < p.count; first += kWireBlock) {
      const int64_t end = std::min(p.count, first + kWireBlock);
      const auto owner = static_cast<int>(first / layout.shard);
      std::vector<float> sums(end - first);
      for (int src = 0; src < p.world; ++src) {
        std::vector<float> part(x[src].begin() + first, x[src].begin() + end);
        if (src != owner) part = Rounded(part);
        for (size_t i = 0; i < sums.size(); ++i) sums[i] = src == 0 ? part[i] : sums[i] + part[i];
      }
      sums = Rounded(sums);
      for (int64_t i = first; i < end; ++i)
        want_[i] = p.residual ? sums[i - first] + static_cast<float>(added[i]) : sums[i - first];
    }
  }

  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllReduceId);
    return AllReduceCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    Array want(p_.dtype, want_);
    const Values rounded = want.AsValues();
    int64_t wrong = 0;
    for (const Array& y : y_) {
      const Values got = y.AsValues();
      for (int64_t i = 0; i < p_.count; ++i)
        wrong += std::isnan(rounded[i]) ? !std::isnan(got[i]) : got[i] != rounded[i];
    }
    return wrong;
  }

 protected:
  AllReduceArrays ArraysOf(int rank) {
    AllReduceArrays arrays{x_[rank].bytes.data(), y_[rank].bytes.data()};
    if (p_.residual) arrays.residual = residual_[0].bytes.data();
    return arrays;
  }
  const AllReduceParams p_;

 private:
  // Of many sizes, and some blocks of zeros.
  Array Drawn(int64_t count, uint32_t seed, int64_t nan_at = -1) const {
    Values values = RandomIntegers(count, 1000, seed);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = i / kWireBlock;
      values[i] *= block % 5 == 3 ? 0 : std::ldexp(1.0, static_cast<int>(block * 7 % 9) - 10);
    }
    if (nan_at >= 0) values[nan_at] = NAN;
    return Array(p_.dtype, values);
  }
  std::vector<float> Rounded(std::vector<float> block) const {
    uint32_t magnitude = 0;
    for (float x : block) magnitude = std::max(magnitude, BitsOfFloat(x) & 0x7fffffff);
    const float scale = ScaleOfBlock(magnitude, p_.wire, false);
    for (float& x : block) x = FloatOfValue(QuantizedValue(x, scale, p_.wire), p_.wire) * scale;
    return block;
  }
  Values want_;
  std::vector<Array> residual_, x_, y_;
};

// With a norm: the sums are exact, the normalised rows are close to the definition, also where they
// are quantised, as `quantized` says without its scale.
class NormCall : public AllReduceCall {
 public:
  NormCall(const AllReduceParams& p, bool wide_scale, bool bias, uint32_t seed,
           const QuantizedRows* quantized = nullptr)
      : AllReduceCall(p, seed), wide_scale_(wide_scale), bias_(bias) {
    if (quantized != nullptr) quantized_ = *quantized;
    const DType factors = wide_scale ? DType::kF32 : p.dtype;
    for (uint32_t i : {0, 1}) {
      values_[i] = RandomIntegers(p.width, 3, seed * 100 + 70 + i);
      factors_.emplace_back(factors, values_[i]);
    }
    for (int rank = 0; rank < p.world; ++rank) {
      normalised_.emplace_back(quantized == nullptr ? p.dtype : quantized_.values, p.count);
      scales_.emplace_back(quantized == nullptr ? 0 : p.RowCount() * quantized_.Blocks(p.width),
                           NAN);
    }
  }
  int64_t Wrong() const override {
    int64_t wrong = AllReduceCall::Wrong();
    const double relative = p_.dtype == DType::kBF16  ? 1. / 128
                            : p_.dtype == DType::kF16 ? 1. / 1024
                                                      : 1e-5;
    for (int rank = 0; rank < p_.world; ++rank) {
      Values got = normalised_[rank].AsValues(), wants(p_.width), errors(p_.width);
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
          wants[i] = want;
          errors[i] = relative * (std::abs(scaled) + std::abs(want)) + 1e-5;
        }
        if (!scales_[rank].empty()) wrong += Dequantize(rank, row, wants, &got, &errors);
        for (int64_t i = 0; i < p_.width; ++i) {
          wrong += !(std::abs(got[row + i] - wants[i]) <= errors[i]);
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
    arrays.quantized = quantized_;
    if (!scales_[rank].empty()) arrays.quantized.scale = scales_[rank].data();
    return arrays;
  }

 private:
  // Multiplies the values of a row by their scales, adds what rounding may have cost to the errors,
  // and returns how many scales are wrong. `row`: its first element.
  int64_t Dequantize(int rank, int64_t row, const Values& wants, Values* got,
                     Values* errors) const {
    const DType values = quantized_.values;
    const double largest = values == DType::kF8E4M3FN ? 448
                           : values == DType::kF8E5M2 ? 57344
                                                      : 127;
    // Half of a step: of a value, and of the smallest ones.
    const double step = values == DType::kF8E4M3FN ? 1. / 16
                        : values == DType::kF8E5M2 ? 1. / 8
                                                   : 0;
    const double least = values == DType::kF8E4M3FN ? 1. / 1024
                         : values == DType::kF8E5M2 ? 1. / 131072
                                                    : 0.5;
    const int64_t block = quantized_.block == -1 ? p_.width : quantized_.block;
    int64_t wrong = 0;
    for (int64_t first = 0; first < p_.width; first += block) {
      const float scale =
          scales_[rank][row / p_.width * quantized_.Blocks(p_.width) + first / block];
      double most = 0, error = 0;
      for (int64_t i = first; i < std::min(first + block, p_.width); ++i) {
        most = std::max(most, std::abs(wants[i])), error = std::max(error, (*errors)[i]);
        (*got)[row + i] *= scale;
        (*errors)[i] += step * std::abs((*got)[row + i]) + least * scale;
      }
      int exponent;
      const bool is_power = std::frexp(scale, &exponent) == 0.5;
      const double times = quantized_.power_of_two ? 2 : 1;
      wrong += !(scale * largest >= most - error && scale * largest <= times * (most + error)) ||
               (quantized_.power_of_two && !is_power);
    }
    return wrong;
  }

  bool wide_scale_, bias_;
  QuantizedRows quantized_;
  std::vector<std::vector<float>> scales_;
  Values values_[2];
  std::vector<Array> factors_, normalised_;
};

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
