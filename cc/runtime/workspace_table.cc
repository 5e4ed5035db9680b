#include "runtime/workspace_table.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "core/atomic.h"
#include "core/layout.h"
#include "core/packet.h"
#include "core/platform.h"

namespace jflux {

bool WorkspaceTable::Lock(uint64_t deadline_ns) {
  for (uint32_t turn = 0; !CompareExchange(&lock_, 0, 1); ++turn) {
    if (turn % 64 == 63 && NowNs() > deadline_ns) return false;
    PollPause(turn);
  }
  return true;
}

void WorkspaceTable::Unlock() { StoreRelease(&lock_, 0); }

// Free workspaces that lie last make room for other sizes.
void WorkspaceTable::DropFreeAtEnd() {
  for (bool found = true; found && end_ > 0;) {
    found = false;
    for (Entry& e : entries_) {
      if (e.state == kFree && e.offset + e.bytes == end_) {
        end_ = e.offset;
        e.state = kUnused;
        found = true;
      }
    }
  }
}

WorkspaceTable::Entry* WorkspaceTable::UnusedEntry() {
  Entry* oldest = nullptr;  // record of a call that has failed
  for (Entry& e : entries_) {
    if (e.state == kUnused) return &e;
    if (e.state != kFailed || e.bytes != 0) continue;
    // Age, also across the wrap of the epochs.
    if (oldest == nullptr || last_epoch_ - e.epoch > last_epoch_ - oldest->epoch) oldest = &e;
  }
  return oldest;
}

bool WorkspaceTable::HasFailed(WorkspaceKey key) const {
  for (const Entry& e : entries_) {
    if (e.state == kFailed && e.key == key) return true;
  }
  return false;
}

WorkspaceTable::Entry* WorkspaceTable::FindOrMake(
    WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
    const std::function<void(int64_t, int64_t)>& clear) {
  // Workspaces come in the sizes of WorkspaceLayout and PacketLayout, and only an equal size will
  // do: in another one, signals would lie where data was.
  Entry* best = nullptr;
  for (Entry& e : entries_) {
    // Ranks that disagree on the size get different workspaces, and find out by waiting in vain.
    if (e.state == kLeased && e.key == key && e.bytes == bytes) return &e;
    if (e.state == kFree && e.bytes == bytes && best == nullptr) best = &e;
  }
  if (best == nullptr) {
    Entry* unused = UnusedEntry();
    if (unused == nullptr || end_ + bytes > heap_bytes) {
      DropFreeAtEnd();
      unused = UnusedEntry();
    }
    if (unused == nullptr || end_ + bytes > heap_bytes) return nullptr;
    best = unused;
    best->offset = end_;
    best->bytes = bytes;
    if (end_ < touched_) clear(best->offset, bytes);
    end_ += bytes;
    touched_ = Max(touched_, end_);
  }
  // Flags of LL packets repeat after 2^32 epochs (core/packet.h); a workspace has some of them
  // only. (Epochs that tests set back repeat too.)
  const uint64_t epoch = NextEpoch(last_epoch_);
  if (epoch <= best->epoch || (best->epoch ^ epoch) >> kScrubPeriodBits != 0) {
    clear(best->offset, bytes);
  }
  best->key = key;
  best->world = world;
  best->released = 0;
  best->epoch = last_epoch_ = epoch;
  best->state = kLeased;
  return best;
}

namespace {

constexpr char kLockLost[] =
    "a process ended or was stopped while it held the directory of the symmetric heap: call "
    "jflux.shutdown() and jflux.init() in every process that is left, or start them all again";

// The pause between two looks at a table without room. The more threads of this process wait, the
// longer each sleeps. Otherwise thousands of waiting calls would leave no processor to the calls
// that hold the room.
void PauseForRoom() {
  static std::atomic<int> waiting{0};
  std::this_thread::sleep_for(std::chrono::microseconds(50) * ++waiting);
  --waiting;
}

}  // namespace

bool WorkspaceTable::Acquire(WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
                             uint64_t deadline_ns,
                             const std::function<void(int64_t, int64_t)>& clear,
                             WorkspaceLease* lease, std::string* error, ErrorKind* kind) {
  ErrorKind unused;
  if (kind == nullptr) kind = &unused;
  if (bytes > heap_bytes) {
    *kind = ErrorKind::kResourceExhausted;
    *error = "the call needs " + std::to_string(bytes) +
             " bytes of the symmetric heap, which has " + std::to_string(heap_bytes) +
             "; call jflux.init(heap_bytes=...) with more";
    return false;
  }
  for (;;) {
    if (!Lock(deadline_ns)) {
      *kind = ErrorKind::kAborted;
      *error = kLockLost;
      return false;
    }
    if (HasFailed(key)) {
      Unlock();
      *kind = ErrorKind::kAborted;
      *error = "the call has failed on another rank: see that rank's error";
      return false;
    }
    if (const Entry* e = FindOrMake(key, world, bytes, heap_bytes, clear)) {
      *lease = WorkspaceLease{static_cast<int32_t>(e - entries_), e->epoch, e->offset};
      Unlock();
      return true;
    }
    Unlock();
    if (NowNs() > deadline_ns) {
      *kind = ErrorKind::kResourceExhausted;
      *error = "no room for " + std::to_string(bytes) + " bytes in the symmetric heap of " +
               std::to_string(heap_bytes) + " bytes (" + std::to_string(BytesOf(kLeased, kLeased)) +
               " in use by other calls, " + std::to_string(BytesOf(kFailed, kFailed)) +
               " lost to calls that failed and that other ranks have not given up); call "
               "jflux.init(heap_bytes=...) with more";
      return false;
    }
    PauseForRoom();
  }
}

// Gives back what the call `key` holds if all its ranks are done. They are counted over all its
// entries: ranks that disagree on the size have several.
void WorkspaceTable::Settle(WorkspaceKey key, int32_t world, bool failed) {
  int32_t released = 0;
  for (const Entry& e : entries_) {
    if ((e.state != kLeased && e.state != kFailed) || !(e.key == key)) continue;
    released += e.released;
    failed |= e.state == kFailed;
  }
  for (Entry& e : entries_) {
    if ((e.state != kLeased && e.state != kFailed) || !(e.key == key)) continue;
    if (released >= world) {
      e.state = e.bytes == 0 ? kUnused : kFree;
    } else if (failed) {
      e.state = kFailed;
    }
  }
}

bool WorkspaceTable::Release(const WorkspaceLease& lease, int32_t ranks, bool failed,
                             uint64_t deadline_ns) {
  if (!Lock(deadline_ns)) return false;
  Entry& e = entries_[lease.index];
  e.released += ranks;
  Settle(e.key, e.world, failed);
  Unlock();
  return true;
}

bool WorkspaceTable::Abandon(WorkspaceKey key, int32_t world, int32_t ranks, uint64_t deadline_ns) {
  if (!Lock(deadline_ns)) return false;
  Entry* own = nullptr;
  for (Entry& e : entries_) {
    if ((e.state == kLeased || e.state == kFailed) && e.key == key) own = &e;
  }
  // If there is no entry, make one without a workspace. Ranks that come later see from it that the
  // call has failed, and do not wait.
  if (own == nullptr && ranks < world) {
    own = UnusedEntry();
    if (own != nullptr) *own = Entry{kFailed, world, 0, last_epoch_, 0, 0, key};
  }
  if (own != nullptr) {
    own->released += ranks;
    Settle(key, world, /*failed=*/true);
  }
  Unlock();
  return true;
}

int64_t WorkspaceTable::BytesOf(State a, State b) {
  if (!Lock()) return -1;
  int64_t sum = 0;
  for (const Entry& e : entries_) {
    if (e.state == a || e.state == b) sum += e.bytes;
  }
  Unlock();
  return sum;
}

}  // namespace jflux
