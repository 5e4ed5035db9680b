// all_reduce, one-shot and two-shot: one thread's part of a rank's work. A kernel has many threads;
// the CPU back end has one.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_

#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "jflux/shmem.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T>
struct AllReduceBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(thread, threads)
                                                       : TwoShot(thread, threads);
  }

 private:
  JFLUX_HD bool OneShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units();
    const int rank = call.view.rank;
    for (int64_t u = thread; u < units; u += threads) {
      const uint64_t own = Load(u);
      for (int d = 1; d < p.world; ++d) call.Send((rank + d) % p.world, rank * units + u, own);
    }
    for (int64_t u = thread; u < units; u += threads) {
      uint64_t sum;
      if (!Sum(u, [&](int src) { return src * units + u; }, &sum)) return false;
      Store(u, sum);
    }
    return true;
  }

  JFLUX_HD bool TwoShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units(), shard = p.ShardUnits(), sums = p.world * shard;
    const int rank = call.view.rank;
    const auto size_of = [&](int owner) { return Min(shard, units - owner * shard); };
    for (int64_t u = thread; u < shard; u += threads) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (rank + d) % p.world;
        if (u < size_of(owner)) call.Send(owner, rank * shard + u, Load(owner * shard + u));
      }
    }
    for (int64_t u = thread; u < size_of(rank); u += threads) {
      uint64_t sum;
      if (!Sum(rank * shard + u, [&](int src) { return src * shard + u; }, &sum)) {
        return false;
      }
      for (int d = 1; d < p.world; ++d) {
        call.Send((rank + d) % p.world, sums + rank * shard + u, sum);
      }
      Store(rank * shard + u, sum);
    }
    for (int64_t u = thread; u < shard; u += threads) {
      uint64_t payload[kMaxRanks];
      const auto has = [&](int src) { return u < size_of(src); };
      if (!call.Await(payload, has, [&](int src) { return sums + src * shard + u; })) return false;
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src < p.world && src != rank && has(src)) Store(src * shard + u, payload[src]);
      }
    }
    return true;
  }

  // Sums unit u of x over all ranks, and the residual's.
  template <typename IndexOf>
  JFLUX_HD bool Sum(int64_t u, IndexOf&& index_of, uint64_t* sum) const {
    const uint64_t own = Load(u);
    const uint64_t residual = p.residual ? LoadUnit(arrays.residual, u, p.Bytes()) : 0;
    PayloadSum<T> total;
    if (!SumOverRanks(call, own, index_of, &total)) return false;
    if (p.residual) total.Add(PayloadSum<T>::Of(residual));
    *sum = total.Rounded();
    return true;
  }

  JFLUX_HD uint64_t Load(int64_t unit) const { return LoadUnit(arrays.x, unit, p.Bytes()); }
  JFLUX_HD void Store(int64_t unit, uint64_t payload) const {
    StoreUnit(arrays.y, unit, p.Bytes(), payload);
  }
};

// all_reduce of large data: chunks announced by signals. (Packets would double the bytes.) Each
// rank sums a shard of the data and sends the sums to all.
//
// A CTA (shmem::Block; on the CPU the only thread) takes every ctx.blocks-th chunk. The CTA with
// the same number takes the same chunks on every rank. Three passes:
//
//   1. send this rank's data of all its chunks to the owners
//   2. sum the chunks of the local shard, in rank order, as the data arrives; send the sums
//   3. copy the other shards' sums to y, which XLA owns and peers cannot write to
//
// In this order later chunks are in flight while earlier ones are summed.
//
//   writes  the slots and signals of the peers
//   waits   passes 2 and 3, for the CTA with the same number on the peers
//   order   data, CTA barrier, signal with release
//   reset   never: core/signal.h
//
// Deadlock: pass 1 waits for nothing. A CTA waits only for CTAs with its number, and the lowest
// awaited number is running or next on every rank (gpu/call.cuh).

// Signals all peers that a chunk has been written. index_of(from, to): of the signal between two
// ranks.
template <typename IndexOf>
JFLUX_HD void AnnounceChunk(const shmem::Context& ctx, IndexOf&& index_of) {
  using shmem::Block;
  Block::sync();
  for (int d = 1 + Block::rank(); d < ctx.view.world; d += Block::size()) {
    const int peer = (ctx.view.rank + d) % ctx.view.world;
    shmem::signal_set(ctx, ctx.signal(index_of(ctx.view.rank, peer)), peer);
  }
}
// Waits for a chunk of all peers.
template <typename IndexOf>
JFLUX_HD bool AwaitChunk(const shmem::Context& ctx, IndexOf&& index_of) {
  using shmem::Block;
  bool ok = true;
  for (int d = 1 + Block::rank(); d < ctx.view.world; d += Block::size()) {
    const int src = (ctx.view.rank + d) % ctx.view.world;
    ok &= shmem::signal_wait_until(ctx, ctx.signal(index_of(src, ctx.view.rank)), src);
  }
  return Block::all(ok);
}

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
        const ChunkedLayout::ByteRange range = layout.RangeOf(owner, c);
        shmem::internal::Copy<Block>(SlotAt(layout, kInputs, ctx.view.rank, owner, c),
                                     static_cast<const char*>(arrays.x) + range.first, range.bytes);
      }
      Announce(layout, kInputs, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kInputs, c)) return false;
      Sum(layout, c);
      Announce(layout, kSums, c);
    }
    for (int64_t c = ctx.block; c < chunks; c += ctx.blocks) {
      if (!Await(layout, kSums, c)) return false;
      for (int d = 1; d < p.world; ++d) {
        const int owner = (ctx.view.rank + d) % p.world;
        const ChunkedLayout::ByteRange range = layout.RangeOf(owner, c);
        shmem::internal::Copy<Block>(static_cast<char*>(arrays.y) + range.first,
                                     SlotAt(layout, kSums, owner, ctx.view.rank, c), range.bytes);
      }
    }
    return true;
  }

 private:
  // What a slot holds.
  static constexpr int kInputs = 0, kSums = 1;

  JFLUX_HD char* SlotAt(const ChunkedLayout& layout, int what, int from, int to, int64_t c) const {
    return shmem::ptr(ctx, ctx.data(layout.SlotOffset(what, from, to, c)), to);
  }

  JFLUX_HD void Announce(const ChunkedLayout& layout, int what, int64_t c) const {
    AnnounceChunk(ctx, [&](int from, int to) { return layout.SignalIndex(what, from, to, c); });
  }
  JFLUX_HD bool Await(const ChunkedLayout& layout, int what, int64_t c) const {
    return AwaitChunk(ctx, [&](int from, int to) { return layout.SignalIndex(what, from, to, c); });
  }

  // Sums chunk c of the local shard, into y and the peers' slots.
  JFLUX_HD void Sum(const ChunkedLayout& layout, int64_t c) const {
    const ChunkedLayout::ByteRange local = layout.RangeOf(ctx.view.rank, c);
    const int64_t first = local.first / kPacketPayload;
    for (int64_t u = Block::rank(); u * kPacketPayload < local.bytes; u += Block::size()) {
      uint64_t payload[kMaxRanks];
      JFLUX_UNROLL  // independent loads, all in flight
          for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= p.world) continue;
        payload[src] =
            src == ctx.view.rank
                ? LoadUnit(arrays.x, first + u, p.Bytes())
                : LoadUnit(SlotAt(layout, kInputs, src, ctx.view.rank, c), u, local.bytes);
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
        StoreUnit(SlotAt(layout, kSums, ctx.view.rank, peer, c), u, local.bytes, sum);
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
