// moe_dispatch and moe_combine: tokens to the ranks of their experts, and back, each in one kernel.
//
// A rank has `tokens` tokens and `experts` experts, from expert r * experts on for rank r. A token
// has `slots` choices. Its row goes once to each rank that has one of its experts, to a place there
// that no other token has. So rows leave before any rank knows what the others send.
//
//   dispatch   rows[r] = x of rank src[t], for each row r of an expert, in the order of
//              (expert, src, t); zeros where no token has the row
//   combine    out[t] = the sum over ranks of their sums. A rank's sum is that of w * y over the
//              token's slots there, rounded to y's type
//
// The bodies that CPU and GPU share: moe_dispatch_body.h and moe_combine_body.h.
// docs/decisions/0039-tokens-have-places.md. Python: jflux/_ops/experts/_dispatch_primitives.py.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_

#include <cstdint>

#include "core/dtype.h"
#include "jflux/shmem.h"
#include "ops/moe_dispatch/expert_marks.h"
#include "ops/moe_dispatch/token_parts.h"

namespace jflux {

inline constexpr OpId kMoeDispatchId{12}, kMoeCombineId{13};

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

  JFLUX_HD int64_t RowBytes() const { return items.vectors * 16; }
  JFLUX_HD int64_t Choices() const { return items.tokens * slots; }  // of a rank
  JFLUX_HD int64_t AllTokens() const { return world * items.tokens; }

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
        .Get();
  }
};

struct MoeDispatchArrays {
  const void* x;           // [tokens][row bytes]
  const int32_t* indices;  // [tokens][slots], experts of all ranks; others: none
  const float* weights;    // [tokens][slots]
  void* rows;              // [rows][row bytes]
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

  JFLUX_HD int64_t RowBytes() const { return items.vectors * 16; }
  JFLUX_HD int64_t RowOffset(int src, int64_t token) const {
    return (src * items.tokens + token) * RowBytes();
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

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_H_
