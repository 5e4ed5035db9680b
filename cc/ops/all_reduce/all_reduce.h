// all_reduce: y = the sum of all ranks' x, of any shape, on every rank.
//
// What is computed (Params), how, where it lies in the heap, and the CPU back end's body; the CUDA
// launcher is in all_reduce_cuda.h, and what both run in all_reduce_body.h. Python:
// jflux/_ops/all_reduce.py.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "core/signal.h"

namespace jflux {

// In the order of jflux/_ops/all_reduce.py.
enum class AllReduceAlgorithm : int32_t {
  kOneShot = 0,  // all data to all ranks: one latency, (world - 1) times the data
  kTwoShot = 1,  // a reduce-scatter and an all-gather: two latencies, 2 (world - 1) / world times
};
inline constexpr int kAllReduceAlgorithms = 2;

struct AllReduceParams {
  int32_t world;
  int64_t count;  // elements
  DType dtype;
  AllReduceAlgorithm algorithm;

  JFLUX_HD int64_t Bytes() const { return count * SizeOf(dtype); }
  // Payloads of packets; the last one may not be full.
  JFLUX_HD int64_t Units() const { return CeilDiv(Bytes(), kPacketPayload); }
  // Two-shot: those that a rank sums for all (the last ranks may have fewer, or none).
  JFLUX_HD int64_t ShardUnits() const { return CeilDiv<int64_t>(Units(), world); }

  // What a thread of many does is one of these.
  JFLUX_HD int64_t Work() const {
    return algorithm == AllReduceAlgorithm::kOneShot ? Units() : ShardUnits();
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(OpId::kAllReduce))
        .Add(world)
        .Add(count)
        .Add(static_cast<int64_t>(dtype))
        .Add(static_cast<int64_t>(algorithm))
        .Get();
  }
  PacketLayout Channel() const {
    // One-shot: of each source. Two-shot: of each source a part of the own shard, and its sum.
    const int64_t each = algorithm == AllReduceAlgorithm::kOneShot ? Units() : 2 * ShardUnits();
    return PacketLayout::For(world * each);
  }
};

struct AllReduceArrays {
  const void* x;
  void* y;  // as many bytes; both 8-byte aligned
};

// With flags, data are twice as long on the link: beyond that NCCL is faster (docs/design/0006).
inline constexpr int64_t kMostAllReduceBytes = 4 << 20;

// A latency against the bytes that it costs to save it. Of packets, one-shot sends (world - 1)
// times the data, two-shot 2 (world - 1) / world times: (world - 1) (world - 2) / world times
// fewer. The second latency was measured to take 2 us, in which a GPU sends 300 KiB of data in
// packets. Two ranks send as much either way; two-shot was measured to be faster from 4 MiB on.
inline AllReduceAlgorithm ChooseAllReduce(int world, int64_t bytes) {
  constexpr int64_t kLatencyBytes = 300 << 10, kMostOneShot = 2 << 20;
  const bool one =
      bytes <= kMostOneShot && bytes * (world - 1) * (world - 2) <= world * kLatencyBytes;
  return one ? AllReduceAlgorithm::kOneShot : AllReduceAlgorithm::kTwoShot;
}

bool AllReduceCpu(const AllReduceParams& params, const AllReduceArrays& arrays,
                  const SymmetricView& view, uint32_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
