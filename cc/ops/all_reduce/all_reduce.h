// all_reduce: y = the sum of all ranks' x, of any shape, on every rank. Optionally adds a residual
// to y, normalises y's rows, and quantises these.
//
// The call (Params), the algorithms, their workspace layouts, the CPU back end's body, and the CUDA
// launcher. The bodies that CPU and GPU share: all_reduce_body.h (one-shot, two-shot and chunked),
// butterfly_body.h, norm_body.h, wire_body.h (chunked, of 8 bits on the wire). Python:
// jflux/_ops/collectives/all_reduce.py.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/packet.h"
#include "core/quantize.h"
#include "core/signal.h"
#include "jflux/shmem.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kAllReduceId{3};
inline constexpr OpFormats kAllReduceFormats{kWideFormats};

// Python reads their names from the op's constants (all_reduce_ffi.cc).
enum class AllReduceAlgorithm : int32_t {
  kOneShot = 0,  // all data to all ranks: one latency, (world - 1) times the data
  kTwoShot = 1,  // a reduce-scatter and an all-gather: two latencies, 2 (world - 1) / world times
                 // the data
  // Exchanges between pairs of ranks, for links that do not join all ranks. kHalfButterfly:
  // log2(world) steps and log2(world) times the data. kButterfly: twice the steps and 2 (world - 1)
  // / world times the data.
  kHalfButterfly = 2,
  kButterfly = 3,
  // Two-shot with signals instead of packets: half the bytes, two more fences.
  kChunked = 4,
};
inline constexpr int kAllReduceAlgorithms = 5;
// Whether the algorithm can also normalise rows.
constexpr bool TakesNorm(AllReduceAlgorithm a) {
  return a == AllReduceAlgorithm::kOneShot || a == AllReduceAlgorithm::kTwoShot;
}
JFLUX_HD constexpr bool IsButterfly(AllReduceAlgorithm a) {
  return a == AllReduceAlgorithm::kHalfButterfly || a == AllReduceAlgorithm::kButterfly;
}

// Normalisation of each row of y. Python reads the names from the op's constants.
enum class Norm : int32_t {
  kNone = 0,
  kRms = 1,    // y / sqrt(mean(y^2) + epsilon) * scale
  kLayer = 2,  // (y - mean(y)) / sqrt(variance(y) + epsilon) * scale + bias
};
inline constexpr int kNorms = 3;

// log2 of the largest power of two up to `world`.
JFLUX_HD constexpr int PairingSteps(int world) {
  return world >= 8 ? 3 : world >= 4 ? 2 : world >= 2;
}

// The most units of a row that a norm takes; the kernel's scratch is sized for it (all_reduce.cu).
// In bfloat16, 32768 elements.
inline constexpr int64_t kMostNormUnits = 8192;

// Chunked algorithm: the bytes of each chunk, and the offsets of its slots and signals.
struct ChunkedLayout {
  int32_t world;
  int64_t bytes;        // of x
  int64_t shard_bytes;  // of the shard that a rank sums; the last ranks' may be shorter or empty
  int64_t chunk_bytes;  // larger for large shards: a fence per chunk

  JFLUX_HD static ChunkedLayout For(int32_t world, int64_t bytes) {
    const int64_t shard_bytes = RoundUp<int64_t>(CeilDiv<int64_t>(bytes, world), 16);
    return ChunkedLayout{world, bytes, shard_bytes, shard_bytes > (1 << 20) ? 16384 : 4096};
  }
  JFLUX_HD int64_t Chunks() const { return CeilDiv(shard_bytes, chunk_bytes); }  // of a shard
  // The bytes of x in chunk c of the shard of `owner`.
  struct ByteRange {
    int64_t first, bytes;
  };
  JFLUX_HD ByteRange RangeOf(int owner, int64_t c) const {
    const int64_t first = Min(owner * shard_bytes + c * chunk_bytes, bytes);
    const int64_t end = Min(bytes, owner * shard_bytes + Min((c + 1) * chunk_bytes, shard_bytes));
    return ByteRange{first, Max<int64_t>(0, end - first)};
  }
  // The slot for what rank `from` sends rank `to`: `from`'s data of `to`'s shard (what == 0), or
  // the sums of `from`'s shard (what == 1).
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

// Whose sums may have a quantised wire.
inline constexpr FormatSet kWireSums = SetOf(DType::kBF16, DType::kF16, DType::kF32);

// What of a sum a call with a quantised wire does: all of it; or one half, a reduce-scatter, whose
// y is the local shard, or an all-gather, whose x is. Python reads the names from the op's
// constants.
enum class WirePart : int32_t { kSum = 0, kScatter = 1, kGather = 2 };
inline constexpr int kWireParts = 3;

// The chunked algorithm with a quantised wire: chunks of elements, each a slot of values of 8 bits
// and behind them the float32 scales of its blocks. Shards and chunks are whole blocks, of which
// the last ranks' may be short or empty. Those of a half are all as large, and their last blocks
// may be short.
struct WireLayout {
  int32_t world;
  WirePart part;
  int64_t count;  // of all shards
  int64_t shard;  // elements that a rank sums
  int64_t chunk;
  int64_t chunks;  // of a shard

  JFLUX_HD static WireLayout For(int32_t world, int64_t count, WirePart part) {
    const int64_t even = CeilDiv<int64_t>(count, world);
    const int64_t shard = part == WirePart::kSum ? RoundUp(even, kWireBlock) : even;
    const int64_t chunk = shard > (1 << 19) ? 8192 : 2048;
    return WireLayout{world, part, count, shard, chunk, CeilDiv(shard, chunk)};
  }
  // The elements of all shards in chunk c of that of `owner`.
  struct Range {
    int64_t first, count;
    JFLUX_HD int64_t Blocks() const { return CeilDiv(count, kWireBlock); }
  };
  JFLUX_HD Range RangeOf(int owner, int64_t c) const {
    const int64_t first = Min(owner * shard + c * chunk, count);
    const int64_t end = Min(count, owner * shard + Min((c + 1) * chunk, shard));
    return Range{first, Max<int64_t>(0, end - first)};
  }
  // The element of all shards that is the first one of x, and of y.
  JFLUX_HD int64_t FirstOfX(int rank) const { return part == WirePart::kGather ? rank * shard : 0; }
  JFLUX_HD int64_t FirstOfY(int rank) const {
    return part == WirePart::kScatter ? rank * shard : 0;
  }
  JFLUX_HD int64_t ScaleOffset(int64_t block) const { return chunk + block * 4; }  // in a slot
  JFLUX_HD int64_t SlotBytes() const { return ScaleOffset(chunk / kWireBlock); }
  // As ChunkedLayout's.
  JFLUX_HD int64_t SlotOffset(int what, int from, int to, int64_t c) const {
    return SignalIndex(what, from, to, c) * SlotBytes();
  }
  JFLUX_HD int64_t SignalIndex(int what, int from, int to, int64_t c) const {
    const int first = part == WirePart::kSum ? what : 0;  // a half has slots for one of both
    const int distance = from < to ? from - to + world : from - to;
    return (first * (world - 1) + distance - 1) * chunks + c;
  }
  WorkspaceLayout Workspace() const {
    const int64_t slots = (part == WirePart::kSum ? 2 : 1) * (world - 1) * chunks;
    return shmem::WorkspaceFor(slots * SlotBytes(), slots);
  }
};

struct AllReduceParams {
  int32_t world;
  int64_t count;  // elements
  DType dtype;
  AllReduceAlgorithm algorithm;
  bool residual = false;
  Norm norm = Norm::kNone;  // with a norm: one-shot or two-shot only, and rows of full units
  int64_t width = 0;        // of a row, in elements
  double epsilon = 0;
  // Chunked alone, of types of up to 32 bits: values of this format and scales travel.
  bool has_wire = false;
  DType wire = DType::kF8E4M3FN;
  WirePart part = WirePart::kSum;  // of a half, `count` is that of all shards

  JFLUX_HD int64_t ElementBytes() const { return SizeOf<kWideFormats>(dtype); }
  JFLUX_HD int64_t Bytes() const { return count * ElementBytes(); }
  // 8-byte units (core/units.h); the last may be partial.
  JFLUX_HD int64_t Units() const { return CeilDiv(Bytes(), kPacketPayload); }
  // Two-shot: units that a rank sums. The last ranks may have fewer, or none.
  JFLUX_HD int64_t ShardUnits() const { return CeilDiv<int64_t>(Units(), world); }
  // Packets for an unrounded sum of a unit: sums of 16-bit data are float32.
  JFLUX_HD int64_t SumPackets() const { return ElementBytes() == 2 ? 2 : 1; }
  // Butterfly: units that a rank of the pairing sums.
  JFLUX_HD int64_t PairUnits() const {
    return CeilDiv<int64_t>(Units(), int64_t{1} << PairingSteps(world));
  }

  // With a norm:
  JFLUX_HD int64_t RowUnits() const { return width * ElementBytes() / kPacketPayload; }
  // Whether rows are full units and at most kMostNormUnits long.
  bool FitsNorm() const {
    return width > 0 && count % width == 0 && width * ElementBytes() % kPacketPayload == 0 &&
           RowUnits() <= kMostNormUnits;
  }
  // Bytes of scratch for `units` units of a row: their sums, and scale and bias in the accumulation
  // type.
  JFLUX_HD int64_t NormBytes(int64_t units, bool bias) const {
    return units * (1 + (bias ? 2 : 1) * SumPackets()) * kPacketPayload;
  }
  JFLUX_HD int64_t RowCount() const { return Quotient(count, width); }
  // Two-shot: groups of `world` rows, of which each rank sums one.
  JFLUX_HD int64_t RowGroups() const { return CeilDiv<int64_t>(RowCount(), world); }

  // Work items: units, which threads take; with a norm rows or row groups, which teams of threads
  // take.
  JFLUX_HD int64_t Work() const {
    const bool one = algorithm == AllReduceAlgorithm::kOneShot;
    if (norm != Norm::kNone) return one ? RowCount() : RowGroups();
    if (algorithm == AllReduceAlgorithm::kButterfly) return PairUnits();
    return algorithm == AllReduceAlgorithm::kTwoShot ? ShardUnits() : Units();
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kAllReduceId))
        .Add(world)
        .Add(count)
        .Add(static_cast<int64_t>(dtype))
        .Add(static_cast<int64_t>(algorithm))
        .Add(residual)
        .Add(static_cast<int64_t>(norm))
        .Add(width)
        .Add(has_wire ? static_cast<int64_t>(wire) : -1)
        .Add(static_cast<int64_t>(part))
        .Get();
  }
  int64_t Packets() const {
    const int64_t steps = PairingSteps(world), pairing = int64_t{1} << steps;
    switch (algorithm) {
      case AllReduceAlgorithm::kOneShot:  // from each source
        return world * Units();
      case AllReduceAlgorithm::kTwoShot:  // from each source its data of the local shard, and the
                                          // sums of its shard
        if (norm != Norm::kNone) return 2 * world * RowGroups() * RowUnits();
        return 2 * world * ShardUnits();
      case AllReduceAlgorithm::kHalfButterfly:  // an odd rank's data, the sums of each step, the
                                                // result
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
  JFLUX_HD WireLayout WireChunks() const { return WireLayout::For(world, count, part); }
  // Whether shards begin where lanes can load vectors.
  bool FitsWire() const {
    return part == WirePart::kSum ||
           (count % world == 0 && count / world * ElementBytes() % kVectorBytes == 0);
  }
  int64_t WorkspaceBytes() const {
    if (has_wire) return WireChunks().Workspace().TotalBytes();
    return algorithm == AllReduceAlgorithm::kChunked ? Chunks().Workspace().TotalBytes()
                                                     : Workspace().TotalBytes();
  }
};

// Blocks of a row that is quantised after a norm.
inline constexpr int32_t kQuantizedBlock = 128;

// How normalised rows, of 16 bits, are quantised (core/quantize.h), and where their scales go.
struct QuantizedRows {
  float* scale = nullptr;  // [rows, Blocks(width)]; null: rows are not quantised
  DType values = DType::kF8E4M3FN;
  int32_t block = -1;  // elements that share a scale: kQuantizedBlock, or -1 for all of a row
  bool power_of_two = false;

  JFLUX_HD int64_t Blocks(int64_t width) const {
    return block == -1 ? 1 : CeilDiv<int64_t>(width, kQuantizedBlock);
  }
};

struct AllReduceArrays {
  const void* x;
  void* y;  // as large as x, but of a half; both 8-byte aligned, with a wire on GPUs 16
  const void* residual = nullptr;
  // Only with a norm. scale and bias [width] are float32, or of x's type.
  void* normalised = nullptr;
  const void* scale = nullptr;
  const void* bias = nullptr;
  bool wide_scale = false;       // scale and bias are float32, x is not
  QuantizedRows quantized = {};  // with a scale, `normalised` are values of 8 bits
};

// Above this size NCCL is as fast. Measured on two and four ranks (docs/experiments/0030), guessed
// for others.
inline constexpr int64_t MostAllReduceBytes(int world) { return (world <= 4 ? 16 : 8) << 20; }

// Bytes of x for which a quantised wire is taken. On two H200 it is as fast as exact data at 2 MiB,
// and takes .83 of their time at 4 (docs/experiments/0061).
inline constexpr int64_t kLeastWireBytes = 3 << 20, kMostWireBytes = 128 << 20;

// Trades a latency for bytes.
//
//   one-shot  sends (world - 1) times the data
//   two-shot  sends 2 (world - 1) / world times the data: (world - 1) (world - 2) / world times
//             less; its second latency takes 2 us, in which a GPU sends 300 KiB of data in packets.
//             On two ranks it sends no less
//   chunked   sends half the bytes of packets, and takes 4 us more
inline AllReduceAlgorithm ChooseAllReduce(int world, int64_t bytes) {
  constexpr int64_t kLatencyBytes = 300 << 10, kMostInPackets = 1 << 20;
  if (bytes > kMostInPackets) return AllReduceAlgorithm::kChunked;
  const bool one = bytes * (world - 1) * (world - 2) <= world * kLatencyBytes;
  return one ? AllReduceAlgorithm::kOneShot : AllReduceAlgorithm::kTwoShot;
}

bool AllReduceCpu(const AllReduceParams& params, const AllReduceArrays& arrays,
                  const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// Enqueues the call on `stream`.
bool LaunchAllReduce(const AllReduceParams& params, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error);

// Loads the kernels on the current device.
bool LoadAllReduceKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_H_
