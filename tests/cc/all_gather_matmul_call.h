// A call of all_gather_matmul, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_GATHER_MATMUL_CALL_H_
#define JFLUX_TESTS_CC_ALL_GATHER_MATMUL_CALL_H_

#include <memory>
#include <vector>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ranks.h"

namespace jflux {

class AllGatherMatmulCall : public Call {
 public:
  AllGatherMatmulCall(const AllGatherMatmulParams& p, const CpuTiling& tiling, uint32_t seed)
      : p_(p), tiling_(tiling) {
    const Rows& r = p.rows;
    gathered_ = Values(r.Total() * p.k);
    for (int rank = 0; rank < r.world; ++rank) {
      const Values shard = RandomIntegers(r.PerRank() * p.k, 2, seed * 100 + rank);
      for (int64_t o = 0; o < r.outer; ++o) {
        for (int64_t e = 0; e < r.inner * p.k; ++e) {
          gathered_[(o * r.world + rank) * r.inner * p.k + e] = shard[o * r.inner * p.k + e];
        }
      }
      w_values_.push_back(RandomIntegers(p.k * p.n, 1, seed * 100 + 50 + rank));
      x_.emplace_back(p.dtype, shard);
      w_.emplace_back(p.DTypeOfW(), w_values_.back());
      y_.emplace_back(p.out_dtype, r.Total() * p.n);
      gathered_out_.emplace_back(p.dtype, r.Total() * p.k);
    }
  }

  WorkspaceLayout Workspace() const override {
    return AllGatherLayout::Make(p_, tiling_.chunk_bytes).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    const int r = view.rank;
    ctx.op = static_cast<uint32_t>(kAllGatherMatmulId);
    void* gathered = p_.return_gathered ? gathered_out_[r].bytes.data() : nullptr;
    const AllGatherMatmulArrays arrays{x_[r].bytes.data(), w_[r].bytes.data(), y_[r].bytes.data(),
                                       gathered};
    return AllGatherMatmulCpu(p_, tiling_, arrays, view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int r = 0; r < p_.rows.world; ++r) {
      wrong += y_[r].Wrong(
          Product(gathered_, w_values_[r], p_.rows.Total(), p_.k, p_.n, p_.transpose_rhs));
      if (p_.return_gathered) wrong += gathered_out_[r].Wrong(gathered_);
    }
    return wrong;
  }

 private:
  AllGatherMatmulParams p_;
  CpuTiling tiling_;
  Values gathered_;
  std::vector<Values> w_values_;
  std::vector<Array> x_, w_, y_, gathered_out_;
};

inline const bool kRandomAllGatherMatmul =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      const CpuTiling tiling{p.pick(64, 600), p.tile_m, p.tile_n};
      return std::make_unique<AllGatherMatmulCall>(
          AllGatherMatmulParams{p.rows, p.k, p.n, p.in, p.out, p.Flip(), p.Flip()}, tiling, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_GATHER_MATMUL_CALL_H_
