// The exchanges in LL packets: one thread's part of a rank's work. A kernel has many threads; the
// CPU back end has one.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_

#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "jflux/shmem.h"
#include "ops/exchange/exchange.h"

namespace jflux {

// T: the type that reduce_scatter sums.
template <typename T>
struct ExchangeBody {
  const ExchangeParams& p;
  const ExchangeArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units();
    const int rank = call.view.rank;
    for (int64_t u = thread; u < units; u += threads) {
      uint64_t shard = ShardFor(rank, u);
      for (int d = 1; d < p.world; ++d) {
        const int peer = (rank + d) % p.world;
        if (p.op != kAllGatherId) shard = ShardFor(peer, u);
        call.Send(peer, rank * units + u, shard);
      }
    }
    for (int64_t u = thread; u < units; u += threads) {
      const uint64_t own = ShardFor(rank, u);
      const auto index_of = [&](int src) { return src * units + u; };
      if (p.Sums()) {
        PayloadSum<T> total;
        if (!SumOverRanks(call, own, index_of, &total)) return false;
        p.y.Store(arrays.y, 0, u, total.Rounded());
        continue;
      }
      p.y.Store(arrays.y, rank, u, own);
      uint64_t payload[kMaxRanks];
      if (!call.Await(payload, [](int) { return true; }, index_of)) return false;
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src < p.world && src != rank) p.y.Store(arrays.y, src, u, payload[src]);
      }
    }
    return true;
  }

 private:
  // Unit u of the shard for `rank`.
  JFLUX_HD uint64_t ShardFor(int rank, int64_t u) const {
    return p.x.Load(arrays.x, p.op == kAllGatherId ? 0 : rank, u);
  }
};

// Exchanges of large data: chunks announced by signals. (Packets would double the bytes.) A rank
// writes each peer's shard, chunk by chunk, into the peer's slot, followed by a signal. It copies
// what arrives to y, or sums it in rank order.
//
// A CTA (shmem::Block; on the CPU the only thread) takes every ctx.blocks-th chunk. The CTA with
// the same number takes the same chunks on every rank. It sends two chunks ahead of the chunk it
// waits for, so that chunk has usually arrived.
//
//   writes  the peers' slots and signals
//   waits   for the CTA with the same number on each peer
//   order   data, CTA barrier, signal with release
//   reset   never: core/signal.h
//
// Deadlock: a CTA waits for a chunk only after it has sent its own chunk of the same number.

// Shard `number` of an array.
template <typename Byte>
struct ShardOf {
  Byte* array;
  Shards shards;
  int number;

  JFLUX_HD bool IsContiguous() const { return shards.outer == 1 || shards.world == 1; }
  JFLUX_HD bool HasVectors() const {
    return shards.inner % 16 == 0 && reinterpret_cast<uintptr_t>(array) % 16 == 0;
  }
  JFLUX_HD Byte* At(int64_t byte) const {
    if (IsContiguous()) return array + shards.Offset(number, 0, 0) + byte;
    const int64_t o = Quotient(byte, shards.inner);
    return array + shards.Offset(number, o, byte - o * shards.inner);
  }
};

// Copies `bytes` bytes of a shard, from byte `first` on. `first` is a multiple of 16.
template <typename Block>
JFLUX_HD void CopyShard(const ShardOf<char>& to, const ShardOf<const char>& from, int64_t first,
                        int64_t bytes) {
  using shmem::internal::Vector;
  if (to.IsContiguous() && from.IsContiguous()) {
    return shmem::internal::Copy<Block>(to.At(first), from.At(first), bytes);
  }
  if (!to.HasVectors() || !from.HasVectors()) {
    for (int64_t u = Block::rank(); u * kPacketPayload < bytes; u += Block::size()) {
      const int64_t unit = first / kPacketPayload + u;
      to.shards.Store(to.array, to.number, unit, from.shards.Load(from.array, from.number, unit));
    }
    return;
  }
  constexpr int kInFlight = 4;  // loads in flight
  const int64_t vectors = bytes / 16, step = Block::size();
  JFLUX_NO_UNROLL
  for (int64_t v = Block::rank(); v < vectors; v += kInFlight * step) {
    Vector loaded[kInFlight];
    JFLUX_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (v + i * step >= vectors) continue;
      loaded[i] = *reinterpret_cast<const Vector*>(from.At(first + 16 * (v + i * step)));
    }
    JFLUX_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (v + i * step >= vectors) continue;
      *reinterpret_cast<Vector*>(to.At(first + 16 * (v + i * step))) = loaded[i];
    }
  }
}

struct alignas(16) [[gnu::may_alias]] TwoUnits {
  uint64_t unit[2];
};

// T: the type that reduce_scatter sums.
template <typename T>
struct ChunkedExchangeBody {
  using Block = shmem::Block;
  const ExchangeParams& p;
  const ExchangeArrays& arrays;
  const shmem::Context& ctx;

  // False if a wait failed.
  JFLUX_HD bool Run() const {
    constexpr int kAhead = 2;  // chunks
    const ShardSlots slots = p.Slots();
    const int64_t chunks = slots.Chunks(), ahead = static_cast<int64_t>(kAhead) * ctx.blocks;
    for (int64_t c = ctx.block; c < chunks + ahead; c += ctx.blocks) {
      if (c < chunks) Send(slots, c);
      if (c >= ahead && !Receive(slots, c - ahead)) return false;
    }
    return true;
  }

 private:
  JFLUX_HD ShardOf<const char> OfX(int rank) const {
    return {static_cast<const char*>(arrays.x), p.x, p.op == kAllGatherId ? 0 : rank};
  }
  JFLUX_HD ShardOf<char> OfY(int rank) const {
    return {static_cast<char*>(arrays.y), p.y, p.Sums() ? 0 : rank};
  }
  JFLUX_HD char* SlotAt(const ShardSlots& slots, int from, int to) const {
    return shmem::ptr(ctx, ctx.data(slots.SlotOffset(from, to)), to);
  }
  JFLUX_HD Shards OfSlot(const ShardSlots& slots) const { return Shards{1, 1, slots.slot_bytes}; }

  JFLUX_HD void Send(const ShardSlots& slots, int64_t c) const {
    const int rank = ctx.view.rank;
    const int64_t first = c * slots.chunk_bytes, bytes = slots.BytesOf(c);
    for (int d = 1; d < p.world; ++d) {
      const int peer = (rank + d) % p.world;
      const ShardOf<char> slot{SlotAt(slots, rank, peer), OfSlot(slots), 0};
      CopyShard<Block>(slot, OfX(peer), first, bytes);
    }
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int peer = (rank + d) % p.world;
      shmem::signal_set(ctx, ctx.signal(slots.SignalIndex(rank, peer, c)), peer);
    }
    if (!p.Sums()) CopyShard<Block>(OfY(rank), OfX(rank), first, bytes);
  }

  JFLUX_HD bool Receive(const ShardSlots& slots, int64_t c) const {
    const int rank = ctx.view.rank;
    bool ok = true;
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (rank + d) % p.world;
      ok &= shmem::signal_wait_until(ctx, ctx.signal(slots.SignalIndex(src, rank, c)), src);
    }
    if (!Block::all(ok)) return false;
    const int64_t first = c * slots.chunk_bytes, bytes = slots.BytesOf(c);
    if (p.Sums()) {
      Sum(slots, first, bytes);
      return true;
    }
    for (int d = 1; d < p.world; ++d) {
      const int src = (rank + d) % p.world;
      const ShardOf<const char> slot{SlotAt(slots, src, rank), OfSlot(slots), 0};
      CopyShard<Block>(OfY(src), slot, first, bytes);
    }
    return true;
  }

  JFLUX_HD void Sum(const ShardSlots& slots, int64_t first, int64_t bytes) const {
    if (OfX(0).HasVectors() && OfY(0).HasVectors()) return SumVectors(slots, first, bytes);
    const int rank = ctx.view.rank;
    const int64_t end = CeilDiv<int64_t>(first + bytes, kPacketPayload);
    for (int64_t u = first / kPacketPayload + Block::rank(); u < end; u += Block::size()) {
      uint64_t payload[kMaxRanks];
      JFLUX_UNROLL  // independent loads, all in flight
          for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= p.world) continue;
        payload[src] = src == rank ? p.x.Load(arrays.x, rank, u)
                                   : LoadUnit(SlotAt(slots, src, rank), u, slots.slot_bytes);
      }
      p.y.Store(arrays.y, 0, u, Total(payload));
    }
  }

  JFLUX_HD void SumVectors(const ShardSlots& slots, int64_t first, int64_t bytes) const {
    const int rank = ctx.view.rank;
    for (int64_t at = first + 16 * Block::rank(); at < first + bytes; at += 16 * Block::size()) {
      uint64_t low[kMaxRanks], high[kMaxRanks];
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= p.world) continue;
        const char* from = src == rank ? OfX(rank).At(at) : SlotAt(slots, src, rank) + at;
        const TwoUnits both = *reinterpret_cast<const TwoUnits*>(from);
        low[src] = both.unit[0];
        high[src] = both.unit[1];
      }
      *reinterpret_cast<TwoUnits*>(OfY(0).At(at)) = TwoUnits{{Total(low), Total(high)}};
    }
  }

  // The sum of one unit over ranks.
  JFLUX_HD uint64_t Total(const uint64_t (&payload)[kMaxRanks]) const {
    auto total = PayloadSum<T>::Of(payload[0]);
    JFLUX_UNROLL
    for (int src = 1; src < kMaxRanks; ++src) {
      if (src < p.world) total.Add(PayloadSum<T>::Of(payload[src]));
    }
    return total.Rounded();
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_
