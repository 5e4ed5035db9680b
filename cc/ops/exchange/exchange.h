// all_gather, all_to_all and reduce_scatter, each in one latency: small data in LL packets, large
// data in chunks with signals.
//
//   all_gather      each rank's x to all ranks; y concatenates them
//   all_to_all      shard r of each rank's x to rank r; y concatenates what arrives
//   reduce_scatter  shard r of each rank's x to rank r; y is the sum of what arrives
//
// The call (Params), the workspace layouts, the CPU back end's body, and the CUDA launcher. The
// bodies that CPU and GPU share: exchange_body.h. Python: jflux/_ops/collectives/exchange.py.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/packet.h"
#include "core/signal.h"
#include "core/units.h"
#include "jflux/shmem.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kAllGatherId{4}, kAllToAllId{5}, kReduceScatterId{6};
inline constexpr OpFormats kExchangeFormats{kWideFormats};  // of reduce_scatter

// Chunked: a rank has a slot for the shard from each peer. The shard arrives in chunks of
// chunk_bytes (sizes as in ops/all_reduce/all_reduce.h), each with a signal.
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
  // The slot, on rank `to`, for the shard from rank `from`.
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
  OpId op;  // kAllGatherId, kAllToAllId or kReduceScatterId
  int32_t world;
  DType dtype;  // for reduce_scatter; the others move bytes
  Shards x, y;  // one shard (world 1): all_gather's x, reduce_scatter's y
  bool chunked = false;
  JFLUX_HD bool Sums() const { return op == kReduceScatterId; }
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
                 const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// Enqueues the call on `stream`.
bool LaunchExchange(const ExchangeParams& params, const ExchangeArrays& arrays, int64_t site,
                    const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                    std::string* error);

// Loads the kernels on the current device.
bool LoadExchangeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_H_
