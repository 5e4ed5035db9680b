// moe_combine: one block's part of a rank's work. On the CPU the only thread is the block, and its
// only warp.
//
// For each of its items a warp sums the rows of this rank's experts for each rank's token, sends
// the sum to that rank, and sums the rows that have come for its own token.
//
//   data     of a rank, by source: an image of its own tokens, one row from each rank
//   writes   the source, its own places alone. A rank's own sums take the same way
//   waits    for the sums of the ranks that the own token was sent to. Each sum has a signal, set
//            by the peer's warp with the same number, which is for the sum's scales too
//   order    data, barrier of the warp, signal with release
//   sums     of a rank in the order of slots, in float32, rounded to y's type, or quantised for a
//            wire; of ranks in float32, in the order in which slots name them first
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
#include <cstring>
#include <type_traits>

#include "core/numbers.h"
#include "core/wire.h"
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

// How a combine without a wire has its sums travel.
struct NoCodec {
  static constexpr int kLanes = 1;
};

// Codec: of a wire (core/wire.h), or NoCodec.
template <typename Numbers, typename Codec = NoCodec>
struct MoeCombineBody {
  using Warp = shmem::Warp;
  using Vector = shmem::internal::Vector;
  static constexpr int kSize = Numbers::kSize;
  static constexpr bool kHasWire = !std::is_same_v<Codec, NoCodec>;
  const MoeCombineParams& p;
  const MoeCombineArrays& arrays;
  const shmem::Context& ctx;
  void* scratch;  // p.ScratchBytes(), the block's

  // False if the call failed.
  JFLUX_HD bool Run() const {
    constexpr int kItemsAhead = 4;  // items that a warp sends ahead of the one that it waits for
    const auto [first, step] = WarpShare::Of(ctx, WarpOfBlock(), WarpsOfBlock());
    for (int64_t item = first - kItemsAhead * step; item < p.items.Items(); item += step) {
      Send(item + kItemsAhead * step);
      if (item >= first && !Receive(item)) return false;
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
  JFLUX_HD char* ImageOf(int src, int64_t token) const {
    return ctx.data<char>(p.RowOffset(src, token));
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
    char* image = shmem::ptr(ctx, ImageOf(Rank(), token), src);
    const auto* y = static_cast<const Vector*>(arrays.y);
    const int32_t* rows = RowsOf(src);
    const float* weights = WeightsOf(src);
    const auto row = [&](int32_t j) { return y + rows[j] * p.items.vectors; };
    if constexpr (kHasWire) {
      ForBlocks(part, [&](int32_t block) {
        float sum[kCount] = {};
        ForLoaded<Max(1, 4 / kLaneVectors)>(
            Counts()[src], [&](int32_t j) { return LoadVectors(row(j), block); },
            [&](const Vectors& x, int32_t j) {
              JFLUX_UNROLL
              for (int i = 0; i < kLaneVectors; ++i) Add(x.vector[i], weights[j], sum + i * kSize);
            });
        Quantised values;
        values.scale = QuantizeForWire<Codec, false>(sum, p.wire, values.words);
        StoreValues(image, block, values);
      });
    } else {
      ForVectors(part, [&](int64_t v) {
        float sum[kSize] = {};
        ForLoaded<4>(
            Counts()[src], [&](int32_t j) { return row(j)[v]; },
            [&](const Vector& x, int32_t j) { Add(x, weights[j], sum); });
        reinterpret_cast<Vector*>(image)[v] = Numbers::Pack(sum);
      });
    }
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
    const int32_t part = p.items.Part(item);
    if constexpr (kHasWire) {
      ForBlocks(part, [&](int32_t block) {
        float sum[kCount] = {};
        ForLoaded<2>(
            count, [&](int32_t j) { return LoadValues(ImageOf(Ranks()[j], token), block); },
            [&](const Quantised& values, int32_t) {
              float x[kCount];
              Codec::Dequantize(values.words, values.scale, p.wire, x);
              JFLUX_UNROLL
              for (int i = 0; i < kCount; ++i) sum[i] += x[i];
            });
        JFLUX_UNROLL
        for (int i = 0; i < kLaneVectors; ++i) {
          const int64_t v = FirstVector(block) + i;
          if (v < p.items.vectors) Store(token * p.items.vectors + v, sum + i * kSize);
        }
      });
    } else {
      ForVectors(part, [&](int64_t v) {
        float sum[kSize] = {};
        ForLoaded<4>(
            count,
            [&](int32_t j) {
              return reinterpret_cast<const Vector*>(ImageOf(Ranks()[j], token))[v];
            },
            [&](const Vector& x, int32_t) { Add(x, 1.0f, sum); });
        Store(token * p.items.vectors + v, sum);
      });
    }
    Warp::sync();  // Ranks() is written again
    return true;
  }

  // visit(v) for each vector v of an item.
  template <typename Visit>
  JFLUX_HD void ForVectors(int32_t part, Visit&& visit) const {
    JFLUX_NO_UNROLL
    for (int64_t v = p.items.First(part) + Warp::rank(); v < p.items.First(part + 1);
         v += Warp::size()) {
      visit(v);
    }
  }
  // add(load(j), j) for each j < count, in the order of j. So many are loaded together.
  template <int kInFlight, typename Load, typename Add>
  static JFLUX_HD void ForLoaded(int32_t count, Load&& load, Add&& add) {
    JFLUX_NO_UNROLL
    for (int32_t j0 = 0; j0 < count; j0 += kInFlight) {
      decltype(load(0)) loaded[kInFlight] = {};
      JFLUX_UNROLL
      for (int b = 0; b < kInFlight; ++b) {
        if (j0 + b < count) loaded[b] = load(j0 + b);
      }
      JFLUX_UNROLL
      for (int b = 0; b < kInFlight; ++b) {
        if (j0 + b < count) add(loaded[b], j0 + b);
      }
    }
  }
  // To kSize sums.
  static JFLUX_HD void Add(const Vector& vector, float weight, float* sum) {
    float numbers[kSize];
    Numbers::Unpack(vector, numbers);
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) sum[i] += weight * numbers[i];
  }

  // Vector `v` of the result.
  JFLUX_HD void Store(int64_t v, const float* sum) const {
    float numbers[kSize];
    JFLUX_UNROLL
    for (int i = 0; i < kSize; ++i) numbers[i] = sum[i];
    if (!p.out_f32) {
      static_cast<Vector*>(arrays.out)[v] = Numbers::Pack(numbers);
      return;
    }
    Vector* to = static_cast<Vector*>(arrays.out) + v * (kSize / 4);
    JFLUX_UNROLL
    for (int i = 0; i < kSize / 4; ++i) {
      to[i] = Vector{{BitsOfFloat(numbers[4 * i]), BitsOfFloat(numbers[4 * i + 1]),
                      BitsOfFloat(numbers[4 * i + 2]), BitsOfFloat(numbers[4 * i + 3])}};
    }
  }

  // ---- With a wire ------------------------------------------------------------------------------

  static constexpr int kBlock = static_cast<int>(kWireBlock);
  static constexpr int kCount = kBlock / Codec::kLanes;  // elements of a lane
  static constexpr int kLaneVectors = kCount / kSize;
  struct Vectors {
    Vector vector[kLaneVectors];
  };
  struct Quantised {
    uint32_t words[kCount / 4];
    float scale;
  };

  // visit(block) for each block of an item that the lane's team has.
  template <typename Visit>
  JFLUX_HD void ForBlocks(int32_t part, Visit&& visit) const {
    const int team = Warp::rank() / Codec::kLanes, teams = Max(1, Warp::size() / Codec::kLanes);
    const int32_t end = p.FirstBlock(part + 1);
    JFLUX_NO_UNROLL
    for (int32_t block = p.FirstBlock(part) + team; block < end; block += teams) visit(block);
  }
  // The lane's values of a block, of 8 bits, and vectors of the same elements of a row.
  static JFLUX_HD int64_t ValueOffset(int32_t block) {
    return int64_t{block} * kBlock + Codec::lane() * kCount;
  }
  static JFLUX_HD int64_t FirstVector(int32_t block) { return ValueOffset(block) / kSize; }
  // Zeros past the row's end.
  JFLUX_HD Vectors LoadVectors(const Vector* row, int32_t block) const {
    const int64_t first = FirstVector(block);
    Vectors x = {};
    JFLUX_UNROLL
    for (int i = 0; i < kLaneVectors; ++i) {
      if (first + i < p.items.vectors) x.vector[i] = row[first + i];
    }
    return x;
  }
  JFLUX_HD void StoreValues(char* image, int32_t block, const Quantised& values) const {
    std::memcpy(__builtin_assume_aligned(image + ValueOffset(block), 16), values.words, kCount);
    if (Codec::lane() == 0) {
      std::memcpy(__builtin_assume_aligned(image + p.ScaleOffset(block), 4), &values.scale, 4);
    }
  }
  JFLUX_HD Quantised LoadValues(const char* image, int32_t block) const {
    Quantised values;
    std::memcpy(values.words, __builtin_assume_aligned(image + ValueOffset(block), 16), kCount);
    std::memcpy(&values.scale, __builtin_assume_aligned(image + p.ScaleOffset(block), 4), 4);
    return values;
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_COMBINE_BODY_H_
