#include "runtime/workspace_table.h"

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

WorkspaceTable::Entry* WorkspaceTable::FindOrMake(
    WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
    const std::function<void(int64_t, int64_t)>& clear) {
  // Workspaces come in the sizes of WorkspaceLayout and PacketLayout, and only an equal size will
  // do: in another one, signals would lie where data was.
  Entry* best = nullptr;
  Entry* unused = nullptr;
  for (Entry& e : entries_) {
    // Ranks that disagree on the size get different workspaces, and find out by waiting in vain.
    if (e.state == kLeased && e.key == key && e.bytes == bytes) return &e;
    if (e.state == kFree && e.bytes == bytes && best == nullptr) best = &e;
    if (e.state == kUnused && unused == nullptr) unused = &e;
  }
  if (best == nullptr) {
    if (unused == nullptr || end_ + bytes > heap_bytes) DropFreeAtEnd();
    for (Entry& e : entries_) {
      if (unused == nullptr && e.state == kUnused) unused = &e;
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
  // only.
  const uint64_t epoch = NextEpoch(last_epoch_);
  if (epoch < best->epoch || (best->epoch ^ epoch) >> kScrubPeriodBits != 0) {
    clear(best->offset, bytes);
  }
  best->state = kLeased;
  best->key = key;
  best->world = world;
  best->released = 0;
  best->epoch = last_epoch_ = epoch;
  return best;
}

bool WorkspaceTable::Acquire(WorkspaceKey key, int32_t world, int64_t bytes, int64_t heap_bytes,
                             uint64_t deadline_ns,
                             const std::function<void(int64_t, int64_t)>& clear,
                             WorkspaceLease* lease, std::string* error) {
  if (bytes > heap_bytes) {
    *error = "the call needs " + std::to_string(bytes) +
             " bytes of the symmetric heap, which has " + std::to_string(heap_bytes) +
             "; call jflux.init(heap_bytes=...) with more";
    return false;
  }
  for (uint32_t turn = 0;; ++turn) {
    if (!Lock(deadline_ns)) {
      *error =
          "a process ended while it held the directory of the symmetric heap: call jflux.shutdown()"
          " and jflux.init() in every process that is left, or start them all again";
      return false;
    }
    if (const Entry* e = FindOrMake(key, world, bytes, heap_bytes, clear)) {
      *lease = WorkspaceLease{static_cast<int32_t>(e - entries_), e->epoch, e->offset};
      Unlock();
      return true;
    }
    Unlock();
    if (NowNs() > deadline_ns) {
      *error = "no room for " + std::to_string(bytes) + " bytes in the symmetric heap of " +
               std::to_string(heap_bytes) + " bytes (" + std::to_string(BytesInUse()) +
               " in use by other calls); call jflux.init(heap_bytes=...) with more";
      return false;
    }
    PollPause(2048);
  }
}

void WorkspaceTable::Release(const WorkspaceLease& lease, int32_t ranks, bool failed) {
  if (!Lock()) return;  // whoever asks for a workspace next says so
  Entry& e = entries_[lease.index];
  if (failed) e.state = kLost;
  e.released += ranks;
  if (e.released == e.world && e.state == kLeased) e.state = kFree;
  Unlock();
}

int64_t WorkspaceTable::BytesInUse() {
  if (!Lock()) return 0;
  int64_t sum = 0;
  for (const Entry& e : entries_) {
    if (e.state == kLeased || e.state == kLost) sum += e.bytes;
  }
  Unlock();
  return sum;
}

}  // namespace jflux
