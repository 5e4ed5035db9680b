// all_reduce of what is too long for packets, whose flags double it: each rank sums a shard of the
// data and sends the sums to all, in chunks that signals announce.
//
// A block takes every so many-th chunk, and its block of the same place on the other ranks has the
// same ones. It first sends its rank's part of them to their owners, all chunks of it; then sums
// its own, in rank order, as their parts come; then copies the others' sums to y, which XLA owns,
// so that peers cannot write to it. So chunks are on their way while others are summed, and nobody
// waits for anything but what is sent without waiting, or by a block of a lower or the same place.
//
// For a block of a kernel, or the CPU back end's only thread.
#ifndef JFLUX_OPS_ALL_REDUCE_CHUNKED_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_CHUNKED_BODY_H_

#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "jflux/shmem.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T>
struct ChunkedBody {
  using Block = shmem::Block;
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const shmem::Context& ctx;

  // False if a wait failed.
  JFLUX_HD bool Run() const {
    const ChunkedLayout layout = p.Chunks();
    const int64_t chunks = layout.Chunks();
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (ctx.view.rank + d) % p.world;
        const ChunkedLayout::Part part = layout.PartOf(owner, c);
        shmem::internal::Copy<Block>(SlotAt(layout, kParts, ctx.view.rank, owner, c),
                                     static_cast<const char*>(arrays.x) + part.first, part.bytes);
      }
      Announce(layout, kParts, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kParts, c)) return false;
      Sum(layout, c);
      Announce(layout, kSums, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kSums, c)) return false;
      for (int d = 1; d < p.world; ++d) {
        const int owner = (ctx.view.rank + d) % p.world;
        const ChunkedLayout::Part part = layout.PartOf(owner, c);
        shmem::internal::Copy<Block>(static_cast<char*>(arrays.y) + part.first,
                                     SlotAt(layout, kSums, owner, ctx.view.rank, c), part.bytes);
      }
    }
    return true;
  }

 private:
  // What a slot is for.
  static constexpr int kParts = 0, kSums = 1;

  JFLUX_HD char* SlotAt(const ChunkedLayout& layout, int what, int from, int to, int64_t c) const {
    return shmem::ptr(ctx, ctx.data(layout.SlotOffset(what, from, to, c)), to);
  }

  // Tells the others that chunk c of what this rank sends is there.
  JFLUX_HD void Announce(const ChunkedLayout& layout, int what, int64_t c) const {
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int peer = (ctx.view.rank + d) % p.world;
      shmem::signal_set(ctx, ctx.signal(layout.SignalIndex(what, ctx.view.rank, peer, c)), peer);
    }
  }
  JFLUX_HD bool Await(const ChunkedLayout& layout, int what, int64_t c) const {
    bool ok = true;
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (ctx.view.rank + d) % p.world;
      ok &= shmem::signal_wait_until(
          ctx, ctx.signal(layout.SignalIndex(what, src, ctx.view.rank, c)), src);
    }
    return Block::all(ok);
  }

  // Chunk c of the own shard: to y, and to the others.
  JFLUX_HD void Sum(const ChunkedLayout& layout, int64_t c) const {
    const ChunkedLayout::Part own = layout.PartOf(ctx.view.rank, c);
    const int64_t first = own.first / kPacketPayload;
    for (int64_t u = Block::rank(); u * kPacketPayload < own.bytes; u += Block::size()) {
      uint64_t payload[kMaxRanks];
      JFLUX_UNROLL  // loads that are on their way at the same time
          for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= p.world) continue;
        payload[src] = src == ctx.view.rank
                           ? LoadUnit(arrays.x, first + u, p.Bytes())
                           : LoadUnit(SlotAt(layout, kParts, src, ctx.view.rank, c), u, own.bytes);
      }
      const uint64_t residual = p.residual ? LoadUnit(arrays.residual, first + u, p.Bytes()) : 0;
      auto total = PayloadSum<T>::Of(payload[0]);
      JFLUX_UNROLL
      for (int src = 1; src < kMaxRanks; ++src) {
        if (src < p.world) total.Add(PayloadSum<T>::Of(payload[src]));
      }
      if (p.residual) total.Add(PayloadSum<T>::Of(residual));
      const uint64_t sum = total.Rounded();
      StoreUnit(arrays.y, first + u, p.Bytes(), sum);
      for (int d = 1; d < p.world; ++d) {
        const int peer = (ctx.view.rank + d) % p.world;
        StoreUnit(SlotAt(layout, kSums, ctx.view.rank, peer, c), u, own.bytes, sum);
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_CHUNKED_BODY_H_
