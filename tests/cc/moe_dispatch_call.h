// Calls of moe_dispatch and moe_combine on random choices, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_MOE_DISPATCH_CALL_H_
#define JFLUX_TESTS_CC_MOE_DISPATCH_CALL_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "ops/moe_dispatch/moe_combine_body.h"
#include "ops/moe_dispatch/moe_dispatch_body.h"
#include "ranks.h"
#include "wires.h"

namespace jflux {

inline constexpr float kMoePoison = -7;

// By the definition, for all ranks: what a dispatch of `choices` [world][tokens][slots] is to give.
struct ExpectedRows {
  struct Row {
    int32_t src, token, first_slot;
  };
  std::vector<std::vector<std::vector<Row>>> of_expert;  // [rank][local expert]
  std::vector<std::vector<int32_t>> starts;  // [rank][local expert], and the end of the last one

  ExpectedRows(const MoeDispatchParams& p, const std::vector<std::vector<int32_t>>& choices)
      : of_expert(p.world, std::vector<std::vector<Row>>(p.experts)), starts(p.world) {
    for (int32_t expert = 0; expert < p.world * p.experts; ++expert) {
      auto& rows = of_expert[expert / p.experts][expert % p.experts];
      for (int32_t src = 0; src < p.world; ++src) {
        for (int32_t t = 0; t < p.items.tokens; ++t) {
          for (int32_t j = 0; j < p.slots; ++j) {
            if (choices[src][t * p.slots + j] != expert) continue;
            const auto capacity = p.expert_rows.capacity;
            if (capacity < 0 || static_cast<int32_t>(rows.size()) < capacity) {
              rows.push_back({src, t, j});
            }
            break;
          }
        }
      }
    }
    for (int rank = 0; rank < p.world; ++rank) {
      int32_t next = 0;
      for (int32_t e = 0; e < p.experts; ++e) {
        starts[rank].push_back(next);
        const auto size = static_cast<int32_t>(of_expert[rank][e].size());
        next += p.expert_rows.stride > 0 ? p.expert_rows.stride
                                         : RoundUp(size, p.expert_rows.alignment);
      }
      starts[rank].push_back(next);
    }
  }
};

// Sizes of a call. The result has room for the worst case.
inline MoeDispatchParams MoeParamsFor(int32_t world, int64_t tokens, int32_t slots, int32_t experts,
                                      int64_t vectors, int32_t capacity, int32_t alignment,
                                      bool masked, int32_t parts) {
  MoeDispatchParams p{};
  p.world = world;
  p.slots = slots;
  p.experts = experts;
  p.items = TokenParts{tokens, vectors, parts};
  const auto all = static_cast<int32_t>(p.AllTokens());
  const int32_t most = RoundUp(capacity < 0 ? all : capacity, alignment);
  p.expert_rows = ExpertRows{capacity, alignment, masked ? most : 0};
  p.rows = masked ? experts * most
                  : RoundUp(Min(slots, experts) * all + experts * (alignment - 1), alignment);
  return p;
}

// What both calls have: choices, and blocks that share a rank's part, of which `running` run at a
// time.
class MoeCall : public Call {
 public:
  MoeCall(const MoeDispatchParams& p, int blocks, int running, uint32_t seed)
      : p_(p), blocks_(blocks), running_(running), random_(seed) {
    const int32_t all = p.world * p.experts;
    for (int rank = 0; rank < p.world; ++rank) {
      choices_.emplace_back(p.Choices());
      weights_.emplace_back(p.Choices());
      // Duplicates, none, and indices that are no expert's; sometimes all for one expert.
      const int32_t only = seed % 5 == 0 ? all - 1 : -1;
      for (int32_t& c : choices_.back()) {
        c = only >= 0 ? only : Pick(-1, all + (seed % 3 == 0 ? 1 : -1));
      }
      for (float& w : weights_.back()) w = static_cast<float>(Pick(-2, 2));
    }
  }

 protected:
  int32_t Pick(int64_t low, int64_t high) {
    return static_cast<int32_t>(low + static_cast<int64_t>(random_()) % (high - low + 1));
  }

  template <typename Params, typename Run>
  bool RunBlocks(const Params& params, const SymmetricView& view, uint64_t epoch,
                 const WaitContext& ctx, Run&& run) {
    std::atomic<int> failed{0};
    const auto at = [&](int block) {
      return shmem::Context{view,   params.Workspace(), epoch, params.Signature(), ctx, block,
                            blocks_};
    };
    return shmem::internal::RunCall(at(0), [&](const shmem::Context&) {
      InTurn(blocks_, running_, [&](int block) {
        std::vector<int32_t> scratch(params.ScratchBytes() / 4 + 1, -5);
        failed += !run(at(block), scratch.data());
      });
      return failed == 0;
    });
  }

  const MoeDispatchParams p_;
  const int blocks_, running_;
  std::mt19937 random_;
  std::vector<std::vector<int32_t>> choices_;
  std::vector<std::vector<float>> weights_;
};

class MoeDispatchCall : public MoeCall {
 public:
  MoeDispatchCall(const MoeDispatchParams& p, int blocks, int running, uint32_t seed)
      : MoeCall(p, blocks, running, seed) {
    for (int rank = 0; rank < p.world; ++rank) {
      for (auto* of_ranks : {&x_, &scale_}) {
        const int64_t vectors = of_ranks == &x_ ? p.ValueVectors() : p.scale_vectors;
        of_ranks->emplace_back(p.items.tokens * vectors * 4);
        for (float& v : of_ranks->back()) v = static_cast<float>(Pick(0, 1 << 20));
      }
      rows_.emplace_back(p.rows * p.ValueVectors() * 4, kMoePoison);
      row_scale_.emplace_back(p.rows * p.scale_vectors * 4, kMoePoison);
      row_weights_.emplace_back(p.rows, kMoePoison);
      sizes_.emplace_back(p.experts, -9);
      slot_.emplace_back(p.rows, -9);
      there_.emplace_back(p.world * p.Choices(), -9);
    }
  }

  WorkspaceLayout Workspace() const override { return p_.Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kMoeDispatchId);
    const MoeDispatchArrays arrays = ArraysOf(view.rank);
    return RunBlocks(p_, view, epoch, ctx, [&](const shmem::Context& call, void* scratch) {
      return MoeDispatchBody{p_, arrays, call, scratch}.Run();
    });
  }

  int64_t Wrong() const override {
    const ExpectedRows expected(p_, choices_);
    int64_t wrong = 0;
    const int64_t width = p_.ValueVectors() * 4, scales = p_.scale_vectors * 4;
    for (int rank = 0; rank < p_.world; ++rank) {
      std::vector<float> rows(p_.rows * width, 0), weights(p_.rows, 0), scale(p_.rows * scales, 0);
      if (!p_.fill) {  // what is past the end stays
        const int64_t end = expected.starts[rank].back();
        std::fill(rows.begin() + end * width, rows.end(), kMoePoison);
        std::fill(scale.begin() + end * scales, scale.end(), kMoePoison);
      }
      std::vector<int32_t> slot(p_.rows, -1), there(p_.world * p_.Choices(), -2), sizes;
      for (int32_t i = 0; i < p_.world * static_cast<int32_t>(p_.Choices()); ++i) {
        const auto src = static_cast<int32_t>(i / p_.Choices());
        const auto at = static_cast<int32_t>(i % p_.Choices());
        const int32_t* of_token = choices_[src].data() + at / p_.slots * p_.slots;
        bool is_first = true;
        for (int32_t j = 0; j < at % p_.slots; ++j) is_first &= of_token[j] != choices_[src][at];
        const int32_t local = choices_[src][at] - rank * p_.experts;
        if (local < 0 || local >= p_.experts || !is_first) there[i] = -1;
      }
      for (int32_t e = 0; e < p_.experts; ++e) {
        const auto& its = expected.of_expert[rank][e];
        sizes.push_back(static_cast<int32_t>(its.size()));
        for (size_t i = 0; i < its.size(); ++i) {
          const auto& [src, token, j] = its[i];
          const int64_t row = expected.starts[rank][e] + static_cast<int64_t>(i);
          std::copy_n(x_[src].begin() + token * width, width, rows.begin() + row * width);
          std::copy_n(scale_[src].begin() + token * scales, scales, scale.begin() + row * scales);
          for (int32_t s = 0; s < p_.slots; ++s) {
            const int64_t at = token * p_.slots + s;
            if (choices_[src][at] == rank * p_.experts + e) weights[row] += weights_[src][at];
          }
          slot[row] = static_cast<int32_t>(src * p_.Choices() + token * p_.slots + j);
          there[slot[row]] = static_cast<int32_t>(row);
        }
      }
      wrong += (rows_[rank] != rows) + (row_scale_[rank] != scale) +
               (row_weights_[rank] != weights) + (sizes_[rank] != sizes) + (slot_[rank] != slot) +
               (there_[rank] != there);
    }
    return wrong;
  }

  MoeDispatchArrays ArraysOf(int rank) {
    return MoeDispatchArrays{x_[rank].data(),           scale_[rank].data(),
                             choices_[rank].data(),     weights_[rank].data(),
                             rows_[rank].data(),        row_scale_[rank].data(),
                             row_weights_[rank].data(), sizes_[rank].data(),
                             slot_[rank].data(),        there_[rank].data()};
  }

 private:
  std::vector<std::vector<float>> x_, scale_, rows_, row_scale_, row_weights_;
  std::vector<std::vector<int32_t>> sizes_, slot_, there_;
};

class MoeCombineCall : public MoeCall {
 public:
  // `wire`: the format of what travels.
  MoeCombineCall(const MoeDispatchParams& p, DType dtype, bool out_f32, int blocks, int running,
                 uint32_t seed, std::optional<DType> wire = std::nullopt)
      : MoeCall(p, blocks, running, seed) {
    c_.world = p.world;
    c_.slots = p.slots;
    c_.rows = p.rows;
    c_.dtype = dtype;
    c_.out_f32 = out_f32;
    c_.items = p.items;
    columns_ = c_.RowBytes() / SizeOf(dtype);
    if (wire) c_.SetWire(*wire);
    const ExpectedRows expected(p, choices_);
    for (int rank = 0; rank < p.world; ++rank) {
      Values y(p.rows * columns_);
      for (double& v : y) v = Pick(-2, 2);
      // Of other sizes in each block.
      for (size_t i = 0; wire && i < y.size(); ++i) {
        y[i] *= std::ldexp(1 + Pick(0, 99) / 64.0, static_cast<int>(i / kWireBlock % 7) - 3);
      }
      y_.emplace_back(dtype, y);
      values_.push_back(y_.back().AsValues());
      out_.emplace_back(out_f32 ? DType::kF32 : dtype, p.items.tokens * columns_);
      there_.emplace_back(p.world * p.Choices(), ExpertMarks::kNone);
      weights_there_.emplace_back(p.world * p.Choices(), kMoePoison);
      part_.emplace_back(p.Choices(), -1);
      for (int src = 0; src < p.world; ++src) {
        std::copy(weights_[src].begin(), weights_[src].end(),
                  weights_there_[rank].begin() + src * p.Choices());
      }
    }
    for (int rank = 0; rank < p.world; ++rank) {
      for (int32_t t = 0; t < p.items.tokens; ++t) {
        for (int32_t j = 0; j < p.slots; ++j) {
          const int32_t expert = choices_[rank][t * p.slots + j];
          if (expert < 0 || expert >= p.world * p.experts) continue;
          const int32_t to = expert / p.experts;
          bool is_first_on_rank = true, is_first = true;
          for (int32_t i = 0; i < j; ++i) {
            const int32_t other = choices_[rank][t * p.slots + i];
            is_first &= other != expert;
            is_first_on_rank &= other < 0 || other / p.experts != to;
          }
          if (is_first_on_rank) part_[rank][t * p.slots + j] = to;
          if (is_first) {
            there_[to][rank * p.Choices() + t * p.slots + j] = ExpertMarks::kDropped;
          }
        }
      }
      for (int32_t e = 0; e < p.experts; ++e) {
        const auto& its = expected.of_expert[rank][e];
        for (size_t i = 0; i < its.size(); ++i) {
          const auto& [src, token, j] = its[i];
          there_[rank][src * p.Choices() + token * p.slots + j] =
              expected.starts[rank][e] + static_cast<int32_t>(i);
        }
      }
    }
  }

  WorkspaceLayout Workspace() const override { return c_.Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kMoeCombineId);
    const MoeCombineArrays arrays = ArraysOf(view.rank);
    return RunBlocks(c_, view, epoch, ctx, [&](const shmem::Context& call, void* scratch) {
      return WithFormat<kMoeCombineFormats.operands>(c_.dtype, [&](auto format) {
        using Numbers = VectorNumbers<Number<format>>;
        if (c_.wire_blocks != 0) {
          return MoeCombineBody<Numbers, OneLane>{c_, arrays, call, scratch}.Run();
        }
        return MoeCombineBody<Numbers>{c_, arrays, call, scratch}.Run();
      });
    });
  }

  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.world; ++rank) {
      std::vector<float> want(p_.items.tokens * columns_, 0);
      for (int64_t i = 0; i < p_.Choices(); ++i) {
        const int32_t to = part_[rank][i];
        if (to < 0) continue;
        const int64_t token = i / p_.slots;
        const std::vector<float> sum = SumOf(rank, token, to);
        for (int64_t c = 0; c < columns_; ++c) want[token * columns_ + c] += sum[c];
      }
      const Array rounded(out_[rank].dtype, Values(want.begin(), want.end()));
      wrong += out_[rank].Wrong(rounded.AsValues());
    }
    return wrong;
  }

  const MoeCombineParams& params() const { return c_; }
  MoeCombineArrays ArraysOf(int rank) {
    return MoeCombineArrays{y_[rank].bytes.data(), weights_there_[rank].data(), there_[rank].data(),
                            part_[rank].data(), out_[rank].bytes.data()};
  }

 private:
  // What rank `to` sends for a token of `rank`.
  std::vector<float> SumOf(int rank, int64_t token, int to) const {
    std::vector<float> sum(columns_, 0);
    for (int32_t j = 0; j < p_.slots; ++j) {
      const int64_t i = token * p_.slots + j;
      const int32_t row = there_[to][rank * p_.Choices() + i];
      for (int64_t c = 0; row >= 0 && c < columns_; ++c) {
        sum[c] += weights_[rank][i] * static_cast<float>(values_[to][row * columns_ + c]);
      }
    }
    if (c_.wire_blocks != 0) return ThroughWire(sum, c_.wire);
    return sum;
  }

  MoeCombineParams c_{};
  int64_t columns_ = 0;
  std::vector<Array> y_, out_;
  std::vector<Values> values_;
  std::vector<std::vector<int32_t>> there_, part_;
  std::vector<std::vector<float>> weights_there_;
};

inline std::unique_ptr<MoeCall> RandomMoeCall(const RandomProduct& p, bool combine) {
  const bool masked = p.Flip();
  const auto params =
      MoeParamsFor(p.rows.world, p.pick(1, 12), static_cast<int32_t>(p.pick(1, 5)),
                   static_cast<int32_t>(p.pick(1, 4)), p.pick(1, 9),
                   p.Flip() ? static_cast<int32_t>(p.pick(1, 6)) : -1,
                   static_cast<int32_t>(p.pick(1, 4)), masked, static_cast<int32_t>(p.pick(1, 3)));
  const auto blocks = static_cast<int>(p.pick(1, 3));
  if (combine) {
    std::optional<DType> wire;
    if (p.Flip()) wire = p.Flip() ? DType::kS8 : DType::kF8E4M3FN;
    return std::make_unique<MoeCombineCall>(params, p.in, p.Flip(), blocks, 1, p.seed, wire);
  }
  return std::make_unique<MoeDispatchCall>(params, blocks, 1, p.seed);
}

inline const bool kRandomMoeDispatch =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      return RandomMoeCall(p, /*combine=*/false);
    });
inline const bool kRandomMoeCombine =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      RandomProduct of_floats = p;
      if (p.in == DType::kF64) of_floats.in = DType::kF32;
      return RandomMoeCall(of_floats, /*combine=*/true);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MOE_DISPATCH_CALL_H_
