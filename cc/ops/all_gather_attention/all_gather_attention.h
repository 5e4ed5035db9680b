// all_gather_attention: attention of each rank's queries to the keys and values of all ranks.
//
//   q            [B, s, H, D] of this rank
//   k, v         [B, t, G, D] of this rank; head h of q attends to head h / (H / G)
//   out, lse     as flash_attention's (ops/flash_attention/flash_attention.h)
//
// Keys are numbered by rank, each rank's from a multiple of kAttentionPadding on: key j of rank r
// is r Padded(t) + j. So no block of keys is of two ranks. Positions and segments of keys [1 or B,
// N Padded(t)] and the columns of `blocks` [1 or B, blocks of queries, N blocks of keys of a rank]
// are in this order, on every rank.
//
// The call (Params), the layout of its workspace, the CPU back end's body, what a plan for GPUs
// chooses, and the CUDA launcher. Python: jflux/_ops/attention/all_gather_attention.py.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_H_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/signal.h"
#include "gpu/senders.h"
#include "ops/flash_attention/flash_attention.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kAllGatherAttentionId{16};
inline constexpr OpFormats kAllGatherAttentionCpuFormats{
    SetOf(DType::kF16, DType::kBF16, DType::kF32)};

struct AllGatherAttentionParams {
  int32_t world;
  FlashAttentionParams attention;  // keys: of each rank

  // Keys with padding, of all ranks.
  int64_t PaddedKeys() const { return world * Padded(attention.keys); }
  // What ranks must agree on: what travels. Masks and queries are each rank's own.
  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kAllGatherAttentionId))
        .Add(world)
        .Add(attention.batch)
        .Add(attention.keys)
        .Add(attention.groups)
        .Add(attention.width)
        .Add(static_cast<int64_t>(attention.dtype))
        .Get();
  }
};

// A rank's keys and values travel as chunks, each with its own signal: a byte range of one
// sequence's keys, then the same range of its values, then the next range; sequence after sequence.
// In this order the first chunks of a sequence hold its first rows. A half of the workspace has a
// place for each peer: the peer's k, then its v, laid out as in its arrays.
//
//   writes  the rank whose keys they are
//   waits   for the chunks that hold a block's rows, and the chunks before them of the same rank
//   order   the copy completes, then the signal is stored with release at system scope
//   reset   never (core/signal.h)
struct KeyLayout {
  int32_t world, batch;
  int32_t ranges;          // of a sequence
  int32_t log_chunk;       // of bytes
  int64_t row_bytes;       // of a position's keys
  int64_t sequence_bytes;  // of a sequence's keys

  static KeyLayout Make(const AllGatherAttentionParams& p, int32_t log_chunk) {
    const FlashAttentionParams& a = p.attention;
    const int64_t row_bytes = a.groups * a.width * SizeOf(a.dtype);
    const int64_t sequence_bytes = a.keys * row_bytes;
    return KeyLayout{p.world,
                     static_cast<int32_t>(a.batch),
                     static_cast<int32_t>(CeilDiv(sequence_bytes, int64_t{1} << log_chunk)),
                     log_chunk,
                     row_bytes,
                     sequence_bytes};
  }

  // The place of `src` on `rank`.
  JFLUX_HD int32_t SlotOf(int32_t rank, int32_t src) const {
    return (src - rank - 1 + world) % world;
  }

  struct Chunk {
    int32_t tensor;  // 0: keys, 1: values
    int32_t batch;
    int64_t begin, bytes;  // in the sequence
  };
  JFLUX_HD int32_t Chunks() const { return 2 * batch * ranges; }  // of a rank
  JFLUX_HD Chunk ChunkAt(int32_t i) const {
    const int32_t range = i / 2;
    const int64_t begin = static_cast<int64_t>(range % ranges) << log_chunk;
    return Chunk{i % 2, range / ranges, begin,
                 Min(int64_t{1} << log_chunk, sequence_bytes - begin)};
  }
  // The chunks before this one hold the first `rows` positions of a sequence, and the sequences
  // before it.
  JFLUX_HD int32_t ChunksOf(int32_t sequence, int64_t rows) const {
    const int64_t count = (rows * row_bytes + (int64_t{1} << log_chunk) - 1) >> log_chunk;
    return 2 * (sequence * ranges + static_cast<int32_t>(count));
  }

  // Offsets into the signals and into the data of a half, and into a tensor [B, t, G, D].
  JFLUX_HD int64_t SignalOffset(int32_t slot, int32_t chunk) const {
    return (static_cast<int64_t>(slot) * Chunks() + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  // `sequence`: as the workspace's tensor map numbers them.
  JFLUX_HD int32_t SequenceOf(int32_t slot, int32_t tensor, int32_t sequence) const {
    return (2 * slot + tensor) * batch + sequence;
  }
  JFLUX_HD int64_t DataOffset(int32_t slot, const Chunk& c) const {
    return SequenceOf(slot, c.tensor, c.batch) * sequence_bytes + c.begin;
  }
  JFLUX_HD int64_t TensorOffset(const Chunk& c) const { return c.batch * sequence_bytes + c.begin; }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(world - 1, 0),
                                SequenceOf(world - 1, 0, 0) * sequence_bytes);
  }
};

inline constexpr int32_t kCpuLogKeyChunk = 16;

// The CPU back end's body for one rank, of any floating type. Of `arrays`, blocks and order are not
// used. False if a wait failed; ctx.fault has the reason.
bool AllGatherAttentionCpu(const AllGatherAttentionParams& params, int32_t log_chunk,
                           const FlashAttentionArrays& arrays, const SymmetricView& view,
                           uint64_t epoch, const WaitContext& ctx);

// A chunk passes through a send warp's shared memory in four boxes. That many bytes are left beside
// the stages of the widest heads.
inline constexpr int32_t kKeyBoxes = 4, kKeyBoxBytes = 8192;
inline constexpr int32_t kLogKeyChunk = 15;
static_assert(kKeyBoxes * kKeyBoxBytes == 1 << kLogKeyChunk);

inline KeyLayout CudaLayoutOf(const AllGatherAttentionParams& p) {
  return KeyLayout::Make(p, kLogKeyChunk);
}

// The number of CTAs that may send. All CTAs meet blocks of keys at the same pace, so the first
// items of a call need a rank's keys at the rate at which one item meets them. Own keys come first,
// which gives the peers 1 / world of the time as a lead.
//
// A portable CTA does not compute while it sends, with all of its warps. (Its numbers are
// estimates.)
inline int32_t KeySenders(const AllGatherAttentionParams& p, const Machine& machine) {
  const bool portable = machine.arch < kHopperArch;
  // Operations of a multiprocessor in a microsecond. Bytes of a sender in a microsecond.
  const double operations = portable ? 2e6 : 4.2e6, of_sender = portable ? 8e3 : kOfSendWarp;
  constexpr double kQueries = 128;  // of an item
  const auto width = static_cast<double>(p.attention.width);
  const double keys = operations / (4 * kQueries * width);  // that an item meets in a microsecond
  const double bytes = 2 * static_cast<double>(p.attention.groups) * width * 2;  // of a key
  const double rate = keys * bytes * (p.world - 1) / p.world;
  const int32_t sms = machine.sm_count;
  const double least = CeilDiv(sms, portable ? 8 : 3), most = CeilDiv(portable ? sms : 2 * sms, 3);
  const double wanted = Max(least, Min(most, rate / of_sender));
  return static_cast<int32_t>(portable ? Min(wanted, MostSenders(of_sender, machine)) : wanted);
}

// Why no kernel takes the call; empty if one does.
inline std::string WhyNoKernel(const AllGatherAttentionParams& p) {
  const FlashAttentionParams& a = p.attention;
  std::string why = WhyNotFormats(kFlashAttentionFormats, kWgmmaFormats, a.dtype, a.dtype);
  if (!why.empty()) return why;
  if (WidthFor(a.width) == 0) {
    return "the GPU kernels take heads of a multiple of 8 elements, up to 256";
  }
  // Positions of all ranks, and chunks, are counted in 32 bits.
  const double chunks = 2.0 * a.batch * (CudaLayoutOf(p).sequence_bytes >> kLogKeyChunk);
  return p.PaddedKeys() > kFurthest || chunks * p.world > 1 << 29 ? "a dimension is too large" : "";
}

// Enqueues the call on `stream`. `arrays` are those of flash_attention's forward pass.
bool LaunchAllGatherAttention(const AllGatherAttentionParams& params,
                              const FlashAttentionArrays& arrays, int32_t senders, int64_t site,
                              const CudaDevice& device, const SymmetricView& view,
                              cudaStream_t stream, std::string* error);

// The same by a portable kernel.
bool LaunchAllGatherAttention80(const AllGatherAttentionParams& params,
                                const FlashAttentionArrays& arrays, int32_t senders, int64_t site,
                                const CudaDevice& device, const SymmetricView& view,
                                cudaStream_t stream, std::string* error);
bool LoadAllGatherAttentionKernels80(std::string* error);

// The arguments of either kernel that are not those of flash_attention's.
template <typename Args>
void SetGatherArgs(const AllGatherAttentionParams& params, int32_t senders, int64_t site,
                   const CudaDevice& device, const SymmetricView& view, Args* args) {
  const int width = WidthFor(params.attention.width);
  args->padded_keys = static_cast<int32_t>(params.PaddedKeys());
  args->key_blocks = args->padded_keys / BlocksOf(AttentionPass::kForward, width).keys;
  args->key_blocks_of_rank = args->key_blocks / params.world;
  args->state = device.state;
  args->view = view;
  args->signature = SignatureBuilder().Add(params.Signature()).Add(site).Get();
  args->op = static_cast<uint32_t>(kAllGatherAttentionId);
  args->layout = CudaLayoutOf(params);
  args->workspace = args->layout.Workspace();
  args->senders = senders;
}

// Loads the kernels on the current device.
bool LoadAllGatherAttentionKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_H_
