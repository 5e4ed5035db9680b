// A call of all_gather_attention with random numbers, positions and masks, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_ALL_GATHER_ATTENTION_CALL_H_
#define JFLUX_TESTS_CC_ALL_GATHER_ATTENTION_CALL_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/numbers.h"
#include "ops/all_gather_attention/all_gather_attention.h"
#include "ranks.h"

namespace jflux {

// Which positions ranks have of a sequence.
enum class Placed { kInOrder, kStriped, kZigzag, kAnyhow };

struct AttentionCase {
  int32_t world;
  int64_t batch, queries, keys, heads, groups, width;
  int32_t low = -kFurthest, high = kFurthest;  // of a key's position less its query's
  int segments = 0;                            // 0: none
  double softcap = 0;
  Placed placed = Placed::kInOrder;
  bool positions_by_batch = false, wide = false;
  DType dtype = DType::kF32;
};

inline constexpr int32_t kNoFurther = 0;  // AttentionCase::high of a causal mask

class AllGatherAttentionCall : public Call {
 public:
  AllGatherAttentionCall(const AttentionCase& c, int32_t log_chunk, uint32_t seed)
      : c_(c), log_chunk_(log_chunk), random_(seed) {
    FlashAttentionParams& a = params_.attention;
    params_.world = c.world;
    a.batch = c.batch, a.heads = c.heads, a.groups = c.groups, a.width = c.width;
    a.queries = c.queries, a.keys = c.keys;
    a.position_batches = c.positions_by_batch ? c.batch : 1;
    a.block_batches = c.segments == 0 && !c.positions_by_batch ? 1 : c.batch;
    a.scale = 1.3 / std::sqrt(static_cast<double>(c.width)), a.softcap = c.softcap;
    a.low = c.low, a.span = static_cast<uint32_t>(c.high - c.low);
    a.wide_out = c.wide;
    a.dtype = c.dtype;
    const std::vector<int32_t> places = Places();
    for (int rank = 0; rank < c.world; ++rank) {
      Rank& r = ranks_.emplace_back();
      r.q = RandomTensor(c.batch * c.queries * c.heads * c.width);
      r.k = RandomTensor(c.batch * c.keys * c.groups * c.width);
      r.v = RandomTensor(c.batch * c.keys * c.groups * c.width);
      Number(rank, places);
    }
    for (Rank& r : ranks_) {
      r.k_positions = k_positions_, r.k_segments = k_segments_;
      MakeBlocks(r);
      r.out = Array(c.wide ? DType::kF32 : c.dtype, c.batch * c.queries * c.heads * c.width);
      r.lse = Array(DType::kF32, c.batch * c.queries * c.heads);
    }
  }

  WorkspaceLayout Workspace() const override {
    return KeyLayout::Make(params_, log_chunk_).Workspace();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllGatherAttentionId);
    return AllGatherAttentionCpu(params_, log_chunk_, ArraysOf(view.rank), view, epoch, ctx);
  }
  // Elements of all ranks that are off by more than rounding can cost.
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (const Rank& r : ranks_) wrong += WrongOf(r);
    return wrong;
  }

 protected:
  FlashAttentionArrays ArraysOf(int rank) {
    Rank& r = ranks_[rank];
    FlashAttentionArrays a{};
    a.q = r.q.bytes.data(), a.k = r.k.bytes.data(), a.v = r.v.bytes.data();
    a.q_positions = r.q_positions.data(), a.k_positions = r.k_positions.data();
    if (c_.segments > 0) a.q_segments = r.q_segments.data(), a.k_segments = r.k_segments.data();
    a.blocks = r.kinds.data(), a.order = r.order.data();
    a.out = r.out.bytes.data();
    a.lse = reinterpret_cast<float*>(r.lse.bytes.data());
    return a;
  }

  AllGatherAttentionParams params_{};

 private:
  struct Rank {
    Array q{DType::kF32, 0}, k{DType::kF32, 0}, v{DType::kF32, 0};
    Array out{DType::kF32, 0}, lse{DType::kF32, 0};
    // Padded. Those of keys: of all ranks, the same on each.
    std::vector<int32_t> q_positions, k_positions, q_segments, k_segments;
    std::vector<int8_t> kinds;
    std::vector<int32_t> order;
  };

  Array RandomTensor(int64_t count) {
    std::normal_distribution<double> normal;
    Values values(count);
    for (double& v : values) v = normal(random_);
    return Array(c_.dtype, values);
  }

  // The position of the i-th key of all ranks.
  std::vector<int32_t> Places() {
    const int64_t all = c_.world * c_.keys;
    std::vector<int32_t> places(all);
    std::iota(places.begin(), places.end(), 0);
    if (c_.placed == Placed::kAnyhow) std::shuffle(places.begin(), places.end(), random_);
    for (int64_t i = 0; i < all; ++i) {
      const int64_t rank = i / c_.keys, j = i % c_.keys, early = c_.keys / 2;
      if (c_.placed == Placed::kStriped) places[i] = static_cast<int32_t>(j * c_.world + rank);
      if (c_.placed != Placed::kZigzag) continue;
      // The late parts have a position more each, if keys is odd.
      const int64_t late = c_.keys - early;
      places[i] = static_cast<int32_t>(j < early ? rank * early + j
                                                 : c_.world * early + (c_.world - 1 - rank) * late +
                                                       j - early);
    }
    return places;
  }

  int32_t SegmentOf(int64_t sequence, int64_t position) const {
    return static_cast<int32_t>((position * c_.segments + sequence * 17) / (c_.world * c_.keys));
  }

  // Positions and segments of a rank's queries, and its part of the keys'.
  void Number(int rank, const std::vector<int32_t>& places) {
    const int64_t batches = params_.attention.position_batches, padded = params_.PaddedKeys();
    const int64_t q_padded = Padded(c_.queries);
    Rank& r = ranks_[rank];
    r.q_positions.assign(batches * q_padded, kNowhere);
    k_positions_.resize(batches * padded, kNowhere);
    if (c_.segments > 0) {
      r.q_segments.assign(c_.batch * q_padded, 0);
      k_segments_.resize(c_.batch * padded, 0);
    }
    std::vector<int32_t> of_queries(c_.queries);
    for (int64_t i = 0; i < c_.queries; ++i) {
      of_queries[i] = c_.queries == c_.keys
                          ? places[rank * c_.keys + i]
                          : static_cast<int32_t>(random_() % (c_.world * c_.keys));
    }
    for (int64_t b = 0; b < c_.batch; ++b) {
      const auto number = [&](int64_t i, int32_t position, int64_t of_padded,
                              std::vector<int32_t>* positions, std::vector<int32_t>* segments) {
        if (b < batches) (*positions)[b * of_padded + i] = position + static_cast<int32_t>(3 * b);
        if (c_.segments > 0) (*segments)[b * of_padded + i] = SegmentOf(b, position);
      };
      for (int64_t i = 0; i < c_.queries; ++i) {
        number(i, of_queries[i], q_padded, &r.q_positions, &r.q_segments);
      }
      for (int64_t j = 0; j < c_.keys; ++j) {
        number(rank * Padded(c_.keys) + j, places[rank * c_.keys + j], padded, &k_positions_,
               &k_segments_);
      }
    }
  }

  // Whether query i of a rank has a score with a key, by its number among those of all ranks.
  bool Has(const Rank& r, int64_t b, int64_t i, int64_t number) const {
    const int64_t row = c_.positions_by_batch ? b : 0, padded = params_.PaddedKeys();
    const int64_t key = k_positions_[row * padded + number];
    const int64_t d = key - r.q_positions[row * Padded(c_.queries) + i];
    return key != kNowhere && c_.low <= d && d <= c_.high &&
           (c_.segments == 0 ||
            r.q_segments[b * Padded(c_.queries) + i] == k_segments_[b * padded + number]);
  }

  // Which pairs of blocks have scores. Some that have all are called kSome. Any order of the rows
  // is right.
  void MakeBlocks(Rank& r) {
    const AttentionBlocks size =
        BlocksOf(AttentionPass::kForward, static_cast<int>(std::min<int64_t>(256, c_.width)));
    const int64_t batches = params_.attention.block_batches;
    const int64_t rows = CeilDiv<int64_t>(c_.queries, size.queries);
    const int64_t columns = params_.PaddedKeys() / size.keys;
    r.kinds.resize(batches * rows * columns);
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          bool any = false, all = true;
          for (int64_t i = row * size.queries; i < std::min(c_.queries, (row + 1) * size.queries);
               ++i) {
            for (int64_t j = column * size.keys; j < (column + 1) * size.keys; ++j) {
              (Has(r, b, i, j) ? any : all) = Has(r, b, i, j);
            }
          }
          r.kinds[(b * rows + row) * columns + column] =
              static_cast<int8_t>(!any                        ? BlockKind::kNone
                                  : all && random_() % 4 != 0 ? BlockKind::kAll
                                                              : BlockKind::kSome);
        }
      }
    }
    r.order.resize(batches * rows);
    std::iota(r.order.begin(), r.order.end(), 0);
    std::shuffle(r.order.begin(), r.order.end(), random_);
  }

  int64_t WrongOf(const Rank& r) const {
    const Values q = r.q.AsValues(), out = r.out.AsValues(), lse = r.lse.AsValues();
    std::vector<Values> k, v;
    for (const Rank& other : ranks_) {
      k.push_back(other.k.AsValues());
      v.push_back(other.v.AsValues());
    }
    // Of one rounding: kernels round weights before they multiply with them.
    const double unit = c_.dtype == DType::kF16    ? 0x1p-11
                        : c_.dtype == DType::kBF16 ? 0x1p-8
                                                   : 0x1p-20;
    const double share = 1.01 * unit * (c_.wide ? 1 : 2);
    const double infinity = std::numeric_limits<double>::infinity();
    int64_t wrong = 0;
    std::vector<double> scores, sum, size;
    std::vector<std::pair<int, int64_t>> pairs;
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t i = 0; i < c_.queries; ++i) {
        pairs.clear();
        for (int src = 0; src < c_.world; ++src) {
          for (int64_t j = 0; j < c_.keys; ++j) {
            if (Has(r, b, i, src * Padded(c_.keys) + j)) pairs.emplace_back(src, j);
          }
        }
        for (int64_t h = 0; h < c_.heads; ++h) {
          const int64_t row = (b * c_.queries + i) * c_.heads + h, group = h * c_.groups / c_.heads;
          const auto at = [&](int64_t j) {
            return ((b * c_.keys + j) * c_.groups + group) * c_.width;
          };
          scores.clear();
          double most = -infinity, total = 0;
          for (const auto& [src, j] : pairs) {
            double x = 0;
            for (int64_t l = 0; l < c_.width; ++l) x += q[row * c_.width + l] * k[src][at(j) + l];
            x *= params_.attention.scale;
            if (c_.softcap != 0) x = c_.softcap * std::tanh(x / c_.softcap);
            scores.push_back(x);
            most = std::max(most, x);
          }
          for (const double x : scores) total += std::exp(x - most);
          const double want_lse = pairs.empty() ? -infinity : most + std::log(total);
          wrong += !(lse[row] == want_lse || std::abs(lse[row] - want_lse) <= 1e-5);
          sum.assign(c_.width, 0);
          size.assign(c_.width, 0);
          for (size_t n = 0; n < pairs.size(); ++n) {
            const double p = std::exp(scores[n] - want_lse);
            for (int64_t l = 0; l < c_.width; ++l) {
              const double term = p * v[pairs[n].first][at(pairs[n].second) + l];
              sum[l] += term;
              size[l] += std::abs(term);
            }
          }
          for (int64_t l = 0; l < c_.width; ++l) {
            wrong += !(std::abs(out[row * c_.width + l] - sum[l]) <= share * size[l] + 2e-5);
          }
        }
      }
    }
    return wrong;
  }

  const AttentionCase c_;
  int32_t log_chunk_;
  std::mt19937 random_;
  std::vector<int32_t> k_positions_, k_segments_;
  std::vector<Rank> ranks_;
};

inline const bool kRandomAllGatherAttention =
    AddRandomCall([](const RandomProduct& r) -> std::unique_ptr<Call> {
      AttentionCase c{};
      c.world = r.rows.world;
      c.batch = r.pick(1, 2);
      c.keys = r.rows.PerRank();
      c.queries = r.Flip() ? c.keys : r.pick(1, 9);
      c.groups = r.pick(1, 2), c.heads = c.groups * r.pick(1, 3);
      c.width = r.k;
      c.low = r.Flip() ? -kFurthest : static_cast<int32_t>(-r.pick(0, 20));
      c.high = r.Flip() ? kNoFurther : kFurthest;
      c.segments = static_cast<int>(r.pick(0, 3));
      c.softcap = r.Flip() ? 2 : 0;
      c.placed = static_cast<Placed>(r.pick(0, 3));
      c.positions_by_batch = r.Flip(), c.wide = r.Flip();
      c.dtype = r.in == DType::kF64 ? DType::kF32 : r.in;
      return std::make_unique<AllGatherAttentionCall>(c, static_cast<int32_t>(r.pick(5, 8)),
                                                      r.seed);
    });

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_ALL_GATHER_ATTENTION_CALL_H_
