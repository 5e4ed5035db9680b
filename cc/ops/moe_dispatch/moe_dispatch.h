// moe_dispatch and moe_combine: tokens to the ranks of their experts, and back, each in one kernel.
//
// A rank has `tokens` tokens and `experts` experts, from expert r * experts on for rank r. A token
// has `slots` choices. Its row goes once to each rank that has one of its experts, to a place there
// that no other token has. So rows leave before any rank knows what the others send.
//
//   dispatch   rows[r] = x of rank src[t], for each row r of an expert, in the order of
//              (expert, src, t); zeros where no token has the row, or past the last expert's rows
//              nothing (MoeDispatchParams::fill)
//              Rows may have scales, which travel with them
//   combine    out[t] = the sum over ranks of their sums. A rank's sum is that of w * y over the
//              token's slots there, rounded to y's type; with a wire, quantised in blocks of 128
//              elements, whose scales lie behind the values
//
// The bodies that CPU and GPU share: moe_dispatch_body.h and moe_combine_body.h.
// docs/decisions/0039-tokens-have-places.md. Python: jflux/_ops/experts/_dispatch_primitives.py.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/platform.h"
#include "core/quantize.h"
#include "core/signal.h"
#include "gpu/machine.h"
#include "jflux/shmem.h"
#include "ops/moe_dispatch/expert_marks.h"
#include "runtime/cuda_device.h"

namespace jflux {

// The number of this warp among the warps of its block, and how many there are.
JFLUX_HD int WarpOfBlock() { return shmem::Block::rank() / shmem::Warp::size(); }
JFLUX_HD int WarpsOfBlock() { return shmem::Block::size() / shmem::Warp::size(); }

// The items of a warp: first, first + step, ...
struct WarpShare {
  int64_t first, step;

  // The share of warp `warp` of `warps` in each block. Consecutive items belong to different
  // blocks, so that few items use all SMs.
  static JFLUX_HD WarpShare Of(const shmem::Context& ctx, int warp, int warps) {
    return WarpShare{ctx.block + int64_t{ctx.blocks} * warp, int64_t{ctx.blocks} * warps};
  }
};

// The items of a dispatch and a combine: a token's row, or a part of it where a rank has so few
// tokens that warps would have nothing to do. Item i of a rank concerns its token i / parts, and on
// all ranks the block that has item i has all items i.
struct TokenParts {
  int64_t tokens;   // of a rank
  int64_t vectors;  // of 16 bytes, of a row
  int32_t parts;    // of a row

  JFLUX_HD int64_t Items() const { return tokens * parts; }
  JFLUX_HD int64_t Token(int64_t item) const { return Quotient(item, parts); }
  JFLUX_HD int32_t Part(int64_t item) const { return static_cast<int32_t>(Remainder(item, parts)); }
  // The vectors of an item: from First(part) on, before First(part + 1).
  JFLUX_HD int64_t First(int32_t part) const { return Quotient(vectors * part, parts); }

  // The item's signal, of those that rank `src` sets.
  JFLUX_HD int64_t Signal(int src, int64_t item) const { return src * Items() + item; }

  static constexpr int32_t kMostParts = 8;

  // Parts that give `warps` warps an item each, if a part has at least two vectors for each thread
  // (an estimate); at most `most`.
  static int32_t PartsFor(int64_t tokens, int64_t vectors, int64_t warps,
                          int32_t most = kMostParts) {
    constexpr int64_t kLeastVectors = 64;
    int32_t parts = 1;
    while (parts * 2 <= most && tokens * parts * 2 <= warps &&
           vectors >= kLeastVectors * parts * 2) {
      parts *= 2;
    }
    return parts;
  }
};

inline constexpr OpId kMoeDispatchId{12}, kMoeCombineId{13};
inline constexpr OpFormats kMoeCombineFormats{SetOf(DType::kF16, DType::kBF16, DType::kF32)};

// Warps of a CTA. A dispatch's CTA has tables that may fill an SM's shared memory, so it has all
// the warps that fit.
inline constexpr int kMoeDispatchWarps = 16, kMoeCombineWarps = 8;
// How many warps of a dispatch's CTA send and do not receive. A few fill the link.
inline constexpr int kMoeDispatchSenders = 4;

struct MoeDispatchParams {
  int32_t world, slots, experts;  // experts: of a rank
  int32_t rows;                   // of the result
  ExpertRows expert_rows;
  TokenParts items;
  bool fill = true;  // write zeros to the rows past the last expert's too
  // Vectors of a row, at its end, that are scales of what is before them. In the workspace they lie
  // behind each other, elsewhere in two arrays.
  int64_t scale_vectors = 0;

  JFLUX_HD int64_t RowBytes() const { return items.vectors * 16; }
  JFLUX_HD int64_t Choices() const { return items.tokens * slots; }  // of a rank
  JFLUX_HD int64_t AllTokens() const { return world * items.tokens; }
  JFLUX_HD int64_t ValueVectors() const { return items.vectors - scale_vectors; }

  // Data, by source: the choices, their weights, the rows.
  JFLUX_HD int64_t ChoiceBytes() const { return RoundUp<int64_t>(4 * Choices(), 16); }
  JFLUX_HD int64_t ChoicesOffset(int src) const { return src * ChoiceBytes(); }
  JFLUX_HD int64_t WeightsOffset(int src) const { return (world + src) * ChoiceBytes(); }
  JFLUX_HD int64_t RowOffset(int src, int64_t token) const {
    return 2 * world * ChoiceBytes() + (src * items.tokens + token) * RowBytes();
  }
  // Signals: one for each source's choices, then those of items.
  JFLUX_HD int64_t ItemSignal(int src, int64_t item) const {
    return world + items.Signal(src, item);
  }
  WorkspaceLayout Workspace() const {
    return shmem::WorkspaceFor(RowOffset(world, 0), ItemSignal(world, 0));
  }
  // A block's scratch memory: the tables, then for each warp the row of each slot of an item's
  // tokens.
  JFLUX_HD int64_t MarkBytes() const { return ExpertMarks::Bytes(experts, AllTokens()); }
  JFLUX_HD int64_t ScratchBytes() const {
    return MarkBytes() + 4 * kMoeDispatchWarps * world * slots;
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMoeDispatchId))
        .Add(world)
        .Add(slots)
        .Add(experts)
        .Add(rows)
        .Add(expert_rows.capacity)
        .Add(expert_rows.alignment)
        .Add(expert_rows.stride)
        .Add(items.tokens)
        .Add(items.vectors)
        .Add(items.parts)
        .Add(scale_vectors)
        .Get();
  }
};

struct MoeDispatchArrays {
  const void* x;           // [tokens][bytes of a row's values]
  const void* scale;       // [tokens][bytes of its scales], float32; or null
  const int32_t* indices;  // [tokens][slots], experts of all ranks; others: none
  const float* weights;    // [tokens][slots]
  void* rows;              // [rows], as x
  void* row_scale;         // [rows], as scale
  float* row_weights;      // [rows]
  int32_t* sizes;          // [experts]
  int32_t* slot;           // [rows]: (src * tokens + t) * slots + j, or -1
  int32_t* there;  // [world * tokens][slots]: the row of a slot; ExpertMarks::kNone: it has none
                   // here, or an earlier slot of the token has it; kDropped
};

struct MoeCombineParams {
  int32_t world, slots;
  int32_t rows;      // of y
  DType dtype;       // of y
  bool out_f32;      // the result is float32; else of y's type
  TokenParts items;  // rows of y's columns
  // Sums travel as values of this format and float32 scales.
  DType wire = DType::kF8E4M3FN;
  int32_t wire_blocks = 0;  // of a row; 0: sums travel as they are

  void SetWire(DType format) {
    wire = format;
    const int64_t columns = RowBytes() / SizeOf<kMoeCombineFormats.operands>(dtype);
    wire_blocks = static_cast<int32_t>(CeilDiv(columns, kWireBlock));
  }
  JFLUX_HD int64_t RowBytes() const { return items.vectors * 16; }
  // What a sum takes in the workspace: of a wire, whole blocks of values, and then their scales.
  JFLUX_HD int64_t ScaleOffset(int32_t block) const {
    return wire_blocks * kWireBlock + int64_t{4} * block;
  }
  JFLUX_HD int64_t SumBytes() const {
    return wire_blocks == 0 ? RowBytes() : RoundUp<int64_t>(ScaleOffset(wire_blocks), 16);
  }
  JFLUX_HD int64_t RowOffset(int src, int64_t token) const {
    return (src * items.tokens + token) * SumBytes();
  }
  // The blocks of a part of a row: from FirstBlock(part) on, before FirstBlock(part + 1).
  JFLUX_HD int32_t FirstBlock(int32_t part) const {
    return static_cast<int32_t>(Quotient(int64_t{wire_blocks} * part, items.parts));
  }
  WorkspaceLayout Workspace() const {
    return shmem::WorkspaceFor(RowOffset(world, 0), items.Signal(world, 0));
  }
  // A warp's scratch memory, of which a block has one for each warp: a row and a weight for each
  // slot of an item's tokens; then, while sending, how many rows each rank's token has here, and
  // while receiving, the ranks of the own token's slots.
  static JFLUX_HD constexpr int32_t WarpWordsFor(int32_t world, int32_t slots) {
    return 2 * world * slots + Max(world, slots);
  }
  JFLUX_HD int64_t ScratchBytes() const { return ScratchBytesFor(world, slots); }
  static JFLUX_HD constexpr int64_t ScratchBytesFor(int32_t world, int32_t slots) {
    return int64_t{4} * kMoeCombineWarps * WarpWordsFor(world, slots);
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMoeCombineId))
        .Add(world)
        .Add(slots)
        .Add(static_cast<int64_t>(dtype))
        .Add(items.tokens)
        .Add(items.vectors)
        .Add(items.parts)
        .Add(wire_blocks == 0 ? -1 : static_cast<int64_t>(wire))
        .Get();
  }
};

struct MoeCombineArrays {
  const void* y;         // [rows][row bytes]
  const float* weights;  // [world * tokens][slots], of the slots that have come
  const int32_t* there;  // [world * tokens][slots], of the dispatch
  const int32_t* part;   // [tokens][slots]: the rank of a slot's expert, if no earlier slot of the
                         // token has one there; else -1
  void* out;             // [tokens][columns]
};

bool MoeDispatchCpu(const MoeDispatchParams& params, const MoeDispatchArrays& arrays,
                    const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);
bool MoeCombineCpu(const MoeCombineParams& params, const MoeCombineArrays& arrays,
                   const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// CTAs of an SM. A wire's have a block's sums in registers.
inline constexpr int kMoeDispatchCtasPerSm = 1;
constexpr int MoeCombineCtasPerSm(bool has_wire) { return has_wire ? 3 : 4; }
// The most that a dispatch's CTA keeps in shared memory, on GPUs that run code for this
// architecture; 3 KiB are left for what a call's beginning has there.
inline constexpr int64_t MostMoeDispatchScratch(int32_t arch) {
  return (arch < kHopperArch ? kPortable : kHopper).smem_bytes - (3 << 10);
}
// The most choices of a token: a thread looks through them all.
inline constexpr int kMostMoeSlots = 64;
// What a combine's CTA keeps in shared memory at most.
inline constexpr int64_t kMostMoeCombineScratch =
    MoeCombineParams::ScratchBytesFor(kMaxRanks, kMostMoeSlots);

// Enqueue a call on `stream`.
bool LaunchMoeDispatch(const MoeDispatchParams& params, const MoeDispatchArrays& arrays,
                       int64_t site, const CudaDevice& device, const SymmetricView& view,
                       cudaStream_t stream, std::string* error);
bool LaunchMoeCombine(const MoeCombineParams& params, const MoeCombineArrays& arrays, int64_t site,
                      const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                      std::string* error);

// Loads the kernels of both on the current device.
bool LoadMoeDispatchKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_
