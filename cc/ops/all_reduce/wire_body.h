// all_reduce of large data with a quantised wire: chunked (all_reduce_body.h), but what travels is
// values of 8 bits and a float32 scale for each 128 elements (core/quantize.h). A CTA takes the
// same passes over its chunks:
//
//   1. quantise this rank's data of the other ranks' shards, and send them to these
//   2. add the local shard's, dequantised, in rank order, in float32, this rank's own as they are;
//      quantise the sums, and send them to all
//   3. y = dequantised sums, plus the residual, rounded once
//
// The owner takes its sums as it has quantised them, so all ranks have the same bits.
//
// Lanes of a warp share a block of 128 elements, and each has consecutive ones. Codec is how: its
// lanes, how many blocks they have in flight, the largest magnitude of a block, and values from
// floats and back (all_reduce.cu, all_reduce_cpu.cc).
#ifndef JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numbers.h"
#include "jflux/shmem.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/all_reduce/all_reduce_body.h"

namespace jflux {

template <typename T, typename Codec>
struct WireBody {
  using Block = shmem::Block;
  using Range = WireLayout::Range;
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const shmem::Context& ctx;

  // False if a wait failed.
  JFLUX_HD bool Run() const {
    const WireLayout layout = p.WireChunks();
    const int64_t chunks = layout.Chunks();
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      ForPeers<Raw>(
          layout, c,
          [&](int, const Range& range, int block) { return Load(arrays.x, range, block); },
          [&](int owner, const Range&, int block, const Raw& x) {
            SlotAt(layout, kInputs, ctx.view.rank, owner, c)
                .Store(block, Quantized<sizeof(T) == 2>(FloatsOf(x)));
          });
      Announce(layout, kInputs, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kInputs, c)) return false;
      const Range range = layout.RangeOf(ctx.view.rank, c);
      for (int block = Team(); block < range.Blocks(); block += Teams()) {
        Sum(layout, c, range, block);
      }
      Announce(layout, kSums, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kSums, c)) return false;
      ForPeers<Came>(
          layout, c,
          [&](int owner, const Range& range, int block) {
            Came came{SlotAt(layout, kSums, owner, ctx.view.rank, c).Load(block)};
            if (p.residual) came.residual = Load(arrays.residual, range, block);
            return came;
          },
          [&](int, const Range& range, int block, const Came& came) {
            Finish(range, block, came);
          });
    }
    return true;
  }

 private:
  // What a slot holds.
  static constexpr int kInputs = 0, kSums = 1;
  static constexpr int kCount = kWireBlock / Codec::kLanes;  // elements of a lane
  static constexpr int kBytes = kCount * sizeof(T);
  // What arrays are aligned to where a lane's elements begin.
  static constexpr int kAlignment = Codec::kLanes == 1 ? 8 : 16;
  // A lane's elements of a block.
  struct Floats {
    float value[kCount];
  };
  struct alignas(kAlignment) Raw {
    T value[kCount];
  };
  struct Values {
    uint32_t words[kCount / 4];
    float scale;
  };
  struct Came {  // of a peer's shard
    Values sums;
    Raw residual;
  };
  // In the memory of the rank that the slot is for.
  struct Slot {
    char* values;
    char* scales;
    JFLUX_HD void Store(int block, const Values& v) const {
      std::memcpy(At(block), v.words, kCount);
      if (Codec::lane() == 0) std::memcpy(scales + block * 4, &v.scale, 4);
    }
    JFLUX_HD Values Load(int block) const {
      Values v;
      std::memcpy(v.words, At(block), kCount);
      std::memcpy(&v.scale, scales + block * 4, 4);
      return v;
    }

   private:
    JFLUX_HD char* At(int block) const {
      return static_cast<char*>(__builtin_assume_aligned(
          values + block * kWireBlock + Codec::lane() * kCount, kCount < 16 ? kCount : 16));
    }
  };

  JFLUX_HD Slot SlotAt(const WireLayout& layout, int what, int from, int to, int64_t c) const {
    char* slot = shmem::ptr(ctx, ctx.data(layout.SlotOffset(what, from, to, c)), to);
    return Slot{slot, slot + layout.ScaleOffset(0)};
  }

  // Lanes that share a block, among those of the CTA.
  static JFLUX_HD int Team() { return Block::rank() / Codec::kLanes; }
  static JFLUX_HD int Teams() { return Block::size() / Codec::kLanes; }

  // Takes the blocks of chunk c of all other ranks' shards, several in flight:
  // use(owner, range, block, load(owner, range, block)).
  template <typename Loaded, typename LoadBlock, typename Use>
  JFLUX_HD void ForPeers(const WireLayout& layout, int64_t c, LoadBlock&& load, Use&& use) const {
    const auto blocks = static_cast<int>(layout.chunk / kWireBlock), all = (p.world - 1) * blocks;
    for (int first = Team(); first < all; first += Codec::kInFlight * Teams()) {
      Loaded loaded[Codec::kInFlight];
      const auto each = [&](auto&& visit) {
        JFLUX_UNROLL
        for (int i = 0; i < Codec::kInFlight; ++i) {
          const int at = first + i * Teams(), d = 1 + at / blocks, block = at % blocks;
          if (at >= all) continue;
          const int owner = (ctx.view.rank + d) % p.world;
          const Range range = layout.RangeOf(owner, c);
          if (block < range.Blocks()) visit(i, owner, range, block);
        }
      };
      each([&](int i, int owner, const Range& range, int block) {
        loaded[i] = load(owner, range, block);
      });
      each([&](int i, int owner, const Range& range, int block) {
        use(owner, range, block, loaded[i]);
      });
    }
  }

  // A lane's elements of a block that are there.
  struct Place {
    int64_t first;
    int count;
  };
  JFLUX_HD Place PlaceOf(const Range& range, int block) const {
    const int64_t in_chunk = int64_t{block} * kWireBlock + Codec::lane() * kCount;
    const int64_t left = Min<int64_t>(range.count - in_chunk, kCount);
    return Place{range.first + in_chunk, static_cast<int>(Max<int64_t>(left, 0))};
  }
  // Zeros past the end of the range.
  JFLUX_HD Raw Load(const void* array, const Range& range, int block) const {
    const Place place = PlaceOf(range, block);
    const auto* from = static_cast<const char*>(array) + place.first * int64_t{sizeof(T)};
    Raw x;
    if (place.count == kCount) {
      std::memcpy(x.value, __builtin_assume_aligned(from, kAlignment), kBytes);
    } else {
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i)
        x.value[i] = i < place.count ? reinterpret_cast<const T*>(from)[i] : T{};
    }
    return x;
  }
  static JFLUX_HD Floats FloatsOf(const Raw& x) {
    Floats floats;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i) floats.value[i] = static_cast<float>(x.value[i]);
    return floats;
  }

  // kIsHalf: x are numbers of 16 bits.
  template <bool kIsHalf>
  JFLUX_HD Values Quantized(const Floats& x) const {
    uint32_t magnitude = 0;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits = BitsOfFloat(x.value[i]) & 0x7fffffff;
      magnitude = bits > magnitude ? bits : magnitude;
    }
    Values v;
    v.scale = Codec::template Quantize<kIsHalf>(x.value, Codec::Max(magnitude), p.wire, v.words);
    return v;
  }
  JFLUX_HD Floats Dequantized(const Values& v) const {
    Floats x;
    Codec::Dequantize(v.words, v.scale, p.wire, x.value);
    return x;
  }

  // Adds a block of the local shard, and sends the quantised sums.
  JFLUX_HD void Sum(const WireLayout& layout, int64_t c, const Range& range, int block) const {
    Values parts[kMaxRanks];
    JFLUX_UNROLL  // independent loads, all in flight
        for (int src = 0; src < kMaxRanks; ++src) {
      if (src < p.world && src != ctx.view.rank)
        parts[src] = SlotAt(layout, kInputs, src, ctx.view.rank, c).Load(block);
    }
    const Floats own = FloatsOf(Load(arrays.x, range, block));
    Came came;
    if (p.residual) came.residual = Load(arrays.residual, range, block);
    Floats total{};
    JFLUX_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) {
      if (src >= p.world) continue;
      const Floats part = src == ctx.view.rank ? own : Dequantized(parts[src]);
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i)
        total.value[i] = src == 0 ? part.value[i] : total.value[i] + part.value[i];
    }
    came.sums = Quantized<false>(total);
    for (int d = 1; d < p.world; ++d) {
      const int peer = (ctx.view.rank + d) % p.world;
      SlotAt(layout, kSums, ctx.view.rank, peer, c).Store(block, came.sums);
    }
    Finish(range, block, came);
  }

  // Writes a block of y.
  JFLUX_HD void Finish(const Range& range, int block, const Came& came) const {
    Floats y = Dequantized(came.sums);
    if (p.residual) {
      const Floats residual = FloatsOf(came.residual);
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i) y.value[i] += residual.value[i];
    }
    Raw rounded;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_arithmetic_v<T>) {
        rounded.value[i] = y.value[i];
      } else {
        rounded.value[i] = T::From(y.value[i]);
      }
    }
    const Place place = PlaceOf(range, block);
    auto* to = static_cast<char*>(arrays.y) + place.first * int64_t{sizeof(T)};
    if (place.count == kCount) {
      std::memcpy(__builtin_assume_aligned(to, kAlignment), rounded.value, kBytes);
    } else {
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (i < place.count) reinterpret_cast<T*>(to)[i] = rounded.value[i];
      }
    }
  }

  JFLUX_HD void Announce(const WireLayout& layout, int what, int64_t c) const {
    AnnounceChunk(ctx, [&](int from, int to) { return layout.SignalIndex(what, from, to, c); });
  }
  JFLUX_HD bool Await(const WireLayout& layout, int what, int64_t c) const {
    return AwaitChunk(ctx, [&](int from, int to) { return layout.SignalIndex(what, from, to, c); });
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_
