// moe_combine: one block's part of a rank's work. On the CPU the only thread is the block.
//
// For each of its items a block sums what this rank's experts have made of the token of each rank,
// sends it there, and sums what has come of its own token.
//
//   data     of a rank, by source: an image of its own tokens, one row from each rank
//   writes   the source, its own places alone. A rank's own sums take the same way
//   waits    for the sums of the ranks that the own token was sent to. Each sum has a signal, set
//            by the peer's block with the same number
//   order    data, block barrier, signal with release
//   sums     of a rank in the order of slots, in float32, rounded to y's type; of ranks in float32,
//            in the order in which slots name them first
//   reset    never: core/signal.h
//
// A token of which all rows were dropped on a rank gets zeros from there: its own rank does not
// know that they were. Deadlock: a block waits for an item only after it has sent its own items of
// the same number.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_COMBINE_BODY_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_COMBINE_BODY_H_

#include <cstdint>

#include "core/numbers.h"
#include "ops/moe_dispatch/moe_dispatch.h"

namespace jflux {

// The numbers of a vector of 16 bytes, for T of core/numbers.h.
template <typename T>
struct VectorNumbers {
  using Vector = shmem::internal::Vector;
  static constexpr int kSize = 16 / sizeof(T);

  static JFLUX_HD void Unpack(const Vector& vector, float (&numbers)[kSize]) {
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) {
      if constexpr (sizeof(T) == 4) {
        numbers[i] = FloatOfBits(vector.word[i]);
      } else {
        numbers[i] = T{static_cast<uint16_t>(vector.word[i / 2] >> (16 * (i % 2)))};
      }
    }
  }
  static JFLUX_HD Vector Pack(const float (&numbers)[kSize]) {
    Vector vector{};
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) {
      if constexpr (sizeof(T) == 4) {
        vector.word[i] = BitsOfFloat(numbers[i]);
      } else {
        vector.word[i / 2] |= static_cast<uint32_t>(T::From(numbers[i]).bits) << (16 * (i % 2));
      }
    }
    return vector;
  }
};

template <typename Numbers>
struct MoeCombineBody {
  using Block = shmem::Block;
  using Vector = shmem::internal::Vector;
  static constexpr int kSize = Numbers::kSize;
  const MoeCombineParams& p;
  const MoeCombineArrays& arrays;
  const shmem::Context& ctx;
  void* scratch;  // p.ScratchBytes(), the block's

  // False if the call failed.
  JFLUX_HD bool Run() const {
    const int64_t step = ctx.blocks;
    for (int i = 0; i < kItemsAhead; ++i) Send(ctx.block + i * step);
    for (int64_t item = ctx.block; item < p.items.Items(); item += step) {
      Send(item + kItemsAhead * step);
      if (!Receive(item)) return false;
    }
    return true;
  }

 private:
  JFLUX_HD int Rank() const { return ctx.view.rank; }
  // In the scratch: of slot j of the token of rank `src`.
  JFLUX_HD int32_t* RowsOf(int src) const { return static_cast<int32_t*>(scratch) + src * p.slots; }
  JFLUX_HD float* WeightsOf(int src) const {
    return static_cast<float*>(scratch) + (p.world + src) * p.slots;
  }
  JFLUX_HD int32_t* Ranks() const { return static_cast<int32_t*>(scratch) + 2 * p.world * p.slots; }
  // The place of what `src` sends of a token, in this rank's memory.
  JFLUX_HD Vector* ImageOf(int src, int64_t token) const {
    return ctx.data<Vector>(p.RowOffset(src, token));
  }
  // Whether the token of rank `src` was sent to this rank.
  JFLUX_HD bool Came(int src) const {
    bool came = false;
    for (int32_t j = 0; j < p.slots; ++j) came |= RowsOf(src)[j] != ExpertMarks::kNone;
    return came;
  }

  JFLUX_HD void Send(int64_t item) const {
    if (item >= p.items.Items()) return;
    const int64_t token = p.items.Token(item);
    for (int32_t i = Block::rank(); i < p.world * p.slots; i += Block::size()) {
      const int32_t src = i / p.slots;
      const int64_t slot = (src * p.items.tokens + token) * p.slots + i % p.slots;
      RowsOf(0)[i] = arrays.there[slot];
      WeightsOf(0)[i] = arrays.weights[slot];
    }
    Block::sync();
    for (int d = 1; d <= p.world; ++d) {
      const int src = (Rank() + d) % p.world;  // itself last
      if (Came(src)) SendSum(src, token, p.items.Part(item));
    }
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (Rank() + d) % p.world;
      if (Came(src)) {
        shmem::signal_set(ctx, ctx.signal(p.items.Signal(Rank(), item)), src);
      }
    }
    Block::sync();  // the scratch is written again
  }

  JFLUX_HD void SendSum(int src, int64_t token, int32_t part) const {
    constexpr int kInFlight = 4;  // rows that are loaded together
    Vector* image = shmem::ptr(ctx, ImageOf(Rank(), token), src);
    const auto* y = static_cast<const Vector*>(arrays.y);
    const int32_t* rows = RowsOf(src);
    const float* weights = WeightsOf(src);
    for (int64_t v = p.items.First(part) + Block::rank(); v < p.items.First(part + 1);
         v += Block::size()) {
      float sum[kSize] = {};
      for (int32_t j0 = 0; j0 < p.slots; j0 += kInFlight) {
        Vector loaded[kInFlight] = {};
        JFLUX_UNROLL
        for (int b = 0; b < kInFlight; ++b) {
          if (j0 + b < p.slots && IsRow(rows[j0 + b])) {
            loaded[b] = y[rows[j0 + b] * p.items.vectors + v];
          }
        }
        JFLUX_UNROLL
        for (int b = 0; b < kInFlight; ++b) {
          if (j0 + b < p.slots && IsRow(rows[j0 + b])) Add(loaded[b], weights[j0 + b], sum);
        }
      }
      image[v] = Numbers::Pack(sum);
    }
  }
  JFLUX_HD bool IsRow(int32_t row) const { return row >= 0 && row < p.rows; }
  static JFLUX_HD void Add(const Vector& vector, float weight, float (&sum)[kSize]) {
    float numbers[kSize];
    Numbers::Unpack(vector, numbers);
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) sum[i] += weight * numbers[i];
  }

  JFLUX_HD bool Receive(int64_t item) const {
    const int64_t token = p.items.Token(item);
    const int32_t part = p.items.Part(item);
    bool ok = true;
    for (int32_t j = Block::rank(); j < p.slots; j += Block::size()) {
      const int32_t src = arrays.part[token * p.slots + j];
      Ranks()[j] = src;
      if (src < 0 || src == Rank()) continue;
      ok &= shmem::signal_wait_until(ctx, ctx.signal(p.items.Signal(src, item)), src);
    }
    if (!Block::all(ok)) return false;
    for (int64_t v = p.items.First(part) + Block::rank(); v < p.items.First(part + 1);
         v += Block::size()) {
      float sum[kSize] = {};
      for (int32_t j = 0; j < p.slots; ++j) {
        if (Ranks()[j] >= 0) Add(ImageOf(Ranks()[j], token)[v], 1, sum);
      }
      Store(token * p.items.vectors + v, sum);
    }
    Block::sync();  // Ranks() is written again
    return true;
  }

  // Vector `v` of the result.
  JFLUX_HD void Store(int64_t v, const float (&sum)[kSize]) const {
    if (!p.out_f32) {
      static_cast<Vector*>(arrays.out)[v] = Numbers::Pack(sum);
      return;
    }
    Vector* to = static_cast<Vector*>(arrays.out) + v * (kSize / 4);
    JFLUX_UNROLL
    for (int i = 0; i < kSize / 4; ++i) {
      to[i] = Vector{{BitsOfFloat(sum[4 * i]), BitsOfFloat(sum[4 * i + 1]),
                      BitsOfFloat(sum[4 * i + 2]), BitsOfFloat(sum[4 * i + 3])}};
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_COMBINE_BODY_H_
