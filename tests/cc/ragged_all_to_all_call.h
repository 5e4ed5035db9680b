// A call of ragged_all_to_all with random slices, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_RAGGED_ALL_TO_ALL_CALL_H_
#define JFLUX_TESTS_CC_RAGGED_ALL_TO_ALL_CALL_H_

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "ranks.h"

namespace jflux {

// What one rank is given, beside its operand.
struct RaggedSizes {
  std::vector<int32_t> input_offsets, send_sizes, output_offsets, recv_sizes;
};

// Random slices of up to `most` rows. Those for one rank lie in random order and with gaps, and do
// not overlap; those of one operand may.
inline std::vector<RaggedSizes> RandomSizes(const RaggedParams& p, int32_t most, uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return static_cast<int32_t>(low + static_cast<int64_t>(random()) % (high - low + 1));
  };
  const std::vector<int32_t> none(p.Slices(), 0);
  std::vector<RaggedSizes> ranks(p.world, RaggedSizes{none, none, none, none});
  for (int to = 0; to < p.world; ++to) {
    for (int32_t entry = 0; entry < p.batch; ++entry) {
      std::vector<int32_t> order(p.world * p.slices);  // slices for `to`, by source
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      int32_t next = 0;
      for (int32_t place : order) {
        const int src = place / p.slices;
        const int32_t t = place % p.slices * p.batch + entry;
        const int32_t sent = to * p.PerRank() + t, received = src * p.PerRank() + t;
        const int64_t room = Min<int64_t>(p.output_rows - next, p.operand_rows);
        const int32_t rows = pick(0, 2) == 0 ? 0 : pick(0, Min<int64_t>(most, room));
        ranks[src].input_offsets[sent] = pick(0, p.operand_rows - rows);
        ranks[src].send_sizes[sent] = ranks[to].recv_sizes[received] = rows;
        ranks[src].output_offsets[sent] = next;
        next += rows + pick(0, Min<int64_t>(2, p.output_rows - next - rows));
      }
    }
  }
  return ranks;
}

class RaggedCall : public Call {
 public:
  RaggedCall(const RaggedParams& p, int32_t most, uint32_t seed)
      : p_(p), sizes_(RandomSizes(p, most, seed)) {
    std::mt19937 random(seed);
    for (int rank = 0; rank < p.world; ++rank) {
      operand_.emplace_back(p.batch * p.operand_rows * p.row_bytes);
      y_.emplace_back(p.ImageBytes());
      for (auto* array : {&operand_.back(), &y_.back()}) {
        for (char& c : *array) c = static_cast<char>(random());
      }
    }
    output_ = y_;
  }

  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kRaggedAllToAllId);
    return RaggedAllToAllCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  WorkspaceLayout Workspace() const override { return p_.ChunkedWorkspace(); }

  // By the definition of lax.ragged_all_to_all: sender by sender.
  int64_t Wrong() const override {
    auto want = output_;
    for (int src = 0; src < p_.world; ++src) {
      for (int32_t i = 0; i < p_.Slices(); ++i) {
        const RaggedSizes& s = sizes_[src];
        const int64_t entry = i % p_.batch;
        const auto from =
            operand_[src].begin() + (entry * p_.operand_rows + s.input_offsets[i]) * p_.row_bytes;
        const int64_t to = (entry * p_.output_rows + s.output_offsets[i]) * p_.row_bytes;
        std::copy(from, from + s.send_sizes[i] * p_.row_bytes, want[i / p_.PerRank()].begin() + to);
      }
    }
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.world; ++rank) {
      for (size_t b = 0; b < want[rank].size(); ++b) wrong += y_[rank][b] != want[rank][b];
    }
    return wrong;
  }

  RaggedSizes& SizesOf(int rank) { return sizes_[rank]; }

 protected:
  RaggedArrays ArraysOf(int rank) {
    const RaggedSizes& s = sizes_[rank];
    return RaggedArrays{operand_[rank].data(), y_[rank].data(),         s.input_offsets.data(),
                        s.send_sizes.data(),   s.output_offsets.data(), s.recv_sizes.data()};
  }

  const RaggedParams p_;

 private:
  std::vector<RaggedSizes> sizes_;
  std::vector<std::vector<char>> operand_, y_, output_;
};

inline RaggedParams RaggedParamsFor(int32_t world, int32_t slices, int32_t batch,
                                    int64_t operand_rows, int64_t output_rows, int64_t row_bytes,
                                    bool chunked) {
  return RaggedParams{world, slices, batch, operand_rows, output_rows, row_bytes, chunked};
}

inline const bool kRandomRagged =
    AddRandomCall([](const RandomProduct& p) -> std::unique_ptr<Call> {
      const auto params =
          RaggedParamsFor(p.rows.world, static_cast<int32_t>(p.pick(1, 3)),
                          static_cast<int32_t>(p.pick(1, 2)), p.rows.inner, p.pick(1, 40),
                          p.Flip() ? 64 * p.pick(1, 8) : p.pick(1, 300), /*chunked=*/true);
      return std::make_unique<RaggedCall>(params, 20, p.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_RAGGED_ALL_TO_ALL_CALL_H_
