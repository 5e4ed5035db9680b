// An exchange between counterparts: ranks on different nodes, which reach each other by NVSHMEM
// alone. Two-level ops use it between nodes (jflux/_ops/_node_exchange.py).
//
//   kinds    kExchange  block p of x goes to rank p, and arrives in block `sender` of y
//            kGather    x goes to all ranks, and arrives in block `sender` of y
//            kShift     x goes `steps` ranks back (modulo the world): y is x of rank me + steps
//   writes   A rank copies each block into the staging of its own workspace, since a network card
//            reads registered memory alone, and puts it into a slot of the receiver's workspace
//            with a signal. The receiver copies the slot to y.
//   slices   CTA s of a rank sends and receives slice s of each block, with a signal of its own.
//   waits    For each slice that arrives; for the hello of each rank that sends no block here: in
//            every call every rank hears from every peer (core/signal.h).
//   reuse    Staging and slots have two halves, for calls of even and odd epoch. When call e begins
//            on a rank, it has heard from all peers in call e-1. A peer sends in call e-1 after it
//            has ended call e-2, so it has received what was put for it in call e-2: that staging
//            may be overwritten, without a wait for NVSHMEM's completion.
//   reset    Never.
//
// A call's workspace, per half of data:
//
//   +--------+--------+-----+-----------+-----------+-----+
//   | slot 0 | slot 1 | ... | staging 0 | staging 1 | ... |   each of Stride() bytes
//   +--------+--------+-----+-----------+-----------+-----+
#ifndef JFLUX_NVSHMEM_NODE_EXCHANGE_H_
#define JFLUX_NVSHMEM_NODE_EXCHANGE_H_

#include <cstdint>

#include "core/signal.h"
#include "gpu/device_state.h"
#include "jflux/remote.h"
#include "jflux/shmem.h"

namespace jflux {

inline constexpr OpId kNodeExchangeId{64};

enum class NodeExchangeKind : int32_t { kExchange = 0, kGather = 1, kShift = 2 };

struct NodeExchange {
  NodeExchangeKind kind;
  int32_t world;
  int32_t steps;        // of kShift, from 1 to world - 1; else 0
  int32_t slices;       // CTAs
  int64_t block_bytes;  // what one rank sends to another

  static constexpr int32_t kMostSlices = 16;
  static constexpr int64_t kLeastSliceBytes = 16 << 10;

  JFLUX_HD static NodeExchange For(NodeExchangeKind kind, int32_t world, int32_t steps,
                                   int64_t block_bytes) {
    // No slice is empty: rounding each to 16 bytes takes less than a whole one.
    const auto wanted = CeilDiv(block_bytes, kLeastSliceBytes);
    return NodeExchange{kind, world, steps, static_cast<int32_t>(Min<int64_t>(wanted, kMostSlices)),
                        block_bytes};
  }

  // ---- Slices of a block.
  JFLUX_HD int64_t SliceBytes() const {
    return RoundUp<int64_t>(CeilDiv<int64_t>(block_bytes, slices), 16);
  }
  JFLUX_HD int64_t SliceBegin(int32_t slice) const { return slice * SliceBytes(); }
  JFLUX_HD int64_t BytesOf(int32_t slice) const {
    return Min(SliceBytes(), block_bytes - SliceBegin(slice));
  }

  // ---- Who sends what to whom.
  JFLUX_HD bool Sends(int32_t from, int32_t to) const {
    if (from == to) return false;
    return kind != NodeExchangeKind::kShift || (to + steps) % world == from;
  }
  // Bytes at which the block for `to` begins in x, and that of `from` in y.
  JFLUX_HD int64_t InX(int32_t to) const {
    return kind == NodeExchangeKind::kExchange ? to * block_bytes : 0;
  }
  JFLUX_HD int64_t InY(int32_t from) const {
    return kind == NodeExchangeKind::kShift ? 0 : from * block_bytes;
  }
  // Whether a block stays on its rank: from InX(rank) to InY(rank).
  JFLUX_HD bool KeepsOne() const { return kind != NodeExchangeKind::kShift; }
  int64_t BytesOfX() const {
    return block_bytes * (kind == NodeExchangeKind::kExchange ? world : 1);
  }
  int64_t BytesOfY() const { return block_bytes * (kind == NodeExchangeKind::kShift ? 1 : world); }

  // ---- The workspace.
  JFLUX_HD int64_t Stride() const { return RoundUp<int64_t>(block_bytes, 16); }
  JFLUX_HD int32_t Slots() const { return kind == NodeExchangeKind::kShift ? 1 : world; }
  JFLUX_HD int32_t Slot(int32_t from) const { return kind == NodeExchangeKind::kShift ? 0 : from; }
  JFLUX_HD int32_t Staged(int32_t to) const { return kind == NodeExchangeKind::kExchange ? to : 0; }
  JFLUX_HD int64_t InSlots(int32_t from, int32_t slice) const {
    return Slot(from) * Stride() + SliceBegin(slice);
  }
  JFLUX_HD int64_t InStaging(int32_t to, int32_t slice) const {
    return (Slots() + Staged(to)) * Stride() + SliceBegin(slice);
  }
  // Number of the signal word; hellos come first, one for each rank.
  JFLUX_HD int64_t SignalOf(int32_t from, int32_t slice) const {
    return kMaxRanks + static_cast<int64_t>(Slot(from)) * slices + slice;
  }
  JFLUX_HD WorkspaceLayout Layout() const {
    const int32_t staged = kind == NodeExchangeKind::kExchange ? world : 1;
    return shmem::WorkspaceFor((Slots() + staged) * Stride(),
                               static_cast<int64_t>(Slots()) * slices);
  }
};

// A kernel's argument.
struct NodeExchangeArgs {
  NodeExchange exchange;
  const char* x;
  char* y;
  DeviceState* state;
  WorkspaceLayout layout;
  SymmetricView view;  // of this rank's own copy alone
  shmem::RemoteRef copies[kMaxRanks];
  uint32_t signature, op;
};

}  // namespace jflux

#endif  // JFLUX_NVSHMEM_NODE_EXCHANGE_H_
