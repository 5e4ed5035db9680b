// ragged_all_to_all: slices of rows, whose sizes lie on the device, from every rank to every rank.
// Rows of y that nobody writes keep what they had: y is the argument `output`, in place.
//
//   slice i of K = world * slices * batch goes to rank i / (slices * batch), and belongs to entry
//   i % batch of the arrays [batch][rows][row_bytes]:
//     y of that rank[output_offsets[i] ...] = operand[input_offsets[i] ...], send_sizes[i] rows
//   recv_sizes[i] is the size of slice i of those that this rank receives, by source.
//
// A sender writes a slice to its place in an image of y in the receiver's workspace, from where the
// receiver copies it. So a workspace holds y once, whatever the sizes are. Small data travel in LL
// packets, large data in chunks with signals. docs/internals/ragged.md.
//
// The bodies that CPU and GPU share: ragged_packets_body.h and ragged_chunked_body.h. Python:
// jflux/_ops/collectives/ragged_all_to_all.py.
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_H_

#include <cstdint>
#include <string>

#include "core/packet.h"
#include "core/signal.h"
#include "jflux/shmem.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kRaggedAllToAllId{10};

// The arguments with sizes, as Fault::argument counts them.
enum class RaggedArgument : int32_t {
  kNone,
  kInputOffsets,
  kSendSizes,
  kOutputOffsets,
  kRecvSizes
};
inline constexpr const char* kRaggedArguments[] = {"input_offsets", "send_sizes", "output_offsets",
                                                   "recv_sizes", nullptr};

struct RaggedParams {
  int32_t world;
  int32_t slices;                     // that a rank sends each rank, of each entry of the batch
  int32_t batch;                      // entries
  int64_t operand_rows, output_rows;  // of an entry
  int64_t row_bytes;
  bool chunked = false;

  JFLUX_HD int32_t PerRank() const { return slices * batch; }
  JFLUX_HD int32_t Slices() const { return world * PerRank(); }
  JFLUX_HD int64_t ImageRows() const { return batch * output_rows; }
  JFLUX_HD int64_t ImageBytes() const { return ImageRows() * row_bytes; }

  // Packets: a row begins with a packet of its own.
  JFLUX_HD int64_t RowUnits() const { return CeilDiv(row_bytes, kPacketPayload); }
  PacketLayout Workspace() const { return PacketLayout::For(Slices() + ImageRows() * RowUnits()); }

  // Chunks: all slices from one rank to another, one after the other, cut into ChunkBytes(). This
  // size keeps the signals within the workspace of the image, which has a word for each 4096 bytes,
  // and hides the latencies of a chunk (docs/experiments/0049).
  JFLUX_HD int64_t ChunkBytes() const { return int64_t{8192} * world; }
  JFLUX_HD int64_t MostChunks() const { return CeilDiv(ImageBytes(), ChunkBytes()); }
  JFLUX_HD int64_t SignalsPerRank() const { return kHeaderWords * PerRank() + MostChunks(); }
  WorkspaceLayout ChunkedWorkspace() const {
    return shmem::WorkspaceFor(ImageBytes(), (world - 1) * SignalsPerRank());
  }

  // Tables in a CTA's shared memory (ragged_table.h).
  JFLUX_HD bool HasTables() const { return PerRank() > kFewSlices; }
  JFLUX_HD int32_t TableStep() const { return CeilDiv(PerRank(), kMostEntries / world); }
  JFLUX_HD int32_t TableEntries() const { return CeilDiv(PerRank(), TableStep()); }  // of a rank
  JFLUX_HD int64_t TableWords(int threads) const {
    return HasTables() ? 2 * (world * TableEntries() + 1) + threads : 0;
  }

  int64_t WorkspaceBytes() const {
    return chunked ? ChunkedWorkspace().TotalBytes() : Workspace().TotalBytes();
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kRaggedAllToAllId))
        .Add(world)
        .Add(slices)
        .Add(batch)
        .Add(operand_rows)
        .Add(output_rows)
        .Add(row_bytes)
        .Add(chunked)
        .Get();
  }

  static constexpr int kHeaderWords = 3;  // signals that carry a SliceHeader, 24 bits each
  static constexpr int32_t kFewSlices = 2, kMostEntries = 4096;
};

struct RaggedArrays {
  const void* operand;
  void* y;  // holds `output`
  const int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;
};

// A sender tells the receiver of a slice where the slice lies in the receiver's image, in rows. Or
// it refuses: the sender was given a bad value, and sends nothing to any rank.
struct SliceHeader {
  int32_t to, rows;

  // A bad value: element `index` of an argument.
  static JFLUX_HD SliceHeader Refusal(RaggedArgument argument, int32_t index, int32_t value) {
    return SliceHeader{-1 - (index * 8 + static_cast<int32_t>(argument)), value};
  }
  JFLUX_HD bool Refuses() const { return to < 0; }
  JFLUX_HD int32_t Argument() const { return (-1 - to) % 8; }
  JFLUX_HD int32_t Index() const { return (-1 - to) / 8; }

  JFLUX_HD uint64_t Word() const {
    return static_cast<uint64_t>(static_cast<uint32_t>(to)) << 32 | static_cast<uint32_t>(rows);
  }
  static JFLUX_HD SliceHeader Of(uint64_t word) {
    return SliceHeader{static_cast<int32_t>(word >> 32), static_cast<int32_t>(word)};
  }
};

// The first value that is out of range.
struct BadValue {
  RaggedArgument argument = RaggedArgument::kNone;
  int32_t index = 0, value = 0;
  int64_t most = 0;

  JFLUX_HD bool Found() const { return argument != RaggedArgument::kNone; }
};

// The slices of a call, as one rank sees them. `t` counts the slices from one rank to another.
struct RaggedSlices {
  const RaggedParams& p;
  const RaggedArrays& arrays;

  JFLUX_HD int32_t Index(int peer, int32_t t) const { return peer * p.PerRank() + t; }

  // Slice t for rank `to`: how many rows it has, its first row in operand, and its header.
  JFLUX_HD int64_t SendRows(int to, int32_t t) const { return arrays.send_sizes[Index(to, t)]; }
  JFLUX_HD int64_t From(int to, int32_t t) const {
    return t % p.batch * p.operand_rows + arrays.input_offsets[Index(to, t)];
  }
  JFLUX_HD SliceHeader Header(int to, int32_t t) const {
    const int64_t first = t % p.batch * p.output_rows + arrays.output_offsets[Index(to, t)];
    return SliceHeader{static_cast<int32_t>(first), static_cast<int32_t>(SendRows(to, t))};
  }
  JFLUX_HD int64_t RecvRows(int from, int32_t t) const { return arrays.recv_sizes[Index(from, t)]; }

  // The first bad value among the offsets and sizes of the slices that this rank sends.
  JFLUX_HD BadValue FirstBad() const {
    for (int to = 0; to < p.world; ++to) {
      int64_t left = p.ImageRows();  // slices for one rank do not overlap there
      for (int32_t t = 0; t < p.PerRank(); ++t) {
        const int32_t i = Index(to, t);
        const BadValue bad = BadAt(i, left);
        if (bad.Found()) return bad;
        left -= arrays.send_sizes[i];
      }
    }
    return BadValue{};
  }
  // The bad value of slice i, if it has one. Earlier slices leave the receiver `left` rows.
  JFLUX_HD BadValue BadAt(int32_t i, int64_t left) const {
    const int32_t from = arrays.input_offsets[i], rows = arrays.send_sizes[i],
                  at = arrays.output_offsets[i];
    if (from < 0 || from > p.operand_rows) {
      return BadValue{RaggedArgument::kInputOffsets, i, from, p.operand_rows};
    }
    const int64_t most = Min(Min(p.operand_rows - from, p.output_rows), left);
    if (rows < 0 || rows > most) return BadValue{RaggedArgument::kSendSizes, i, rows, most};
    if (at < 0 || at > p.output_rows - rows) {
      return BadValue{RaggedArgument::kOutputOffsets, i, at, p.output_rows - rows};
    }
    return BadValue{};
  }

  // Whether slice t from `src` is to be received, which has told `header`.
  JFLUX_HD bool Fits(const SliceHeader& header, int src, int32_t t) const {
    // The last two hold unless a wait was skipped (TestHooks::skip_waits).
    return !header.Refuses() && header.rows == RecvRows(src, t) && header.rows >= 0 &&
           int64_t{header.to} + header.rows <= p.ImageRows();
  }
  // Reports why it does not fit.
  JFLUX_HD void Report(const SliceHeader& header, int src, int32_t t,
                       const WaitContext& ctx) const {
    if (header.Refuses()) {
      ReportFault(ctx, FaultKind::kBadValue, src, header.Index(), 0, AsWord(header.rows),
                  header.Argument());
    } else {
      ReportFault(ctx, FaultKind::kUnequal, src, Index(src, t), AsWord(header.rows),
                  AsWord(RecvRows(src, t)), static_cast<int32_t>(RaggedArgument::kRecvSizes));
    }
  }
  JFLUX_HD void Report(const BadValue& bad, const WaitContext& ctx) const {
    ReportFault(ctx, FaultKind::kBadValue, ctx.rank, bad.index, AsWord(bad.most), AsWord(bad.value),
                static_cast<int32_t>(bad.argument));
  }

 private:
  static JFLUX_HD uint64_t AsWord(int64_t value) { return static_cast<uint64_t>(value); }
};

bool RaggedAllToAllCpu(const RaggedParams& params, const RaggedArrays& arrays,
                       const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// Enqueues the call on `stream`.
bool LaunchRaggedAllToAll(const RaggedParams& params, const RaggedArrays& arrays, int64_t site,
                          const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                          std::string* error);

// Loads the kernels on the current device.
bool LoadRaggedAllToAllKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_H_
