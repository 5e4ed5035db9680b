// Offsets in the symmetric heap. They are the same on every rank; SymmetricView turns an offset
// into a pointer.
//
//   workspace (one per group of ranks and size class; core/packet.h has a second kind)
//   +-----------------+-----------+-----------+-----------------+-----------------+
//   | WorkspaceHeader | signals 0 | signals 1 | data 0          | data 1          |
//   +-----------------+-----------+-----------+-----------------+-----------------+
//     this rank's       peers write half 0 in calls of even epoch, half 1 in calls of odd epoch
//
// Calls of different ops and shapes share a workspace. Signals and data are separate areas, so that
// no call reads the data of an earlier call as a signal.
#ifndef JFLUX_CORE_LAYOUT_H_
#define JFLUX_CORE_LAYOUT_H_

#include <cstdint>

#include "platform.h"
#include "signal.h"

namespace jflux {

inline constexpr int64_t kHeapAlign =
    1024;  // covers TMA's 128-byte alignment, and keeps signals and data in different cache lines

inline constexpr int32_t kMostTileClasses = 32;  // of a kernel that sums tiles

// Counters of one rank's GPU kernels, in its own memory. Peers never access them.
//
//   written  by the CTAs of this rank
//   reset    In a GEMM kernel, the last warp to take work resets the work counters and publishes
//            the epoch (LeaveCounters, gpu/gemm_call.cuh). In other kernels, the last cluster to
//            start does (TakeDynamicId, gpu/call.cuh). The ticket counters are never reset.
struct WorkspaceHeader {
  uint64_t epoch_and_id;   // of the last finished call, and the next dynamic id: see below
  uint32_t next_transfer;  // next chunk to send, or peer's tile to receive
  uint32_t next_tile;      // next tile to compute
  uint64_t stop;           // WaitContext::stop of the running call
  uint64_t inside;         // which kernel is in the workspace: see below
  uint32_t exited;         // warps that will take no more work
  uint32_t next_copy;      // next chunk to copy to `gathered`
  uint32_t senders;        // CTAs that have asked to send
  uint32_t pad[5];
  uint64_t tickets_issued;  // core/ticket_semaphore.h
  uint64_t pad_issued[7];
  uint64_t tickets_released;  // polled by every waiting store warp
  uint64_t pad_released[15];
  uint64_t tiles_stored[kMostTileClasses];  // core/tile_counts.h
};
static_assert(sizeof(WorkspaceHeader) == 512 && sizeof(WorkspaceHeader) <= kHeapAlign);

// WorkspaceHeader::epoch_and_id is (epoch << 24 | id), which one atomic reads and raises. Between
// calls the id is 0.
inline constexpr int kIdBits = 64 - kEpochBits;
inline constexpr int64_t kMostIds = int64_t{1} << kIdBits;  // clusters of a kernel
JFLUX_HD constexpr uint64_t EpochWord(uint64_t epoch) { return epoch << kIdBits; }
JFLUX_HD constexpr uint64_t EpochOfWord(uint64_t word) { return word >> kIdBits; }
JFLUX_HD constexpr uint32_t IdOfWord(uint64_t word) {
  return static_cast<uint32_t>(word) & static_cast<uint32_t>(kMostIds - 1);
}

// WorkspaceHeader::inside is the sum of Presence(launch) over what is inside: CTAs, or some of
// their warps. Each adds it when it begins and subtracts it when it ends, so the sum needs no
// reset, and is 0 between calls. Kernels of two launches that run at once cannot make a sum that
// passes for one of them: with i of another launch, IsAlone asks for i * launch == i * other.
JFLUX_HD constexpr uint64_t Presence(uint32_t launch) {
  return static_cast<uint64_t>(launch) << 16 | 1;
}
// Fewer than 2^16 at a time are inside: a GPU does not hold more.
JFLUX_HD constexpr bool IsAlone(uint64_t inside, uint32_t launch) {
  return inside >> 16 == (inside & 0xffff) * launch;
}

struct WorkspaceLayout {
  int64_t data_bytes;  // of one half; a power of two

  // The smallest workspace that fits a call.
  JFLUX_HD static WorkspaceLayout For(int64_t signal_bytes, int64_t data_bytes) {
    int64_t size = kMinDataBytes;
    while (size < data_bytes || WorkspaceLayout{size}.SignalBytes() < signal_bytes) size *= 2;
    return WorkspaceLayout{size};
  }

  JFLUX_HD int64_t SignalBytes() const { return Max<int64_t>(4096, data_bytes / 512); }
  JFLUX_HD int64_t SignalOffset(uint64_t epoch) const {
    return kHeapAlign + (epoch & 1) * SignalBytes();
  }
  JFLUX_HD int64_t DataOffset(uint64_t epoch) const {
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

// The copies of one workspace on all ranks of its group: base[r] is rank r's copy, mapped into this
// rank's address space.
struct SymmetricView {
  char* base[kMaxRanks];
  int32_t rank;
  int32_t world;
  uint32_t launch;  // on a GPU: the number of the kernel's launch in this process, never 0. A CUDA
                    // graph that replays it keeps it

  template <typename T = char>
  JFLUX_HD T* At(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(base[peer] + offset);
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_LAYOUT_H_
