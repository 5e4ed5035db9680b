// A call of decode_merge, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_DECODE_MERGE_CALL_H_
#define JFLUX_TESTS_CC_DECODE_MERGE_CALL_H_

#include <cmath>
#include <random>
#include <vector>

#include "core/numbers.h"
#include "ops/decode_merge/decode_merge.h"
#include "ranks.h"

namespace jflux {

// Rows of which some ranks have no keys, of which none has any, and with sums near float's limits.
class DecodeMergeCall : public AnyCall {
 public:
  DecodeMergeCall(const DecodeMergeParams& p, uint32_t seed) : p_(p) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int rank = 0; rank < p.world; ++rank) {
      std::vector<float> x(p.rows * (p.width + 1));
      for (float& v : x) v = normal(random);
      for (int64_t row = 0; row < p.rows; ++row) {
        float& log_sum = x[row * (p.width + 1) + p.width];
        log_sum = 100 * normal(random);
        const bool has_none = random() % 4 == 0 || row % 5 == 4;
        if (!has_none) continue;
        log_sum = -INFINITY;
        x[row * (p.width + 1)] = NAN;  // does not count
      }
      x_.push_back(std::move(x));
      y_.emplace_back(p.rows * p.width * SizeOf(p.dtype), char{-1});
      l_.emplace_back(p.rows, NAN);
    }
  }

  PacketLayout Workspace() const { return p_.Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kDecodeMergeId);
    return DecodeMergeCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int64_t row = 0; row < p_.rows; ++row) {
      for (int64_t column = 0; column <= p_.width; ++column) {
        const double want = Wanted(row, column);
        const double unit = column == p_.width || p_.dtype == DType::kF32 ? 2e-6
                            : p_.dtype == DType::kF16                     ? 1.0 / (1 << 10)
                                                                          : 1.0 / (1 << 7);
        for (int rank = 0; rank < p_.world; ++rank) {
          const double got = column == p_.width ? l_[rank][row] : Y(rank, row * p_.width + column);
          wrong += !(got == want || std::abs(got - want) <= unit * (1 + std::abs(want)));
        }
      }
    }
    for (int rank = 1; rank < p_.world; ++rank) {  // the same bits on all ranks
      wrong += y_[rank] != y_[0] || l_[rank] != l_[0];
    }
    return wrong;
  }

 protected:
  DecodeMergeArrays ArraysOf(int rank) {
    return {x_[rank].data(), y_[rank].data(), l_[rank].data()};
  }

  const DecodeMergeParams p_;

 private:
  double Y(int rank, int64_t i) const {
    const char* at = y_[rank].data() + i * SizeOf(p_.dtype);
    if (p_.dtype == DType::kBF16) return *reinterpret_cast<const BF16*>(at);
    if (p_.dtype == DType::kF16) return *reinterpret_cast<const F16*>(at);
    return *reinterpret_cast<const float*>(at);
  }
  double Wanted(int64_t row, int64_t column) const {
    double highest = -INFINITY, total = 0, sum = 0;
    const int64_t at = row * (p_.width + 1);
    for (const auto& x : x_) highest = std::fmax(highest, x[at + p_.width]);
    for (const auto& x : x_) {
      if (x[at + p_.width] == -INFINITY) continue;
      const double weight = std::exp(x[at + p_.width] - highest);
      total += weight;
      sum += weight * x[at + column];
    }
    if (column == p_.width) return total > 0 ? highest + std::log(total) : -INFINITY;
    return total > 0 ? sum / total : 0;
  }

  std::vector<std::vector<float>> x_, l_;
  std::vector<std::vector<char>> y_;
};

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_DECODE_MERGE_CALL_H_
