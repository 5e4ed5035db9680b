// all_reduce of large data with a quantised wire: chunked (all_reduce_body.h), but what travels is
// values of 8 bits and a float32 scale for each 128 elements (core/quantize.h). A CTA takes the
// same passes over its chunks:
//
//   1. quantise this rank's data of the other ranks' shards, and send them to these
//   2. add the local shard's, dequantised, in rank order, in float32, this rank's own as they are;
//      quantise the sums, and send them to all
//   3. y = dequantised sums, plus the residual, rounded once
//
// The owner takes its sums as it has quantised them, so all ranks have the same bits. A
// reduce-scatter (WirePart) ends in pass 2, with the sums as they are; an all-gather begins there,
// with the rank's own data in place of sums.
//
// A team of lanes of a warp takes consecutive blocks of 128 elements, of which each lane has
// consecutive elements, as Codec says (core/wire.h).
#ifndef JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/wire.h"
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
    const int64_t chunks = layout.chunks;
    const bool scatters = p.part != WirePart::kGather, gathers = p.part != WirePart::kScatter;
    for (int64_t c = ctx.block; scatters && c < chunks; c += ctx.blocks) {
      for (int d = 1; d < p.world; ++d) Send(layout, Peer(d), c);
      Announce(layout, kInputs, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (scatters && !Await(layout, kInputs, c)) return false;
      Sum(layout, c);
      if (gathers) Announce(layout, kSums, c);
    }
    for (int64_t c = ctx.block; gathers && c < chunks; c += ctx.blocks) {
      if (!Await(layout, kSums, c)) return false;
      for (int d = 1; d < p.world; ++d) Receive(layout, Peer(d), c);
    }
    return true;
  }

 private:
  // What a slot holds.
  static constexpr int kInputs = 0, kSums = 1;
  static constexpr int kBlock = static_cast<int>(kWireBlock);
  static constexpr int kCount = kBlock / Codec::kLanes;  // elements of a lane
  static constexpr int kInFlight = Codec::kInFlight;
  static constexpr bool kIsHalf = sizeof(T) == 2;
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
  // In the memory of the rank that the slot is for.
  struct Slot {
    char* values;
    char* scales;
    JFLUX_HD void Store(int block, const uint32_t (&words)[kCount / 4]) const {
      std::memcpy(At(block), words, kCount);
    }
    // Of blocks from `block` on. A slot has room for those that are not there.
    JFLUX_HD void StoreScales(int block, const float (&of)[kInFlight]) const {
      constexpr int kBytes = kInFlight * 4;
      if (Codec::lane() == 0)
        std::memcpy(__builtin_assume_aligned(scales + block * 4, kBytes), of, kBytes);
    }
    JFLUX_HD Values Load(int block) const {
      Values v;
      std::memcpy(v.words, At(block), kCount);
      std::memcpy(&v.scale, scales + block * 4, 4);
      return v;
    }

   private:
    JFLUX_HD char* At(int block) const {
      return static_cast<char*>(
          __builtin_assume_aligned(values + block * kBlock + Codec::lane() * kCount, 16));
    }
  };
  // The rank that comes so many after this one.
  JFLUX_HD int Peer(int d) const {
    const int peer = ctx.view.rank + d;
    return peer < p.world ? peer : peer - p.world;
  }
  JFLUX_HD Slot SlotAt(const WireLayout& layout, int what, int from, int to, int64_t c) const {
    char* slot = shmem::ptr(ctx, ctx.data(layout.SlotOffset(what, from, to, c)), to);
    return Slot{slot, slot + layout.ScaleOffset(0)};
  }

  // A lane's part of a range of an array, from its first element on; `left` are there.
  struct Lane {
    char* first;
    int left;

    // Zeros past the end.
    JFLUX_HD Raw Load(int block) const {
      const char* from = first + block * (kBlock * static_cast<int>(sizeof(T)));
      const int count = left - block * kBlock;
      Raw x;
      if (count >= kCount) {
        std::memcpy(x.value, __builtin_assume_aligned(from, kAlignment), sizeof(x.value));
      } else {
        JFLUX_UNROLL
        for (int i = 0; i < kCount; ++i)
          x.value[i] = i < count ? reinterpret_cast<const T*>(from)[i] : T{};
      }
      return x;
    }
    JFLUX_HD void Store(int block, const Floats& y) const {
      Raw rounded;
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if constexpr (std::is_arithmetic_v<T>) {
          rounded.value[i] = y.value[i];
        } else {
          rounded.value[i] = T::From(y.value[i]);
        }
      }
      char* to = first + block * (kBlock * static_cast<int>(sizeof(T)));
      const int count = left - block * kBlock;
      if (count >= kCount) {
        std::memcpy(__builtin_assume_aligned(to, kAlignment), rounded.value, sizeof(rounded.value));
      } else {
        JFLUX_UNROLL
        for (int i = 0; i < kCount; ++i) {
          if (i < count) reinterpret_cast<T*>(to)[i] = rounded.value[i];
        }
      }
    }
  };
  // `array` begins at element `origin` of all shards, or is null.
  JFLUX_HD Lane LaneOf(const void* array, int64_t origin, const Range& range) const {
    if (array == nullptr) return Lane{nullptr, 0};
    const int at = Codec::lane() * kCount;
    char* base = static_cast<char*>(const_cast<void*>(array));
    return Lane{base + (range.first - origin + at) * int64_t{sizeof(T)},
                static_cast<int>(range.count) - at};
  }
  JFLUX_HD Lane LaneOfX(const WireLayout& layout, const Range& range) const {
    return LaneOf(arrays.x, layout.FirstOfX(ctx.view.rank), range);
  }
  JFLUX_HD Lane LaneOfY(const WireLayout& layout, const Range& range) const {
    return LaneOf(arrays.y, layout.FirstOfY(ctx.view.rank), range);
  }

  // visit(first) for the first one of each kInFlight consecutive blocks that a team takes.
  template <typename Visit>
  static JFLUX_HD void ForBlocks(const Range& range, Visit&& visit) {
    const int team = Block::rank() / Codec::kLanes, teams = Block::size() / Codec::kLanes;
    const auto blocks = static_cast<int>(range.Blocks());
    for (int first = team * kInFlight; first < blocks; first += teams * kInFlight) visit(first);
  }

  static JFLUX_HD Floats FloatsOf(const Raw& x) {
    Floats floats;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i) floats.value[i] = static_cast<float>(x.value[i]);
    return floats;
  }
  // kOf16Bits: x are such numbers.
  template <bool kOf16Bits>
  JFLUX_HD Values Quantized(const Floats& x) const {
    Values v;
    v.scale = QuantizeForWire<Codec, kOf16Bits>(x.value, p.wire, v.words);
    return v;
  }
  JFLUX_HD Floats Dequantized(const Values& v) const {
    Floats x;
    Codec::Dequantize(v.words, v.scale, p.wire, x.value);
    return x;
  }

  // Quantises this rank's data of another rank's shard.
  JFLUX_HD void Send(const WireLayout& layout, int owner, int64_t c) const {
    const Range range = layout.RangeOf(owner, c);
    const Slot slot = SlotAt(layout, kInputs, ctx.view.rank, owner, c);
    const Lane x = LaneOfX(layout, range);
    ForBlocks(range, [&](int first) {
      Raw loaded[kInFlight];
      JFLUX_UNROLL
      for (int i = 0; i < kInFlight; ++i) loaded[i] = x.Load(first + i);
      float scales[kInFlight];
      JFLUX_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const Values v = Quantized<kIsHalf>(FloatsOf(loaded[i]));
        slot.Store(first + i, v.words);
        scales[i] = v.scale;
      }
      slot.StoreScales(first, scales);
    });
  }

  // Adds the local shard's parts, and sends the quantised sums.
  JFLUX_HD void Sum(const WireLayout& layout, int64_t c) const {
    const Range range = layout.RangeOf(ctx.view.rank, c);
    const Lane x = LaneOfX(layout, range), y = LaneOfY(layout, range);
    const Lane residual = LaneOf(arrays.residual, 0, range);
    ForBlocks(range, [&](int first) {
      float scales[kInFlight];
      JFLUX_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const int block = first + i;
        Floats total = FloatsOf(x.Load(block));
        if (p.part != WirePart::kGather) total = SumOf(layout, c, block, total);
        if (p.part == WirePart::kScatter) {
          y.Store(block, total);
          continue;
        }
        const Values sums = Quantized<false>(total);
        scales[i] = sums.scale;
        for (int d = 1; d < p.world; ++d) {
          const int peer = Peer(d);
          SlotAt(layout, kSums, ctx.view.rank, peer, c).Store(block, sums.words);
        }
        y.Store(block, Finished(sums, residual, block));
      }
      if (p.part == WirePart::kScatter) return;
      for (int d = 1; d < p.world; ++d) {
        const int peer = Peer(d);
        SlotAt(layout, kSums, ctx.view.rank, peer, c).StoreScales(first, scales);
      }
    });
  }
  // What came from all ranks, in their order, and this rank's own.
  JFLUX_HD Floats SumOf(const WireLayout& layout, int64_t c, int block, const Floats& own) const {
    constexpr int kAtOnce = 4;  // loads in flight
    Floats total{};
    for (int base = 0; base < p.world; base += kAtOnce) {
      Values parts[kAtOnce];
      JFLUX_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int src = base + i;
        if (src < p.world && src != ctx.view.rank)
          parts[i] = SlotAt(layout, kInputs, src, ctx.view.rank, c).Load(block);
      }
      JFLUX_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int src = base + i;
        if (src >= p.world) continue;
        const Floats part = src == ctx.view.rank ? own : Dequantized(parts[i]);
        JFLUX_UNROLL
        for (int e = 0; e < kCount; ++e)
          total.value[e] = src == 0 ? part.value[e] : total.value[e] + part.value[e];
      }
    }
    return total;
  }

  // Writes the sums of another rank's shard.
  JFLUX_HD void Receive(const WireLayout& layout, int owner, int64_t c) const {
    const Range range = layout.RangeOf(owner, c);
    const Slot slot = SlotAt(layout, kSums, owner, ctx.view.rank, c);
    const Lane y = LaneOfY(layout, range), residual = LaneOf(arrays.residual, 0, range);
    ForBlocks(range, [&](int first) {
      Values loaded[kInFlight];
      JFLUX_UNROLL
      for (int i = 0; i < kInFlight; ++i) loaded[i] = slot.Load(first + i);
      JFLUX_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        y.Store(first + i, Finished(loaded[i], residual, first + i));
      }
    });
  }
  // The sums of a block, and the residual.
  JFLUX_HD Floats Finished(const Values& sums, const Lane& residual, int block) const {
    Floats y = Dequantized(sums);
    if (p.residual) {
      const Floats added = FloatsOf(residual.Load(block));
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i) y.value[i] += added.value[i];
    }
    return y;
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
