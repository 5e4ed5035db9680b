// mbarriers, named barriers, and the meetings of a warp's lanes.
#include <algorithm>
#include <cstring>

#include "simt/machine.h"

namespace jflux::simt {
namespace {

Mbarrier& MbarrierAt(const SmemPlace& place) {
  const auto found = place.cta->mbarriers.find(place.offset);
  if (found == place.cta->mbarriers.end()) {
    Fail("no mbarrier has been initialised at 0x%x", place.offset);
  }
  return found->second;
}

void WakeAll(std::vector<Thread*>* waiters) {
  for (Thread* thread : *waiters) Unblock(thread);
  waiters->clear();
}

void CompletePhase(Mbarrier& bar) {
  if (bar.pending != 0 || bar.bytes != 0) return;
  ++bar.phase;
  bar.pending = bar.count;
  WakeAll(&bar.waiters);
}

}  // namespace

SmemPlace PlaceOf(uint32_t address, uint32_t bytes, uint32_t align) {
  Cta* cta = current->cta;
  if (address >> 24 != 0) {
    const uint32_t rank = (address >> 24) - 1;
    if (rank >= cta->cluster->ctas.size()) Fail("shared address 0x%x is in no CTA", address);
    cta = cta->cluster->ctas[rank].get();
  }
  const uint32_t offset = address & 0xffffff;
  if (offset % align != 0) Fail("shared address 0x%x is not aligned to %u", offset, align);
  const uint32_t end = kDynamicAt + cta->dynamic_bytes;
  if (offset < 1024 || offset + bytes > end) {
    Fail(
        "shared address 0x%x, of %u bytes, is outside of the kernel's shared memory, which ends "
        "at 0x%x",
        offset, bytes, end);
  }
  if (cta->ended) Fail("shared address 0x%x is in CTA %u, which has ended", offset, cta->block.x);
  return {cta, offset};
}

uint32_t AddressOf(const void* p) {
  for (const auto& cta : current->cta->cluster->ctas) {
    const ptrdiff_t offset = static_cast<const char*>(p) - cta->smem;
    if (cta->smem == nullptr || offset < 0 || offset >= ptrdiff_t{kSmemBytes}) continue;
    const auto at = static_cast<uint32_t>(offset);
    return cta.get() == current->cta ? at : AddressIn(cta->rank, at);
  }
  Fail("a pointer that is not to shared memory was taken for one");
}

void NoteWrite(const SmemPlace& place, uint32_t bytes, const Thread* writer) {
  for (uint32_t i = place.offset / 16; i <= (place.offset + bytes - 1) / 16; ++i) {
    place.cta->writes[i] = LastWrite{writer, Now()};
  }
}

void CheckRead(const SmemPlace& place, uint32_t bytes, uint64_t fenced, const char* reader) {
  for (uint32_t i = place.offset / 16; i <= (place.offset + bytes - 1) / 16; ++i) {
    const LastWrite& write = place.cta->writes[i];
    if (write.thread == nullptr || write.thread->fenced >= write.at || fenced >= write.at) continue;
    Fail(
        "%s reads shared memory at 0x%x, which thread %d of CTA %u has written and nobody has "
        "fenced (fence.proxy.async)",
        reader, 16 * i, write.thread->index, write.thread->cta->block.x);
  }
}

void InitMbarrier(const SmemPlace& place, uint32_t count) {
  Mbarrier& bar = place.cta->mbarriers[place.offset];
  if (!bar.waiters.empty()) Fail("an mbarrier is initialised that threads wait for");
  bar = Mbarrier{};
  bar.count = bar.pending = count;
}

void Arrive(const SmemPlace& place, uint32_t arrivals, int64_t expected_bytes) {
  Mbarrier& bar = MbarrierAt(place);
  if (arrivals > bar.pending) {
    Fail("mbarrier 0x%x gets %u arrivals too many in phase %u, of %u", place.offset,
         arrivals - bar.pending, bar.phase, bar.count);
  }
  bar.bytes += expected_bytes;
  bar.pending -= arrivals;
  if (bar.bytes >= 1 << 20) Fail("mbarrier 0x%x expects too many bytes", place.offset);
  CompletePhase(bar);
}

void CompleteBytes(const SmemPlace& place, uint32_t bytes) {
  Mbarrier& bar = MbarrierAt(place);
  bar.bytes -= bytes;
  if (bar.bytes < 0 && bar.pending == 0) {
    Fail("mbarrier 0x%x gets %lld bytes more than phase %u expects", place.offset,
         static_cast<long long>(-bar.bytes), bar.phase);
  }
  CompletePhase(bar);
}

bool TestPhase(const SmemPlace& place, uint32_t parity, bool suspends) {
  Mbarrier& bar = MbarrierAt(place);
  const auto done = [&] { return (bar.phase & 1) != parity; };
  if (done() || !suspends) return done();
  bar.waiters.push_back(current);
  Block("mbarrier, parity", place.offset, parity);
  return done();
}

uint32_t SyncNamed(int id, int threads, bool waits, Combine combine, uint32_t value) {
  Cta* cta = current->cta;
  if (id < 0 || id >= 16 || threads <= 0 || threads % 32 != 0) {
    Fail("bar.sync %d, %d: there are 16 barriers, of whole warps", id, threads);
  }
  NamedBarrier& bar = cta->named[id];
  if (bar.arrived != 0 && bar.threads != threads) {
    Fail("bar.sync %d is called with %d threads and with %d", id, bar.threads, threads);
  }
  bar.threads = threads;
  bar.values.push_back(value);
  if (++bar.arrived < threads) {
    if (waits) {
      bar.waiters.push_back(current);
      Block("bar.sync, threads", id, threads);
    }
    return bar.result;
  }
  const auto yes =
      std::count_if(bar.values.begin(), bar.values.end(), [](auto v) { return v != 0; });
  bar.result = combine == Combine::kAnd  ? yes == threads
               : combine == Combine::kOr ? yes != 0
                                         : static_cast<uint32_t>(yes);
  bar.arrived = 0;
  bar.values.clear();
  WakeAll(&bar.waiters);
  return bar.result;
}

uint32_t SyncThreads(Combine combine, uint32_t value) {
  const int threads = static_cast<int>(current->cta->threads.size());
  if (current->cta->live != threads) Fail("__syncthreads after a thread has ended");
  return SyncNamed(0, threads, /*waits=*/true, combine, value);
}

void SyncCluster() {
  Cluster* cluster = current->cta->cluster;
  NamedBarrier& bar = cluster->barrier;
  const int threads = static_cast<int>(cluster->ctas.size() * current->cta->threads.size());
  for (const auto& cta : cluster->ctas) {
    if (cta->live != static_cast<int>(cta->threads.size())) {
      Fail("barrier.cluster after a thread has ended");
    }
  }
  if (++bar.arrived < threads) {
    bar.waiters.push_back(current);
    Block("barrier.cluster, threads", 0, threads);
    return;
  }
  bar.arrived = 0;
  WakeAll(&bar.waiters);
}

void Meet(const char* what, uint32_t mask, void* mine, void (*complete)(void* const* offers)) {
  Warp* warp = current->warp;
  const uint32_t lane = 1u << current->lane;
  if ((mask & lane) == 0) Fail("%s: the mask %08x leaves out the calling lane", what, mask);
  if ((mask & warp->ended) != 0) {
    Fail("%s: lanes %08x of the mask %08x have ended", what, mask & warp->ended, mask);
  }
  const auto is_this = [&](const Meeting& m) {
    return m.mask == mask && std::strcmp(m.what, what) == 0;
  };
  auto meeting = std::find_if(warp->meetings.begin(), warp->meetings.end(), is_this);
  const uint32_t arrived = lane | (meeting == warp->meetings.end() ? 0 : meeting->arrived);
  for (const Meeting& other : warp->meetings) {
    // Each waits for lanes of the other. (Teams of lanes may end a loop one after the other.)
    if (!is_this(other) && (other.arrived & mask) != 0 && (arrived & other.mask) != 0) {
      Fail("%s of lanes %08x, while lanes %08x wait in %s of lanes %08x", what, mask, other.arrived,
           other.what, other.mask);
    }
  }
  if (meeting == warp->meetings.end()) {
    meeting = warp->meetings.insert(meeting, {what, mask, 0});
  }
  meeting->arrived |= lane;
  warp->offers[current->lane] = mine;
  if (meeting->arrived != mask) return Block(what, 0, mask);
  warp->meetings.erase(meeting);
  void* offers[32]{};
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) offers[i] = warp->offers[i];
  }
  if (complete != nullptr) complete(offers);
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) Resume(warp->lanes[i]);
  }
}

}  // namespace jflux::simt
