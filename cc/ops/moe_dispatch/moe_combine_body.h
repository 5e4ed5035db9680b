// moe_combine: one block's part of a rank's work. On the CPU the only thread is the block, and its
// only warp.
//
// For each of its items a warp sums the rows of this rank's experts for each rank's token, sends
// the sum to that rank, and sums the rows that have come for its own token.
//
//   data     of a rank, by source: an image of its own tokens, one row from each rank
//   writes   the source, its own places alone. A rank's own sums take the same way
//   waits    for the sums of the ranks that the own token was sent to. Each sum has a signal, set
//            by the peer's warp with the same number
//   order    data, barrier of the warp, signal with release
//   sums     of a rank in the order of slots, in float32, rounded to y's type; of ranks in float32,
//            in the order in which slots name them first
//   reset    never: core/signal.h
//
// A rank that has dropped all rows of a token sends zeros for it, since the token's own rank waits
// for that rank and does not know of the drop.
//
// Deadlock: a warp waits for an item only after it has sent its own items of the same number, and
// never for another warp of its block.
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
  using Warp = shmem::Warp;
  using Vector = shmem::internal::Vector;
  static constexpr int kSize = Numbers::kSize;
  const MoeCombineParams& p;
  const MoeCombineArrays& arrays;
  const shmem::Context& ctx;
  void* scratch;  // p.ScratchBytes(), the block's

  // False if the call failed.
  JFLUX_HD bool Run() const {
    constexpr int kItemsAhead = 4;  // items that a warp sends ahead of the one that it waits for
    const auto [first, step] = WarpShare::Of(ctx, WarpOfBlock(), WarpsOfBlock());
    for (int i = 0; i < kItemsAhead; ++i) Send(first + i * step);
    for (int64_t item = first; item < p.items.Items(); item += step) {
      Send(item + kItemsAhead * step);
      if (!Receive(item)) return false;
    }
    return true;
  }

 private:
  JFLUX_HD int Rank() const { return ctx.view.rank; }
  // The warp's scratch memory. RowsOf(src)[j] and WeightsOf(src)[j] are of slot j of src's token.
  JFLUX_HD int32_t* Kept() const {
    return static_cast<int32_t*>(scratch) +
           WarpOfBlock() * MoeCombineParams::WarpWordsFor(p.world, p.slots);
  }
  JFLUX_HD int32_t* RowsOf(int src) const { return Kept() + src * p.slots; }
  JFLUX_HD float* WeightsOf(int src) const {
    return reinterpret_cast<float*>(Kept()) + (p.world + src) * p.slots;
  }
  // While sending, for each rank: how many slots of its token have a row here; kNone if the token
  // was not sent here. While receiving: the ranks of the own token's slots.
  JFLUX_HD int32_t* Counts() const { return Kept() + 2 * p.world * p.slots; }
  JFLUX_HD int32_t* Ranks() const { return Counts(); }
  // Where `src` writes its sum for a token, in this rank's memory.
  JFLUX_HD Vector* ImageOf(int src, int64_t token) const {
    return ctx.data<Vector>(p.RowOffset(src, token));
  }
  JFLUX_HD bool IsRow(int32_t row) const { return row >= 0 && row < p.rows; }

  // Sums and sends an item of all tokens. Called by a warp.
  JFLUX_HD void Send(int64_t item) const {
    if (item >= p.items.Items()) return;
    const int64_t token = p.items.Token(item);
    for (int32_t i = Warp::rank(); i < p.world * p.slots; i += Warp::size()) {
      const int32_t src = i / p.slots;
      const int64_t slot = (src * p.items.tokens + token) * p.slots + i % p.slots;
      RowsOf(0)[i] = arrays.there[slot];
      WeightsOf(0)[i] = arrays.weights[slot];
    }
    Warp::sync();
    for (int src = Warp::rank(); src < p.world; src += Warp::size()) KeepRows(src);
    Warp::sync();
    for (int d = 1; d <= p.world; ++d) {
      const int src = (Rank() + d) % p.world;  // itself last
      if (Counts()[src] >= 0) SendSum(src, token, p.items.Part(item));
    }
    Warp::sync();
    for (int d = 1 + Warp::rank(); d < p.world; d += Warp::size()) {
      const int src = (Rank() + d) % p.world;
      if (Counts()[src] >= 0) {
        shmem::signal_set(ctx, ctx.signal(p.items.Signal(Rank(), item)), src);
      }
    }
    Warp::sync();  // the scratch is written again
  }
  // Moves the slots that have rows to the front, in their order. Called by one thread.
  JFLUX_HD void KeepRows(int src) const {
    int32_t* rows = RowsOf(src);
    float* weights = WeightsOf(src);
    int32_t count = 0;
    bool came = false;
    for (int32_t j = 0; j < p.slots; ++j) {
      came |= rows[j] != ExpertMarks::kNone;
      if (!IsRow(rows[j])) continue;
      rows[count] = rows[j];
      weights[count++] = weights[j];
    }
    Counts()[src] = came ? count : ExpertMarks::kNone;
  }

  JFLUX_HD void SendSum(int src, int64_t token, int32_t part) const {
    Vector* image = shmem::ptr(ctx, ImageOf(Rank(), token), src);
    const auto* y = static_cast<const Vector*>(arrays.y);
    const int32_t* rows = RowsOf(src);
    const float* weights = WeightsOf(src);
    ForSums(
        part, Counts()[src], [&](int32_t j) { return y + rows[j] * p.items.vectors; },
        [&](int32_t j) { return weights[j]; },
        [&](int64_t v, const float (&sum)[kSize]) { image[v] = Numbers::Pack(sum); });
  }

  // Waits for the sums of an item of the own token, and adds them. Called by a warp. False if a
  // wait failed.
  JFLUX_HD bool Receive(int64_t item) const {
    const int64_t token = p.items.Token(item);
    bool ok = true;
    for (int32_t j = Warp::rank(); j < p.slots; j += Warp::size()) {
      const int32_t src = arrays.part[token * p.slots + j];
      Ranks()[j] = src;
      if (src < 0 || src == Rank()) continue;
      ok &= shmem::signal_wait_until(ctx, ctx.signal(p.items.Signal(src, item)), src);
    }
    if (!Warp::all(ok)) return false;
    int32_t count = 0;
    for (int32_t j = 0; j < p.slots; ++j) count += Ranks()[j] >= 0;
    Warp::sync();
    if (Warp::rank() == 0) {
      for (int32_t j = 0, kept = 0; j < p.slots; ++j) {
        if (Ranks()[j] >= 0) Ranks()[kept++] = Ranks()[j];
      }
    }
    Warp::sync();
    ForSums(
        p.items.Part(item), count, [&](int32_t j) { return ImageOf(Ranks()[j], token); },
        [](int32_t) { return 1.0f; },
        [&](int64_t v, const float (&sum)[kSize]) { Store(token * p.items.vectors + v, sum); });
    Warp::sync();  // Ranks() is written again
    return true;
  }

  // For each vector v of an item: store(v, the sum over j < count of weight(j) * row(j)[v]), in the
  // order of j.
  template <typename Row, typename Weight, typename Store>
  JFLUX_HD void ForSums(int32_t part, int32_t count, Row&& row, Weight&& weight,
                        Store&& store) const {
    constexpr int kInFlight = 4;  // rows that are loaded together
    JFLUX_NO_UNROLL
    for (int64_t v = p.items.First(part) + Warp::rank(); v < p.items.First(part + 1);
         v += Warp::size()) {
      float sum[kSize] = {};
      JFLUX_NO_UNROLL
      for (int32_t j0 = 0; j0 < count; j0 += kInFlight) {
        Vector loaded[kInFlight] = {};
        JFLUX_UNROLL
        for (int b = 0; b < kInFlight; ++b) {
          if (j0 + b < count) loaded[b] = row(j0 + b)[v];
        }
        JFLUX_UNROLL
        for (int b = 0; b < kInFlight; ++b) {
          if (j0 + b < count) Add(loaded[b], weight(j0 + b), sum);
        }
      }
      store(v, sum);
    }
  }
  static JFLUX_HD void Add(const Vector& vector, float weight, float (&sum)[kSize]) {
    float numbers[kSize];
    Numbers::Unpack(vector, numbers);
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) sum[i] += weight * numbers[i];
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
