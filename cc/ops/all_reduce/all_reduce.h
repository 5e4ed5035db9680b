// all_reduce: y = the sum of all ranks' x, of any shape, on every rank; and perhaps what follows it
// in a model: a residual added to y, and y's rows normalised.
//
// What is computed (Params), how, where it lies in the heap, and the CPU back end's body; the CUDA
// launcher is in all_reduce_cuda.h, and what both run in the *_body.h: all_reduce_body.h,
// butterfly_body.h (two of the algorithms), chunked_body.h (one), norm_body.h (with rows
// normalised). Python: jflux/_ops/all_reduce.py.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "core/signal.h"
#include "jflux/shmem.h"

namespace jflux {

// In the order of jflux/_ops/all_reduce.py.
enum class AllReduceAlgorithm : int32_t {
  kOneShot = 0,  // all data to all ranks: one latency, (world - 1) times the data
  kTwoShot = 1,  // a reduce-scatter and an all-gather: two latencies, 2 (world - 1) / world times
  // Between pairs of ranks, for links that do not join all of them; log2(world) steps and log2
  // (world) times the data, or twice the steps and 2 (world - 1) / world times.
  kHalfButterfly = 2,
  kButterfly = 3,
  // Two-shot without packets: half as many bytes, and two fences more.
  kChunked = 4,
};
inline constexpr int kAllReduceAlgorithms = 5;
JFLUX_HD constexpr bool IsButterfly(AllReduceAlgorithm a) {
  return a == AllReduceAlgorithm::kHalfButterfly || a == AllReduceAlgorithm::kButterfly;
}

// What is done to each row of y. In the order of jflux/_ops/all_reduce.py.
enum class Norm : int32_t {
  kNone = 0,
  kRms = 1,    // y / sqrt(mean(y^2) + epsilon) * scale
  kLayer = 2,  // (y - mean(y)) / sqrt(variance(y) + epsilon) * scale + bias
};
inline constexpr int kNorms = 3;

// The largest power of two up to `world`, and its logarithm.
JFLUX_HD constexpr int PairingSteps(int world) {
  return world >= 8 ? 3 : world >= 4 ? 2 : world >= 2;
}

// How many units of a row a norm takes, for which a kernel has memory (all_reduce.cu): of bfloat16,
// 32768 elements.
inline constexpr int64_t kMostNormUnits = 8192;

// Chunked: which bytes a chunk has, and where its slots and signals are.
struct ChunkedLayout {
  int32_t world;
  int64_t bytes;        // of x
  int64_t shard_bytes;  // that a rank sums for all; the last ranks may have fewer, or none
  int64_t chunk_bytes;  // more, where a block would have several small ones, and a fence for each

  JFLUX_HD static ChunkedLayout For(int32_t world, int64_t bytes) {
    const int64_t shard_bytes = RoundUp<int64_t>(CeilDiv<int64_t>(bytes, world), 16);
    return ChunkedLayout{world, bytes, shard_bytes, shard_bytes > (1 << 20) ? 16384 : 4096};
  }
  JFLUX_HD int64_t Chunks() const { return CeilDiv(shard_bytes, chunk_bytes); }  // of a shard
  // Of x: chunk c of the shard of `owner`.
  struct Part {
    int64_t first, bytes;
  };
  JFLUX_HD Part PartOf(int owner, int64_t c) const {
    const int64_t first = Min(owner * shard_bytes + c * chunk_bytes, bytes);
    const int64_t end = Min(bytes, owner * shard_bytes + Min((c + 1) * chunk_bytes, shard_bytes));
    return Part{first, Max<int64_t>(0, end - first)};
  }
  // What rank `from` sends rank `to`: its part of the reader's shard (what == 0), or its own
  // shard's sums (1).
  JFLUX_HD int64_t SlotOffset(int what, int from, int to, int64_t c) const {
    return Sender(what, from, to) * shard_bytes + c * chunk_bytes;
  }
  JFLUX_HD int64_t SignalIndex(int what, int from, int to, int64_t c) const {
    return Sender(what, from, to) * Chunks() + c;
  }
  WorkspaceLayout Workspace() const {
    const int64_t senders = 2 * (world - 1);
    return shmem::WorkspaceFor(senders * shard_bytes, senders * Chunks());
  }

 private:
  JFLUX_HD int64_t Sender(int what, int from, int to) const {
    return what * (world - 1) + (from - to + world) % world - 1;
  }
};

struct AllReduceParams {
  int32_t world;
  int64_t count;  // elements
  DType dtype;
  AllReduceAlgorithm algorithm;
  bool residual = false;
  Norm norm = Norm::kNone;  // else one-shot or two-shot, of rows of whole units
  int64_t width = 0;        // of a row, in elements
  double epsilon = 0;

  JFLUX_HD int64_t Bytes() const { return count * SizeOf(dtype); }
  // Payloads of packets; the last one may not be full.
  JFLUX_HD int64_t Units() const { return CeilDiv(Bytes(), kPacketPayload); }
  // Two-shot: those that a rank sums for all (the last ranks may have fewer, or none).
  JFLUX_HD int64_t ShardUnits() const { return CeilDiv<int64_t>(Units(), world); }
  // Packets for the sums of a unit, which are wider than 16-bit data.
  JFLUX_HD int64_t SumPackets() const { return SizeOf(dtype) == 2 ? 2 : 1; }
  // Butterfly: those that a rank of the pairing sums for all.
  JFLUX_HD int64_t PairUnits() const {
    return CeilDiv<int64_t>(Units(), int64_t{1} << PairingSteps(world));
  }

  // With a norm.
  JFLUX_HD int64_t RowUnits() const { return width * SizeOf(dtype) / kPacketPayload; }
  // Whether rows are whole units, and fit into kMostNormBytes.
  bool FitsNorm() const {
    return width > 0 && count % width == 0 && width * SizeOf(dtype) % kPacketPayload == 0 &&
           RowUnits() <= kMostNormUnits;
  }
  // Of scratch for so many units of a row: their sums, and scale and bias as wide numbers.
  JFLUX_HD int64_t NormBytes(int64_t units, bool bias) const {
    return units * (1 + (bias ? 2 : 1) * SumPackets()) * kPacketPayload;
  }
  JFLUX_HD int64_t RowCount() const { return Quotient(count, width); }
  // Two-shot: rows of as many ranks, of which each sums one.
  JFLUX_HD int64_t RowGroups() const { return CeilDiv<int64_t>(RowCount(), world); }

  // What a thread of many does is one of these; with a norm, what a block of threads does.
  JFLUX_HD int64_t Work() const {
    const bool one = algorithm == AllReduceAlgorithm::kOneShot;
    if (norm != Norm::kNone) return one ? RowCount() : RowGroups();
    if (algorithm == AllReduceAlgorithm::kButterfly) return PairUnits();
    return algorithm == AllReduceAlgorithm::kTwoShot ? ShardUnits() : Units();
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(OpId::kAllReduce))
        .Add(world)
        .Add(count)
        .Add(static_cast<int64_t>(dtype))
        .Add(static_cast<int64_t>(algorithm))
        .Add(residual)
        .Add(static_cast<int64_t>(norm))
        .Add(width)
        .Get();
  }
  int64_t Packets() const {
    const int64_t steps = PairingSteps(world), pairing = int64_t{1} << steps;
    switch (algorithm) {
      case AllReduceAlgorithm::kOneShot:  // of each source
        return world * Units();
      case AllReduceAlgorithm::kTwoShot:  // of each source a part of the own shard, and its sum
        if (norm != Norm::kNone) return 2 * world * RowGroups() * RowUnits();
        return 2 * world * ShardUnits();
      case AllReduceAlgorithm::kHalfButterfly:  // an odd rank's data, sums of each step, the result
        return (2 + steps * SumPackets()) * Units();
      case AllReduceAlgorithm::kButterfly:
        return (2 + steps * SumPackets()) * pairing * PairUnits();
      case AllReduceAlgorithm::kChunked:
        break;
    }
    return 0;
  }
  PacketLayout Workspace() const { return PacketLayout::For(Packets()); }  // unless chunked
  JFLUX_HD ChunkedLayout Chunks() const { return ChunkedLayout::For(world, Bytes()); }
  int64_t WorkspaceBytes() const {
    return algorithm == AllReduceAlgorithm::kChunked ? Chunks().Workspace().TotalBytes()
                                                     : Workspace().TotalBytes();
  }
};

struct AllReduceArrays {
  const void* x;
  void* y;  // as many bytes; both 8-byte aligned
  const void* residual = nullptr;
  // With a norm. scale and bias [width] are float32, or of x's type.
  void* normalised = nullptr;
  const void* scale = nullptr;
  const void* bias = nullptr;
  bool wide_scale = false;  // float32 beside a 16-bit x
};

// Beyond that NCCL is about as fast; of more than two ranks that is a prediction
// (docs/design/0006).
inline constexpr int64_t MostAllReduceBytes(int world) { return (world == 2 ? 16 : 8) << 20; }

// A latency against the bytes that it costs to save it. Of packets, one-shot sends (world - 1)
// times the data, two-shot 2 (world - 1) / world times: (world - 1) (world - 2) / world times
// fewer. The second latency was measured to take 2 us, in which a GPU sends 300 KiB of data in
// packets. Two ranks send as much either way. Chunks are half as long as packets, and take 4 us
// more.
inline AllReduceAlgorithm ChooseAllReduce(int world, int64_t bytes) {
  constexpr int64_t kLatencyBytes = 300 << 10, kMostInPackets = 1 << 20;
  if (bytes > kMostInPackets) return AllReduceAlgorithm::kChunked;
  const bool one = bytes * (world - 1) * (world - 2) <= world * kLatencyBytes;
  return one ? AllReduceAlgorithm::kOneShot : AllReduceAlgorithm::kTwoShot;
}

bool AllReduceCpu(const AllReduceParams& params, const AllReduceArrays& arrays,
                  const SymmetricView& view, uint32_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
