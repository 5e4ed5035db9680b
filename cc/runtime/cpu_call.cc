#include "runtime/cpu_call.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "runtime/elastic_pool.h"
#include "runtime/fault.h"
#include "runtime/heap_cpu.h"

namespace jflux {
namespace {

// (run id, site, group, occurrence)
using CallId = std::tuple<int64_t, uint64_t, std::vector<int64_t>, int64_t>;

// A handler that waits for its call to complete.
class Waiter {
 public:
  explicit Waiter(int64_t device) : device_(device) {}
  int64_t device() const { return device_; }

  // True if it was still waiting.
  bool Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool waited = !released_;
    released_ = true;
    changed_.notify_all();
    return waited;
  }

  // True if it was released before `limit`.
  bool Wait(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool in_time = changed_.wait_for(lock, limit, [this] { return released_; });
    released_ = true;
    return in_time;
  }

 private:
  const int64_t device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
};

struct Pending {
  std::shared_ptr<HeapCpu> heap;
  std::vector<std::shared_ptr<Waiter>> waiters;
  std::vector<CpuCall> ranks;
  uint64_t deadline_ns = 0;
  bool warned = false;
};

struct Registry {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<CallId, Pending> pending;
  // Calls so far, by run, then by (call site, device). Only the most recent runs are kept.
  std::map<int64_t, std::map<std::pair<uint64_t, int64_t>, int64_t>> occurrences;
  std::deque<int64_t> run_order;
  std::map<CallId, std::string> failed;  // for ranks that arrive after a call has failed
  std::deque<CallId> failed_order;
  bool watching = false;
};

Registry& Calls() {
  static auto* registry = new Registry;  // detached threads use it until the process exits
  return *registry;
}

WorkspaceKey KeyOf(const CallId& id) {
  const auto& [run, site, group, occurrence] = id;
  SignatureBuilder hi, lo;
  for (SignatureBuilder* b : {&hi, &lo}) {
    b->Add(b == &hi ? 1 : 2).Add(run).Add(static_cast<int64_t>(site)).Add(occurrence);
    for (int64_t device : group) b->Add(device);
  }
  // The run id is not hashed, so a collision could only happen within one execution.
  return WorkspaceKey{(static_cast<uint64_t>(hi.Get()) << 32) | lo.Get(),
                      static_cast<uint64_t>(run)};
}

// State that the ranks of one call in this process share.
struct Cohort {
  std::shared_ptr<HeapCpu> heap;
  std::vector<CpuCall> ranks;
  WorkspaceLease lease;
  uint64_t deadline_ns;
  std::atomic<int> left;
  std::atomic<bool> failed{false};
};

void RunRank(const std::shared_ptr<Cohort>& cohort, CpuCall& call) {
  SymmetricView view;  // Register has checked that the heap knows the devices
  cohort->heap->FillView(call.group, call.rank, cohort->lease.offset, &view);
  const TestHooks hooks = cohort->heap->hooks();
  if (hooks.max_delay_us > 0) {
    thread_local std::minstd_rand random(static_cast<uint32_t>(NowNs()) | 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % hooks.max_delay_us));
  }
  Fault fault{};
  uint64_t stop = 0;
  const WaitContext ctx{&fault,
                        &stop,
                        cohort->deadline_ns,
                        static_cast<uint32_t>(call.op),
                        call.rank,
                        hooks.skip_waits != 0,
                        cohort->heap->limits()};
  std::string error;
  if (!call.body(view, cohort->lease.epoch, ctx)) {
    error = Describe(fault, cohort->heap->deadline_s());
    cohort->failed = true;
  }
  call.body = nullptr;
  auto done = std::move(call.done);
  if (--cohort->left == 0) {
    cohort->heap->table()->Release(cohort->lease, static_cast<int32_t>(cohort->ranks.size()),
                                   cohort->failed);
  }
  done(error);
}

void RunCohort(const CallId& id, std::shared_ptr<HeapCpu> heap, std::vector<CpuCall> ranks,
               uint64_t deadline_ns) {
  auto cohort = std::make_shared<Cohort>();
  cohort->heap = std::move(heap);
  cohort->ranks = std::move(ranks);
  cohort->deadline_ns = deadline_ns;
  cohort->left = static_cast<int>(cohort->ranks.size());
  std::string error;
  const CpuCall& first = cohort->ranks.front();
  const auto world = static_cast<int32_t>(first.group.size());
  if (!cohort->heap->table()->Acquire(
          KeyOf(id), world, first.bytes, cohort->heap->heap_bytes(), deadline_ns,
          [&](int64_t offset, int64_t bytes) { cohort->heap->ClearSignals(offset, bytes); },
          &cohort->lease, &error)) {
    error = std::string("jflux.") + NameOf(first.op) + ": " + error;
    for (CpuCall& call : cohort->ranks) {
      RunOnPool([done = std::move(call.done), error] { done(error); });
    }
    return;
  }
  for (size_t i = 1; i < cohort->ranks.size(); ++i) {
    RunOnPool([cohort, i] { RunRank(cohort, cohort->ranks[i]); });
  }
  RunRank(cohort, cohort->ranks[0]);
}

// The ranks of a call that wait for others of this process, and those.
struct Missing {
  std::string waiting, missing;
};

Missing RanksOf(const CallId& id, const Pending& pending, const HeapCpu& heap) {
  const auto& group = std::get<2>(id);
  Missing ranks;
  for (int r = 0; r < static_cast<int>(group.size()); ++r) {
    bool arrived = false;
    for (const CpuCall& call : pending.ranks) arrived |= call.rank == r;
    if (!arrived && !heap.IsLocal(group[r])) continue;
    std::string& list = arrived ? ranks.waiting : ranks.missing;
    list += (list.empty() ? "" : ", ") + std::to_string(r);
  }
  return ranks;
}

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

std::string MissingRanks(const CallId& id, const Pending& pending, double deadline_s,
                         const HeapCpu& heap) {
  const auto [waiting, missing] = RanksOf(id, pending, heap);
  return std::string("jflux.") + NameOf(pending.ranks.front().op) + ": rank " + waiting +
         " waited " + Seconds(deadline_s) + " for rank " + missing +
         ", which never made this call. Every rank of the group must reach it: look for a "
         "condition that differs between ranks, or raise jflux.init(deadline_seconds=...).";
}

std::string WaitsLong(const CallId& id, const Pending& pending, const HeapCpu& heap) {
  const auto [waiting, missing] = RanksOf(id, pending, heap);
  return std::string("jflux: warning: jflux.") + NameOf(pending.ranks.front().op) + ": rank " +
         waiting + " has waited " + Seconds(heap.warn_s()) + ", since " + TimeOfDay(heap.warn_s()) +
         ", for rank " + missing + ", which has not made this call" +
         WhatFollows(heap.deadline_s());
}

void Warn(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
}

// Fails calls whose deadline has passed, and warns of calls that wait long. Runs on one thread,
// started with the first call.
void Watch() {
  Registry& calls = Calls();
  std::unique_lock<std::mutex> lock(calls.mutex);
  for (;;) {
    calls.changed.wait_for(lock, std::chrono::milliseconds(200));
    const auto heap = CurrentHeapCpu();
    if (heap != nullptr) {
      if (const auto text = heap->TakeWarning()) Warn(*text);
    }
    for (auto it = calls.pending.begin(); it != calls.pending.end();) {
      const bool gone = heap == nullptr || heap != it->second.heap;
      const uint64_t now = NowNs();
      if (!gone && now < it->second.deadline_ns) {
        if (!it->second.warned && it->second.deadline_ns - now < heap->limits()->warn_left_ns) {
          it->second.warned = true;
          Warn(WaitsLong(it->first, it->second, *heap));
        }
        ++it;
        continue;
      }
      const std::string error =
          gone ? "jflux: the symmetric heap was shut down while a call waited for its other ranks"
               : MissingRanks(it->first, it->second, heap->deadline_s(), *heap);
      for (CpuCall& call : it->second.ranks) {
        RunOnPool([done = std::move(call.done), error] { done(error); });
      }
      calls.failed[it->first] = error;
      calls.failed_order.push_back(it->first);
      if (calls.failed_order.size() > 4096) {
        calls.failed.erase(calls.failed_order.front());
        calls.failed_order.pop_front();
      }
      it = calls.pending.erase(it);
    }
  }
}

// Timeout of a handler's wait for its call; a call site that times out once does not wait again.
// The wait can deadlock: devices may start independent calls and XLA's own collectives in different
// orders, and then block each other.
constexpr auto kTimeout = std::chrono::seconds(1);

bool Misses(const CallId& id, const Pending& pending, int64_t device) {
  const auto& group = std::get<2>(id);
  if (std::find(group.begin(), group.end(), device) == group.end()) return false;
  for (const CpuCall& call : pending.ranks) {
    if (call.group[call.rank] == device) return false;
  }
  return true;
}

// Releases handlers that wait for `device`, which is about to wait for them in the call `id`. True
// if there were any.
bool ReleaseCrossed(Registry& calls, const CallId& id, const Pending& pending, int64_t device) {
  bool crossed = false;
  for (auto& [other_id, other] : calls.pending) {
    if (other_id == id || !Misses(other_id, other, device)) continue;
    for (const auto& waiter : other.waiters) {
      if (!Misses(id, pending, waiter->device()) || !waiter->Release()) continue;
      other.ranks.front().site->skips_wait = true;
      crossed = true;
    }
  }
  return crossed;
}

// Registers one rank's part. Returns what its handler must wait for, or null.
std::shared_ptr<Waiter> Register(CpuCall call) {
  const auto heap = CurrentHeapCpu();
  if (heap == nullptr) {
    RunOnPool([done = std::move(call.done)] {
      done("jflux: the symmetric heap is not initialised in this process; call jflux.init()");
    });
    return nullptr;
  }
  size_t local = 0;
  for (int64_t device : call.group) {
    if (heap->SegmentOf(device) == nullptr) {
      RunOnPool([done = std::move(call.done), device] {
        done("jflux: device " + std::to_string(device) +
             " is not part of the symmetric heap; call jflux.init() after all devices exist");
      });
      return nullptr;
    }
    local += heap->IsLocal(device);
  }
  Registry& calls = Calls();
  std::unique_lock<std::mutex> lock(calls.mutex);
  if (!calls.watching) {
    calls.watching = true;
    std::thread(Watch).detach();
  }
  const auto [run, is_new] = calls.occurrences.try_emplace(call.run_id);
  const int64_t occurrence = run->second[{call.site->number, call.group[call.rank]}]++;
  if (is_new) {
    calls.run_order.push_back(call.run_id);
    if (calls.run_order.size() > 1024) {
      calls.occurrences.erase(calls.run_order.front());
      calls.run_order.pop_front();
    }
  }
  CallId id{call.run_id, call.site->number, call.group, occurrence};
  if (const auto it = calls.failed.find(id); it != calls.failed.end()) {
    RunOnPool([done = std::move(call.done), error = it->second] { done(error); });
    return nullptr;
  }
  Pending& pending = calls.pending[id];
  if (pending.ranks.empty()) {
    pending.heap = heap;
    pending.deadline_ns = NowNs() + static_cast<uint64_t>(heap->deadline_s() * 1e9);
  }
  CpuCallSite* site = call.site;
  const auto waiter = std::make_shared<Waiter>(call.group[call.rank]);
  call.done = [waiter, done = std::move(call.done)](const std::string& error) {
    done(error);
    waiter->Release();
  };
  pending.ranks.push_back(std::move(call));
  if (ReleaseCrossed(calls, id, pending, waiter->device())) site->skips_wait = true;
  const bool waits = !site->skips_wait;
  if (waits) pending.waiters.push_back(waiter);
  if (pending.ranks.size() == local) {
    const uint64_t deadline_ns = NowNs() + static_cast<uint64_t>(heap->deadline_s() * 1e9);
    auto ranks = std::make_shared<std::vector<CpuCall>>(std::move(pending.ranks));
    calls.pending.erase(id);
    lock.unlock();
    RunOnPool(
        [id, heap, ranks, deadline_ns] { RunCohort(id, heap, std::move(*ranks), deadline_ns); });
  }
  return waits ? waiter : nullptr;
}

}  // namespace

void JoinCpuCall(CpuCall call) {
  CpuCallSite* site = call.site;
  const auto waiter = Register(std::move(call));
  if (waiter != nullptr && !waiter->Wait(kTimeout)) site->skips_wait = true;
}

}  // namespace jflux
