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
// A warp takes a block of 128 elements, and each lane consecutive ones. Codec is how: its lanes,
// the largest magnitude of a warp's, and values from floats and back (all_reduce.cu,
// all_reduce_cpu.cc).
#ifndef JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_WIRE_BODY_H_

#include <cstdint>
#include <cstring>

#include "core/packet_sum.h"
#include "core/quantize.h"
#include "core/units.h"
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
      for (int d = 1; d < p.world; ++d) {
        const int owner = (ctx.view.rank + d) % p.world;
        const Range range = layout.RangeOf(owner, c);
        const Slot slot = SlotAt(layout, kInputs, ctx.view.rank, owner, c);
        ForBlocks(range, [&](int64_t block) {
          Floats x = Load(arrays.x, range, block);
          slot.Store(block, Quantized(x));
        });
      }
      Announce(layout, kInputs, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kInputs, c)) return false;
      const Range range = layout.RangeOf(ctx.view.rank, c);
      ForBlocks(range, [&](int64_t block) { Sum(layout, c, range, block); });
      Announce(layout, kSums, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kSums, c)) return false;
      for (int d = 1; d < p.world; ++d) {
        const int owner = (ctx.view.rank + d) % p.world;
        const Range range = layout.RangeOf(owner, c);
        const Slot slot = SlotAt(layout, kSums, owner, ctx.view.rank, c);
        ForBlocks(range, [&](int64_t block) { Finish(range, block, slot.Load(block)); });
      }
    }
    return true;
  }

 private:
  // What a slot holds.
  static constexpr int kInputs = 0, kSums = 1;
  static constexpr int kCount = kWireBlock / Codec::kLanes;  // elements of a lane
  static constexpr int kUnits = kCount / PayloadSum<T>::kCount;
  struct Floats {
    float value[kCount];
  };
  struct Values {
    uint8_t bits[kCount];
    float scale;
  };
  // In the memory of the rank that the slot is for.
  struct Slot {
    char* values;
    char* scales;
    JFLUX_HD void Store(int64_t block, const Values& v) const {
      std::memcpy(At(block), v.bits, kCount);
      if (Codec::lane() == 0) std::memcpy(scales + block * 4, &v.scale, 4);
    }
    JFLUX_HD Values Load(int64_t block) const {
      Values v;
      std::memcpy(v.bits, At(block), kCount);
      std::memcpy(&v.scale, scales + block * 4, 4);
      return v;
    }

   private:
    JFLUX_HD char* At(int64_t block) const {
      return static_cast<char*>(__builtin_assume_aligned(
          values + block * kWireBlock + Codec::lane() * kCount, kCount < 16 ? kCount : 16));
    }
  };

  JFLUX_HD Slot SlotAt(const WireLayout& layout, int what, int from, int to, int64_t c) const {
    char* slot = shmem::ptr(ctx, ctx.data(layout.SlotOffset(what, from, to, c)), to);
    return Slot{slot, slot + layout.ScaleOffset(0)};
  }

  // visit(block) for each of a chunk's, by the warps of the CTA.
  template <typename Visit>
  JFLUX_HD void ForBlocks(const Range& range, Visit&& visit) const {
    const int warps = Block::size() / Codec::kLanes;
    for (int64_t b = Block::rank() / Codec::kLanes; b < range.Blocks(); b += warps) visit(b);
  }

  // The first unit of a lane's elements of a block.
  JFLUX_HD int64_t UnitOf(const Range& range, int64_t block) const {
    return (range.first + block * kWireBlock) / PayloadSum<T>::kCount + Codec::lane() * kUnits;
  }
  // Zeros past the end of the array.
  JFLUX_HD Floats Load(const void* array, const Range& range, int64_t block) const {
    Floats x;
    JFLUX_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      const auto unit = PayloadSum<T>::Of(LoadUnit(array, UnitOf(range, block) + u, p.Bytes()));
      JFLUX_UNROLL
      for (int i = 0; i < PayloadSum<T>::kCount; ++i)
        x.value[u * PayloadSum<T>::kCount + i] = unit.value[i];
    }
    return x;
  }

  JFLUX_HD Values Quantized(const Floats& x) const {
    uint32_t magnitude = 0;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits = BitsOfFloat(x.value[i]) & 0x7fffffff;
      magnitude = bits > magnitude ? bits : magnitude;
    }
    Values v;
    v.scale = ScaleOfBlock(Codec::Max(magnitude), p.wire, /*power_of_two=*/false);
    Codec::template Pack<kCount>(x.value, v.scale, p.wire, v.bits);
    return v;
  }
  JFLUX_HD Floats Dequantized(const Values& v) const {
    Floats x;
    JFLUX_UNROLL
    for (int i = 0; i < kCount; ++i)
      x.value[i] = Codec::Multiply(Codec::Unpack(v.bits[i], p.wire), v.scale);
    return x;
  }

  // Adds a block of the local shard, and sends the quantised sums.
  JFLUX_HD void Sum(const WireLayout& layout, int64_t c, const Range& range, int64_t block) const {
    Values parts[kMaxRanks];
    JFLUX_UNROLL  // independent loads, all in flight
        for (int src = 0; src < kMaxRanks; ++src) {
      if (src < p.world && src != ctx.view.rank)
        parts[src] = SlotAt(layout, kInputs, src, ctx.view.rank, c).Load(block);
    }
    const Floats own = Load(arrays.x, range, block);
    Floats total{};
    JFLUX_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) {
      if (src >= p.world) continue;
      const Floats part = src == ctx.view.rank ? own : Dequantized(parts[src]);
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i)
        total.value[i] = src == 0 ? part.value[i] : total.value[i] + part.value[i];
    }
    const Values sums = Quantized(total);
    for (int d = 1; d < p.world; ++d) {
      const int peer = (ctx.view.rank + d) % p.world;
      SlotAt(layout, kSums, ctx.view.rank, peer, c).Store(block, sums);
    }
    Finish(range, block, sums);
  }

  // Writes a block of y.
  JFLUX_HD void Finish(const Range& range, int64_t block, const Values& sums) const {
    Floats y = Dequantized(sums);
    if (p.residual) {
      const Floats residual = Load(arrays.residual, range, block);
      JFLUX_UNROLL
      for (int i = 0; i < kCount; ++i) y.value[i] += residual.value[i];
    }
    JFLUX_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      PayloadSum<T> unit;
      JFLUX_UNROLL
      for (int i = 0; i < PayloadSum<T>::kCount; ++i)
        unit.value[i] = y.value[u * PayloadSum<T>::kCount + i];
      StoreUnit(arrays.y, UnitOf(range, block) + u, p.Bytes(), unit.Rounded());
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
