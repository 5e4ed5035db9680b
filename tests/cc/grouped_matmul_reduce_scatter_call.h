// A call of grouped_matmul_reduce_scatter with a random routing, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_GROUPED_MATMUL_REDUCE_SCATTER_CALL_H_
#define JFLUX_TESTS_CC_GROUPED_MATMUL_REDUCE_SCATTER_CALL_H_

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "all_gather_grouped_matmul_call.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "ranks.h"
#include "wires.h"

namespace jflux {

class GroupedMatmulReduceScatterCall : public Call {
 public:
  GroupedMatmulReduceScatterCall(const GroupedMatmulReduceScatterParams& p, Routed routed,
                                 uint32_t seed, bool own = false)
      : p_(p) {
    const GroupedMatmulParams& product = p.product;
    routings_ =
        RandomRoutings(p.world, product.m, product.groups, p.tokens * p.choices, routed, own, seed);
    std::vector<bool> has_row(product.m);
    for (const RoutingOfSlots& routing : routings_) {
      std::vector<int32_t> destination(product.m, -1);
      for (int32_t row = 0; row < routing.offsets.back(); ++row) {
        destination[routing.source[row]] = row;
        has_row[routing.source[row]] = true;
      }
      destinations_.push_back(destination);
    }
    const bool is_wide = product.out_dtype == DType::kF64;
    weight_values_ = RandomIntegers(product.m, 1, seed * 100);
    // A slot without a row may have any weight.
    for (int64_t slot = 0; slot < product.m; ++slot) {
      if (!has_row[slot]) weight_values_[slot] = std::numeric_limits<double>::quiet_NaN();
    }
    weights_ = std::make_unique<Array>(is_wide ? DType::kF64 : DType::kF32, weight_values_);
    for (int rank = 0; rank < p.world; ++rank) {
      h_values_.push_back(RandomIntegers(product.m * product.k, 1, seed * 100 + 1 + rank));
      w_values_.push_back(
          RandomIntegers(product.groups * product.k * product.n, 1, seed * 100 + 50 + rank));
      h_.emplace_back(product.dtype, h_values_.back());
      w_.emplace_back(product.dtype, w_values_.back());
      out_.emplace_back(product.out_dtype, p.tokens * product.n);
      y_.emplace_back(product.out_dtype, product.m * product.n);
    }
  }

  WorkspaceLayout Workspace() const override { return SumLayout::Make(p_).Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    const int rank = view.rank;
    ctx.op = static_cast<uint32_t>(kGroupedMatmulReduceScatterId);
    const RoutingOfSlots& routing = routings_[At(rank)];
    const GroupedMatmulReduceScatterArrays arrays{
        h_[rank].bytes.data(),   w_[rank].bytes.data(),          weights_->bytes.data(),
        routing.offsets.data(),  destinations_[At(rank)].data(), routing.source.data(),
        out_[rank].bytes.data(), y_[rank].bytes.data()};
    return GroupedMatmulReduceScatterCpu(p_, arrays, view, epoch, ctx);
  }
  int64_t Wrong() const override {
    const GroupedMatmulParams& p = p_.product;
    int64_t wrong = 0;
    std::vector<Values> parts;  // of all tokens, on each rank
    for (int rank = 0; rank < p_.world; ++rank) {
      Values& part = parts.emplace_back(p_.world * p_.tokens * p.n);
      const std::vector<int32_t>& destination = destinations_[At(rank)];
      const Values y = Rows(routings_[At(rank)], h_values_[rank], w_values_[rank]);
      wrong += y_[rank].Wrong(y);
      for (int64_t slot = 0; slot < p.m; ++slot) {
        for (int64_t i = 0; i < p.n && destination[slot] >= 0; ++i) {
          part[slot / p_.choices * p.n + i] +=
              weight_values_[slot] * y[destination[slot] * p.n + i];
        }
      }
    }
    for (int rank = 0; rank < p_.world; ++rank) {
      const int64_t size = p_.tokens * p.n, first = rank * size;
      std::vector<float> out(size);
      for (int src = 0; src < p_.world; ++src) {
        std::vector<float> came(parts[src].begin() + first, parts[src].begin() + first + size);
        // n is a multiple of a block then.
        if (p_.wire && src != rank) came = ThroughWire(came, *p_.wire);
        for (int64_t i = 0; i < size; ++i) out[i] += came[i];
      }
      const Array rounded(p.out_dtype, Values(out.begin(), out.end()));
      wrong += out_[rank].Wrong(rounded.AsValues());
    }
    return wrong;
  }

  // To make them wrong.
  std::vector<int32_t>& offsets() { return routings_[0].offsets; }

 private:
  // Of a rank, in what there is one of or one for each.
  size_t At(size_t rank) const { return std::min(rank, routings_.size() - 1); }
  Values Rows(const RoutingOfSlots& routing, const Values& h, const Values& w) const {
    const GroupedMatmulParams& p = p_.product;
    Values y(p.m * p.n);
    for (int64_t e = 0; e < p.groups; ++e) {
      const int32_t first = routing.offsets[e], rows = routing.offsets[e + 1] - first;
      const Values one(w.begin() + e * p.k * p.n, w.begin() + (e + 1) * p.k * p.n);
      const Values of_group(h.begin() + first * p.k, h.begin() + (first + rows) * p.k);
      const Values product = Product(of_group, one, rows, p.k, p.n, p.transpose_rhs);
      std::copy(product.begin(), product.end(), y.begin() + first * p.n);
    }
    return y;
  }

  GroupedMatmulReduceScatterParams p_;
  std::vector<RoutingOfSlots> routings_;
  std::vector<std::vector<int32_t>> destinations_;
  Values weight_values_;
  std::unique_ptr<Array> weights_;
  std::vector<Values> h_values_, w_values_;
  std::vector<Array> h_, w_, out_, y_;
};

inline GroupedMatmulReduceScatterParams ScatteredParams(int32_t world, int64_t tokens,
                                                        int32_t choices, int32_t parts,
                                                        int32_t item_tokens, int64_t k, int64_t n,
                                                        int64_t groups, DType in, DType out) {
  return {world, tokens,      choices,
          parts, item_tokens, {world * tokens * choices, k, n, groups, in, out}};
}

// 8 ranks, 3 choices and k of 8: no sum exceeds 192, which bf16 represents exactly.
inline const bool kRandomGroupedReduceScatter =
    AddRandomCall([](const RandomProduct& r) -> std::unique_ptr<Call> {
      auto p =
          ScatteredParams(r.rows.world, r.rows.PerRank(), static_cast<int32_t>(r.pick(1, 3)),
                          static_cast<int32_t>(r.pick(0, 4)), static_cast<int32_t>(r.pick(1, 16)),
                          (r.k + 1) / 2, r.n, r.pick(1, 5), r.in, r.out);
      p.product.transpose_rhs = r.Flip();
      if (SizeOf(r.out) <= 4 && r.Flip()) {
        p.wire = r.Flip() ? DType::kS8 : DType::kF8E4M3FN;
        p.product.n = r.pick(1, 2) * kWireBlock;
      }
      return std::make_unique<GroupedMatmulReduceScatterCall>(p, static_cast<Routed>(r.pick(0, 3)),
                                                              r.seed, r.Flip());
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_GROUPED_MATMUL_REDUCE_SCATTER_CALL_H_
