// A call of one of the exchanges, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_EXCHANGE_CALL_H_
#define JFLUX_TESTS_CC_EXCHANGE_CALL_H_

#include <random>
#include <vector>

#include "ops/exchange/exchange.h"
#include "ranks.h"

namespace jflux {

// Shards [outer][world][inner bytes] in x, in y, or in both. Without a sum, the elements are bytes.
class ExchangeCall : public AnyCall {
 public:
  ExchangeCall(const ExchangeParams& p, uint32_t seed) : p_(p) {
    std::mt19937 random(seed);
    for (int rank = 0; rank < p.world; ++rank) {
      const int64_t bytes = p.x.world * p.x.Bytes();
      if (p.Sums()) {
        values_.push_back(RandomIntegers(bytes / SizeOf(p.dtype), 15, seed * 100 + rank));
        x_.push_back(Array(p.dtype, values_.back()).bytes);
      } else {
        x_.emplace_back(bytes);
        for (char& c : x_.back()) c = static_cast<char>(random());
      }
      y_.emplace_back(p.y.world * p.y.Bytes(), kPoison);
    }
  }

  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(p_.op);
    return ExchangeCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.world; ++rank) wrong += p_.Sums() ? WrongSums(rank) : Moved(rank);
    return wrong;
  }

 protected:
  ExchangeArrays ArraysOf(int rank) { return {x_[rank].data(), y_[rank].data()}; }

  const ExchangeParams p_;

 private:
  // Byte b of a shard, by the definition of Shards.
  static int64_t At(const Shards& shards, int shard, int64_t b) {
    return (b / shards.inner * shards.world + shard) * shards.inner + b % shards.inner;
  }
  int64_t Moved(int rank) const {
    int64_t wrong = 0;
    for (int src = 0; src < p_.world; ++src) {
      for (int64_t b = 0; b < p_.x.Bytes(); ++b) {
        const int shard = p_.op == kAllGatherId ? 0 : rank;
        wrong += y_[rank][At(p_.y, src, b)] != x_[src][At(p_.x, shard, b)];
      }
    }
    return wrong;
  }
  int64_t WrongSums(int rank) const {
    const int64_t size = SizeOf(p_.dtype);
    Values want(p_.y.Bytes() / size);
    for (size_t i = 0; i < want.size(); ++i) {
      const int64_t at = At(p_.x, rank, static_cast<int64_t>(i) * size) / size;
      for (const Values& v : values_) want[i] += v[at];
    }
    Array got(p_.dtype, 0);
    got.bytes = y_[rank];
    return got.Wrong(want);
  }

  std::vector<Values> values_;
  std::vector<std::vector<char>> x_, y_;
};

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_EXCHANGE_CALL_H_
