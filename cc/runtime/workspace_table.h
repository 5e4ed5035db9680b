// The CPU back end's directory of workspaces in use.
//
// A GPU runs the calls of a group in stream order, so its workspaces count calls by themselves. On
// the CPU independent calls run in any order, and ranks may disagree on it; so a call asks for its
// workspace by name (its key), and every rank that asks with the same key gets the same workspace
// and epoch. A workspace goes back when all ranks of the call have released it.
//
//   memory    Plain data that starts out as zeros, in memory shared between processes: the first
//             process that maps it is as good as any other.
//   writers   Every process, in Acquire and Release, while it holds `lock_`.
//   waiters   For the lock: Lock polls it, until a deadline. For room: Acquire polls the table with
//             the lock released in between, until the call's deadline; all threads of a process
//             together every 50 us, so that waiting costs the same for one call and for thousands.
//   order     The lock is taken with acquire and given back with release at system scope. So who
//             gets a workspace sees its signals cleared, and all reads of its last call are over.
//   reset     A free workspace is given out again as it is: its epoch is later than that of every
//             call before, so old signals are old. Memory that was part of a workspace of another
//             size is cleared first, and every workspace once in 2^31 epochs, before the flags of
//             its LL packets come again (core/packet.h). A process that dies with the lock leaves
//             the table unusable, and whoever asks for the lock next says so.
//   failure   When a rank fails, its call has failed: a rank that asks for the workspace later is
//             refused at once. Its peers may still write to the workspace, so it goes back when all
//             ranks are done with the call: each has released it, or has given up (Abandon). A
//             process that died never does either: its calls' workspaces stay lost.
#ifndef JFLUX_RUNTIME_WORKSPACE_TABLE_H_
#define JFLUX_RUNTIME_WORKSPACE_TABLE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "core/platform.h"
#include "runtime/call_error.h"

namespace jflux {

struct WorkspaceKey {
  uint64_t hi, lo;
  bool operator==(const WorkspaceKey& o) const { return hi == o.hi && lo == o.lo; }
};

struct WorkspaceLease {
  int32_t index = -1;
  uint64_t epoch = 0;
  int64_t offset = 0;  // in every rank's heap
};

class WorkspaceTable {
 public:
  // Finds or makes the workspace `key` for `world` ranks. Waits for memory, and for the lock, until
  // the deadline (on NowNs()'s clock). Refuses a call that has failed on another rank. On failure
  // *error says why. `clear` zeroes the signals of a workspace (offset, bytes) on all ranks, which
  // memory that was part of another workspace needs.
  bool Acquire(WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
               uint64_t deadline_ns, const std::function<void(int64_t, int64_t)>& clear,
               WorkspaceLease* lease, std::string* error, ErrorKind* kind = nullptr);

  // `ranks` ranks are done with the call; `failed`: one of them failed. False if the lock cannot be
  // had before the deadline.
  bool Release(const WorkspaceLease& lease, int32_t ranks, bool failed, uint64_t deadline_ns);

  // `ranks` ranks give up a call of which they have no lease. The call counts as failed from then
  // on. False if the lock cannot be had before the deadline.
  bool Abandon(WorkspaceKey key, int32_t world, int32_t ranks, uint64_t deadline_ns);

  // Calls visit(offset, bytes, epoch of the last call) for each workspace that nobody holds; none
  // is given out meanwhile. False if the lock cannot be had.
  template <typename F>
  bool ForEachFree(F&& visit) {
    if (!Lock()) return false;
    for (const Entry& e : entries_) {
      if (e.state == kFree) visit(e.offset, e.bytes, e.epoch);
    }
    Unlock();
    return true;
  }

  // Tests only, while nobody holds a workspace: sets the number of calls so far.
  bool SetLastEpoch(uint64_t epoch) {
    if (!Lock()) return false;
    last_epoch_ = epoch;
    Unlock();
    return true;
  }

  // Bytes of workspaces that calls hold, those of failed calls too; -1 if the lock cannot be had.
  int64_t BytesInUse() { return BytesOf(kLeased, kFailed); }
  int64_t BytesTouched() const { return touched_; }

 private:
  enum State : int32_t { kUnused = 0, kFree, kLeased, kFailed };
  struct Entry {
    State state;
    int32_t world;
    int32_t released;  // ranks that are done
    uint64_t epoch;
    int64_t offset;
    int64_t bytes;  // 0: no workspace, only the record that the call has failed
    WorkspaceKey key;
  };

  // The lock is held for microseconds, unless a process ended or was stopped while it held it.
  bool Lock(uint64_t deadline_ns = NowNs() + kLockTimeoutNs);
  void Unlock();
  Entry* FindOrMake(WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
                    const std::function<void(int64_t, int64_t)>& clear);
  void DropFreeAtEnd();
  Entry* UnusedEntry();
  bool HasFailed(WorkspaceKey key) const;
  void Settle(WorkspaceKey key, int32_t world, bool failed);
  int64_t BytesOf(State a, State b);

  static constexpr int kEntries = 1024;
  static constexpr uint64_t kLockTimeoutNs = 5'000'000'000;
  uint64_t lock_;
  int64_t end_;          // heap bytes that some entry covers
  int64_t touched_;      // the largest end_ so far: beyond it memory is still zero
  uint64_t last_epoch_;  // one count for all workspaces: a workspace's own epochs have gaps, and
                         // may repeat a half, which is safe here: all ranks released it first
  Entry entries_[kEntries];
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_WORKSPACE_TABLE_H_
