// The CPU back end of all_gather_attention: one rank's part of the protocol, in host memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/tile_order.h"
#include "ops/all_gather_attention/all_gather_attention.h"
#include "runtime/cpu_matmul.h"
#include "runtime/rank_call.h"

namespace jflux {
namespace {

constexpr int64_t kBlockKeys = 128;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Body : RankCall<AllGatherAttentionParams, FlashAttentionArrays, KeyLayout> {
  std::vector<int32_t> arrived;  // of each rank: chunks that are known to have arrived

  const void* Tensor(int tensor) const { return tensor == 0 ? arrays.k : arrays.v; }
  Signal* SignalOf(int rank, int src, int32_t chunk) const {
    return view.At<Signal>(rank, signals + layout.SignalOffset(layout.SlotOf(rank, src), chunk));
  }

  void Send() const {
    for (int step = 1; step < view.world; ++step) {
      const int peer = SendPeer(view.rank, step, view.world);
      const int32_t slot = layout.SlotOf(peer, view.rank);
      for (int32_t i = 0; i < layout.Chunks(); ++i) {
        const KeyLayout::Chunk c = layout.ChunkAt(i);
        std::memcpy(view.At(peer, data + layout.DataOffset(slot, c)),
                    static_cast<const char*>(Tensor(c.tensor)) + layout.TensorOffset(c), c.bytes);
        StoreRelease(SignalOf(peer, view.rank, i), signal);
      }
    }
  }

  // Waits for the first `rows` keys of a sequence of `src`.
  bool Await(int src, int32_t sequence, int64_t rows) {
    const int32_t count = src == view.rank ? 0 : layout.ChunksOf(sequence, rows);
    for (int32_t& c = arrived[src]; c < count; ++c) {
      if (!WaitSignal(SignalOf(view.rank, src, c), signal, src, c, ctx)) return false;
    }
    return true;
  }

  // Where the keys (tensor 0) or values of a sequence of `src` lie.
  const char* Sequence(int src, int tensor, int32_t sequence) const {
    const KeyLayout::Chunk first{tensor, sequence, 0, 0};
    if (src == view.rank) {
      return static_cast<const char*>(Tensor(tensor)) + layout.TensorOffset(first);
    }
    return view.At(view.rank, data + layout.DataOffset(layout.SlotOf(view.rank, src), first));
  }
};

// The attention of a rank's queries to the blocks of keys that they have met, as running sums
// (arXiv 2205.14135, algorithm 1).
class RunningAttention {
 public:
  RunningAttention(const AllGatherAttentionParams& params, const FlashAttentionArrays& arrays)
      : p_(params.attention), arrays_(arrays), padded_keys_(params.PaddedKeys()) {
    const int64_t rows = p_.batch * p_.queries * p_.heads;
    q_.resize(rows * p_.width);
    Convert(arrays.q, p_.dtype, q_.data(), DType::kF32, rows * p_.width);
    highest_.assign(rows, kNone);
    total_.assign(rows, 0);
    out_.assign(rows * p_.width, 0);
  }

  // `number`: of the first key, among all. k, v: [rows, G, D].
  void Meet(int32_t sequence, int64_t number, int64_t rows, const char* k, const char* v) {
    const int64_t count = rows * p_.groups * p_.width;
    k_.resize(count);
    v_.resize(count);
    Convert(k, p_.dtype, k_.data(), DType::kF32, count);
    Convert(v, p_.dtype, v_.data(), DType::kF32, count);
    for (int64_t i = 0; i < p_.queries; ++i) {
      FindPairs(sequence, i, number, rows);
      for (int64_t h = 0; h < p_.heads && !pairs_.empty(); ++h) Meet(sequence, i, h);
    }
  }

  void Finish() {
    for (size_t row = 0; row < total_.size(); ++row) {
      const float total = total_[row], inverse = total == 0 ? 0 : 1 / total;
      arrays_.lse[row] = total == 0 ? kNone : highest_[row] + std::log(total);
      for (int64_t l = 0; l < p_.width; ++l) out_[row * p_.width + l] *= inverse;
    }
    Convert(out_.data(), DType::kF32, arrays_.out, p_.wide_out ? DType::kF32 : p_.dtype,
            static_cast<int64_t>(out_.size()));
  }

 private:
  // Which keys of a block have a score with a query.
  void FindPairs(int32_t sequence, int64_t query, int64_t number, int64_t rows) {
    const int64_t at = p_.position_batches == 1 ? 0 : sequence;
    const int32_t* keys = arrays_.k_positions + at * padded_keys_ + number;
    const int32_t position = arrays_.q_positions[at * Padded(p_.queries) + query];
    const int64_t q_at = sequence * Padded(p_.queries) + query;
    const int64_t k_at = sequence * padded_keys_ + number;
    pairs_.clear();
    for (int64_t j = 0; j < rows; ++j) {
      const uint32_t distance = static_cast<uint32_t>(keys[j]) - static_cast<uint32_t>(position) -
                                static_cast<uint32_t>(p_.low);
      const bool same =
          arrays_.q_segments == nullptr || arrays_.q_segments[q_at] == arrays_.k_segments[k_at + j];
      if (distance <= p_.span && same) pairs_.push_back(j);
    }
  }

  void Meet(int32_t sequence, int64_t query, int64_t head) {
    const int64_t row = (sequence * p_.queries + query) * p_.heads + head, width = p_.width;
    const int64_t group = head / (p_.heads / p_.groups);
    const auto at = [&](int64_t key) { return (key * p_.groups + group) * width; };
    const float* q = &q_[row * width];
    float* out = &out_[row * width];
    scores_.clear();
    float highest = highest_[row];
    for (const int64_t j : pairs_) {
      float x = 0;
      for (int64_t l = 0; l < width; ++l) x += q[l] * k_[at(j) + l];
      x *= static_cast<float>(p_.scale);
      if (p_.softcap != 0) {
        const auto cap = static_cast<float>(p_.softcap);
        x = cap * std::tanh(x / cap);
      }
      scores_.push_back(x);
      highest = x > highest || x != x ? x : highest;  // NaN stays
    }
    const float base = highest == kNone ? 0 : highest, before = std::exp(highest_[row] - base);
    total_[row] *= before;
    for (int64_t l = 0; l < width; ++l) out[l] *= before;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      const float weight = std::exp(scores_[i] - base);
      total_[row] += weight;
      for (int64_t l = 0; l < width; ++l) out[l] += weight * v_[at(pairs_[i]) + l];
    }
    highest_[row] = highest;
  }

  const FlashAttentionParams& p_;
  const FlashAttentionArrays& arrays_;
  const int64_t padded_keys_;
  std::vector<float> q_, k_, v_, scores_;
  std::vector<int64_t> pairs_;
  std::vector<float> highest_, total_, out_;
};

}  // namespace

bool AllGatherAttentionCpu(const AllGatherAttentionParams& p, int32_t log_chunk,
                           const FlashAttentionArrays& arrays, const SymmetricView& view,
                           uint64_t epoch, const WaitContext& ctx) {
  const KeyLayout layout = KeyLayout::Make(p, log_chunk);
  Body call{{p, arrays, layout, view, epoch, ctx}, std::vector<int32_t>(view.world)};
  call.Send();
  RunningAttention attention(p, arrays);
  // All blocks of all ranks: so it has waited for all that peers send (core/signal.h).
  const int64_t keys = p.attention.keys;
  for (int step = 0; step < view.world; ++step) {
    const int src = (view.rank + step) % view.world;
    for (int32_t b = 0; b < layout.batch; ++b) {
      const char *k = call.Sequence(src, 0, b), *v = call.Sequence(src, 1, b);
      for (int64_t first = 0; first < keys; first += kBlockKeys) {
        const int64_t rows = std::min(kBlockKeys, keys - first);
        if (!call.Await(src, b, first + rows)) return false;
        attention.Meet(b, src * Padded(keys) + first, rows, k + first * layout.row_bytes,
                       v + first * layout.row_bytes);
      }
    }
  }
  attention.Finish();
  return true;
}

}  // namespace jflux
