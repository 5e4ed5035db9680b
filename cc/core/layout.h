// Where things lie in the symmetric heap. All of it is arithmetic on offsets, the same on every
// rank; only SymmetricView turns an offset into a pointer.
//
//   workspace (one per group of ranks and size class; core/packet.h has another kind)
//   +---------------+-----------+-----------+-----------------+-----------------+
//   | WorkspaceHeader | signals 0 | signals 1 | data 0          | data 1          |
//   +---------------+-----------+-----------+-----------------+-----------------+
//     this rank's     written by peers in calls of even (0) or odd (1) epoch
//
// Calls of different ops and shapes share a workspace. Signals therefore have a place of their own:
// no call's data may ever be read as another call's signal.
#ifndef JFLUX_CORE_LAYOUT_H_
#define JFLUX_CORE_LAYOUT_H_

#include <cstdint>

#include "platform.h"
#include "signal.h"

namespace jflux {

inline constexpr int64_t kHeapAlign =
    1024;  // covers TMA's 128 bytes and keeps flags off data lines

// Counters that one rank's kernel keeps from call to call; peers never touch them. The last CTA
// (or thread) out resets the work counters and publishes the finished epoch. Where CTAs exchange
// packets, it is the last one in that does (gpu/packet_call.cuh). TicketSemaphore are counted on
// and on.
struct WorkspaceHeader {
  uint32_t epoch;      // of the last finished call
  uint32_t next_send;  // next unit of sending not yet taken
  uint32_t next_tile;  // next tile not yet taken
  uint32_t exited;     // scheduler warps and senders (or threads) that have taken their last
  uint64_t stop;       // WaitContext::stop of the running call
  uint32_t next_copy;  // next unit of copying not yet taken
  uint32_t senders;    // that have begun
  uint32_t pad[8];
  uint64_t tickets_issued;  // to send: core/ticket_semaphore.h
  uint64_t pad_issued[7];
  uint64_t tickets_released;  // many look
  uint64_t pad_released[15];
};
static_assert(sizeof(WorkspaceHeader) == 256);

struct WorkspaceLayout {
  int64_t data_bytes;  // of one half: a power of two

  // The smallest workspace that holds a call with these needs.
  JFLUX_HD static WorkspaceLayout For(int64_t signal_bytes, int64_t data_bytes) {
    int64_t size = kMinDataBytes;
    while (size < data_bytes || WorkspaceLayout{size}.SignalBytes() < signal_bytes) size *= 2;
    return WorkspaceLayout{size};
  }

  JFLUX_HD int64_t SignalBytes() const { return Max<int64_t>(4096, data_bytes / 512); }
  JFLUX_HD int64_t SignalOffset(uint32_t epoch) const {
    return kHeapAlign + (epoch & 1) * SignalBytes();
  }
  JFLUX_HD int64_t DataOffset(uint32_t epoch) const {
    return kHeapAlign + 2 * SignalBytes() + (epoch & 1) * data_bytes;
  }
  JFLUX_HD int64_t TotalBytes() const { return DataOffset(0) + 2 * data_bytes; }

  // The workspace whose TotalBytes() is `total`.
  static WorkspaceLayout OfTotal(int64_t total) {
    int64_t size = kMinDataBytes;
    while (WorkspaceLayout{size}.TotalBytes() < total) size *= 2;
    return WorkspaceLayout{size};
  }

  static constexpr int64_t kMinDataBytes = 64 << 10;
};

// One workspace as all ranks of its group see it: base[r] is where rank r's copy starts, in this
// rank's address space.
struct SymmetricView {
  char* base[kMaxRanks];
  int32_t rank;
  int32_t world;

  template <typename T = char>
  JFLUX_HD T* At(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(base[peer] + offset);
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_LAYOUT_H_
