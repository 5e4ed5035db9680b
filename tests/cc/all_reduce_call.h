// A call of all_reduce, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
#define JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_

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

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_REDUCE_CALL_H_
