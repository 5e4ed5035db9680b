// A call of all_gather_grouped_matmul with a random routing, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_GATHER_GROUPED_MATMUL_CALL_H_
#define JFLUX_TESTS_CC_ALL_GATHER_GROUPED_MATMUL_CALL_H_

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ranks.h"

namespace jflux {

// How tokens choose: any expert; some no expert; all the last expert; only the first rank's tokens
// choose one.
enum class Routed { kAnyhow, kWithDrops, kToOne, kOfFirstRank };

struct RoutingOfSlots {
  std::vector<int32_t> offsets, source;
};

// A routing of which each rank has `of_rank` slots.
inline RoutingOfSlots RandomRouting(int64_t slots, int64_t groups, int64_t of_rank, Routed routed,
                                    uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> chosen(groups);
  for (int32_t slot = 0; slot < slots; ++slot) {
    const bool drops = (routed == Routed::kWithDrops && random() % 3 == 0) ||
                       (routed == Routed::kOfFirstRank && slot >= of_rank);
    const size_t e = routed == Routed::kToOne ? groups - 1 : random() % groups;
    if (!drops) chosen[e].push_back(slot);
  }
  std::vector<int32_t> offsets{0}, source;
  for (const auto& group : chosen) {
    source.insert(source.end(), group.begin(), group.end());
    offsets.push_back(static_cast<int32_t>(source.size()));
  }
  source.resize(slots, -1);
  return {offsets, source};
}

// One routing for all ranks, or with `own` one for each, as of experts that are split over ranks:
// all kinds then, from `routed` on.
inline std::vector<RoutingOfSlots> RandomRoutings(int world, int64_t slots, int64_t groups,
                                                  int64_t of_rank, Routed routed, bool own,
                                                  uint32_t seed) {
  std::vector<RoutingOfSlots> routings;
  for (int rank = 0; rank < (own ? world : 1); ++rank) {
    const auto kind = static_cast<Routed>((static_cast<int>(routed) + rank) % 4);
    routings.push_back(RandomRouting(slots, groups, of_rank, kind, seed + 1000 * rank));
  }
  return routings;
}

class AllGatherGroupedMatmulCall : public Call {
 public:
  AllGatherGroupedMatmulCall(const AllGatherGroupedMatmulParams& p, int64_t chunk_bytes,
                             Routed routed, uint32_t seed, bool own = false)
      : p_(p), chunk_bytes_(chunk_bytes) {
    const GroupedMatmulParams& product = p.product;
    routings_ =
        RandomRoutings(p.world, product.m, product.groups, p.tokens * p.choices, routed, own, seed);
    for (int rank = 0; rank < p.world; ++rank) {
      const Values shard = RandomIntegers(p.tokens * product.k, 2, seed * 100 + rank);
      tokens_.insert(tokens_.end(), shard.begin(), shard.end());
      x_.emplace_back(product.dtype, shard);
      for (int i = 0; i < product.Weights(); ++i) {
        w_values_.push_back(RandomIntegers(product.groups * product.k * product.n, 1,
                                           seed * 100 + 50 + 8 * i + rank));
        w_.emplace_back(product.dtype, w_values_.back());
        sums_.emplace_back(product.out_dtype, product.m * product.n);
      }
      y_.emplace_back(product.out_dtype, product.m * product.n);
    }
  }

  WorkspaceLayout Workspace() const override {
    return TokenLayout::Make(p_, chunk_bytes_).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllGatherGroupedMatmulId);
    return AllGatherGroupedMatmulCpu(p_, chunk_bytes_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    const GroupedMatmulParams& p = p_.product;
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.world; ++rank) {
      std::vector<Values> sums;
      for (int i = 0; i < p.Weights(); ++i) {
        sums.push_back(Sums(RoutingOf(rank), w_values_[rank * p.Weights() + i]));
        if (p.sums) wrong += sums_[rank * p.Weights() + i].Wrong(sums.back());
      }
      Values y = sums[0];
      for (size_t at = 0; at < y.size(); ++at) {
        if (p.activation == Activation::kRelu) y[at] = std::max(0.0, y[at]);
        if (p.gated) y[at] *= sums[1][at];
      }
      // A gate's results may not be representable: they are compared where they are.
      if (!p.gated || p.out_dtype == DType::kF32 || p.out_dtype == DType::kF64) {
        wrong += y_[rank].Wrong(y);
      }
    }
    return wrong;
  }

  // To make them wrong.
  std::vector<int32_t>& offsets() { return routings_[0].offsets; }

 protected:
  AllGatherGroupedMatmulArrays ArraysOf(int rank) {
    const int weights = p_.product.Weights();
    AllGatherGroupedMatmulArrays arrays{};
    arrays.x = x_[rank].bytes.data();
    arrays.offsets = RoutingOf(rank).offsets.data();
    arrays.source = RoutingOf(rank).source.data();
    arrays.y = y_[rank].bytes.data();
    for (int i = 0; i < weights; ++i) {
      arrays.w[i] = w_[rank * weights + i].bytes.data();
      if (p_.product.sums) arrays.sums[i] = sums_[rank * weights + i].bytes.data();
    }
    return arrays;
  }

  const AllGatherGroupedMatmulParams p_;

 private:
  const RoutingOfSlots& RoutingOf(size_t rank) const {
    return routings_[std::min(rank, routings_.size() - 1)];
  }
  Values Sums(const RoutingOfSlots& routing, const Values& w) const {
    const GroupedMatmulParams& p = p_.product;
    Values sums(p.m * p.n);
    for (int64_t e = 0; e < p.groups; ++e) {
      const Values one(w.begin() + e * p.k * p.n, w.begin() + (e + 1) * p.k * p.n);
      for (int32_t row = routing.offsets[e]; row < routing.offsets[e + 1]; ++row) {
        const int64_t token = routing.source[row] / p_.choices;
        const Values x(tokens_.begin() + token * p.k, tokens_.begin() + (token + 1) * p.k);
        const Values y = Product(x, one, 1, p.k, p.n, p.transpose_rhs);
        std::copy(y.begin(), y.end(), sums.begin() + row * p.n);
      }
    }
    return sums;
  }

  int64_t chunk_bytes_;
  std::vector<RoutingOfSlots> routings_;
  Values tokens_;
  std::vector<Values> w_values_;
  std::vector<Array> x_, w_, y_, sums_;
};

inline AllGatherGroupedMatmulParams GatheredParams(int32_t world, int64_t tokens, int32_t choices,
                                                   int32_t parts, int64_t k, int64_t n,
                                                   int64_t groups, DType in, DType out) {
  return {world, tokens, choices, parts, {world * tokens * choices, k, n, groups, in, out}};
}

inline const bool kRandomAllGatherGrouped =
    AddRandomCall([](const RandomProduct& r) -> std::unique_ptr<Call> {
      auto p =
          GatheredParams(r.rows.world, r.rows.PerRank(), static_cast<int32_t>(r.pick(1, 3)),
                         static_cast<int32_t>(r.pick(0, 3)), r.k, r.n, r.pick(1, 5), r.in, r.out);
      p.product.transpose_rhs = r.Flip();
      return std::make_unique<AllGatherGroupedMatmulCall>(
          p, r.pick(64, 600), static_cast<Routed>(r.pick(0, 3)), r.seed, r.Flip());
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_GATHER_GROUPED_MATMUL_CALL_H_
