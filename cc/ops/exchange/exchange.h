// The exchanges of shards, each of one latency, small data in packets and large in chunks:
//
//   all_gather      each rank's x to all; y has them side by side
//   all_to_all      shard r of each rank's x to rank r; y has what has come side by side
//   reduce_scatter  shard r of each rank's x to rank r; y is their sum
//
// What is computed (Params), where it lies in the heap, and the CPU back end's body; the CUDA
// launcher is in exchange_cuda.h, and what both run in exchange_body.h and chunked_exchange_body.h.
// Python: jflux/_ops/exchange.py.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "core/signal.h"
#include "core/units.h"
#include "jflux/shmem.h"

namespace jflux {

// In chunks: a rank has a slot for the shard of each other one, which comes in parts of chunk_bytes
// (of chunks of all_reduce's sizes: ops/all_reduce/all_reduce.h), each with a signal.
struct ShardSlots {
  int32_t world;
  int64_t shard_bytes, slot_bytes, chunk_bytes;

  JFLUX_HD static ShardSlots For(int32_t world, int64_t shard_bytes) {
    const int64_t chunk_bytes = shard_bytes > (1 << 20) ? 16384 : 4096;
    return ShardSlots{world, shard_bytes, RoundUp<int64_t>(shard_bytes, 16), chunk_bytes};
  }
  JFLUX_HD int64_t Chunks() const { return CeilDiv(shard_bytes, chunk_bytes); }
  JFLUX_HD int64_t BytesOf(int64_t chunk) const {
    return Min(shard_bytes - chunk * chunk_bytes, chunk_bytes);
  }
  // What rank `from` sends rank `to`.
  JFLUX_HD int64_t SlotOffset(int from, int to) const { return Sender(from, to) * slot_bytes; }
  JFLUX_HD int64_t SignalIndex(int from, int to, int64_t chunk) const {
    return Sender(from, to) * Chunks() + chunk;
  }
  WorkspaceLayout Workspace() const {
    return shmem::WorkspaceFor((world - 1) * slot_bytes, (world - 1) * Chunks());
  }

 private:
  JFLUX_HD int64_t Sender(int from, int to) const { return (from - to + world) % world - 1; }
};

struct ExchangeParams {
  OpId op;  // kAllGather, kAllToAll or kReduceScatter
  int32_t world;
  DType dtype;  // of what is summed; the others only move bytes
  Shards x, y;  // of one shard for all of all_gather's x, and reduce_scatter's y
  bool chunked = false;
  JFLUX_HD bool Sums() const { return op == OpId::kReduceScatter; }
  JFLUX_HD int64_t Units() const { return CeilDiv(x.Bytes(), kPacketPayload); }

  uint32_t Signature() const {
    SignatureBuilder signature;
    signature.Add(static_cast<int64_t>(op))
        .Add(world)
        .Add(Sums() ? static_cast<int64_t>(dtype) : 0)
        .Add(chunked);
    for (const Shards& shards : {x, y}) signature.Add(shards.outer).Add(shards.inner);
    return signature.Get();
  }
  PacketLayout Workspace() const { return PacketLayout::For(world * Units()); }  // unless chunked
  JFLUX_HD ShardSlots Slots() const { return ShardSlots::For(world, x.Bytes()); }
  int64_t WorkspaceBytes() const {
    return chunked ? Slots().Workspace().TotalBytes() : Workspace().TotalBytes();
  }
};

struct ExchangeArrays {
  const void* x;  // 8-byte aligned
  void* y;
};

bool ExchangeCpu(const ExchangeParams& params, const ExchangeArrays& arrays,
                 const SymmetricView& view, uint32_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_H_
