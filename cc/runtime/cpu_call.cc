#include "runtime/cpu_call.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "runtime/elastic_pool.h"
#include "runtime/fault.h"
#include "runtime/heap_cpu.h"

namespace jflux {
namespace {

// (run id, site, group, occurrence), as this process names them.
using CallId = std::tuple<int64_t, uint64_t, std::vector<int64_t>, int64_t>;

// A handler that waits for its call to complete.
class Waiter {
 public:
  explicit Waiter(int64_t device) : device_(device) {}
  int64_t device() const { return device_; }

  bool waits() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !released_;
  }

  void Release() {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

  // True if it was released before `limit_ns` had passed.
  bool WaitFor(uint64_t limit_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool in_time =
        changed_.wait_for(lock, std::chrono::nanoseconds(limit_ns), [this] { return released_; });
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
  WorkspaceKey key;
  std::vector<std::shared_ptr<Waiter>> waiters;  // handlers that wait for it
  std::vector<CpuCall> ranks;
  uint64_t deadline_ns = 0;
  bool warned = false;
};

// The low bits of CpuCallSite::name are the call's place in the program, the others name the
// program (jflux/_call/call_names.py).
constexpr int kCallBits = 20;

// A program, as all processes name it, and a group.
using ProgramOfGroup = std::pair<uint64_t, std::vector<int64_t>>;

// The runs of a program so far. The run ids of an executable are consecutive, from a first number
// that differs between processes.
struct RunsOfProgram {
  int64_t count = 0;
  std::vector<int64_t> last_ids;  // of each executable
};
constexpr int64_t kMostLeftOut = 1 << 16;

struct Run {
  int64_t id;
  uint64_t used_ns;                                       // when it made its last call
  std::map<std::pair<uint64_t, int64_t>, int64_t> calls;  // so far, by (call site, device)
  // For groups over several processes:
  std::map<ProgramOfGroup, int64_t> order;  // among the runs of the program
  std::map<uint64_t, uint64_t> sites;       // numbers, by name
};

struct Registry {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<CallId, Pending> pending;
  std::list<Run> runs;  // the one that has made the last call is last
  std::map<int64_t, std::list<Run>::iterator> run_of;
  std::map<ProgramOfGroup, RunsOfProgram> runs_of;  // over groups of several processes
  std::weak_ptr<HeapCpu> counted_of;                // since this heap was made
  std::map<CallId, CallError> failed;               // for ranks that arrive after a call has failed
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
  // The run is not hashed, so a collision could only happen within one execution, and with the
  // execution of another program that has the same number.
  return WorkspaceKey{(static_cast<uint64_t>(hi.Get()) << 32) | lo.Get(),
                      static_cast<uint64_t>(run)};
}

// State that the ranks of one call in this process share.
struct Cohort {
  std::shared_ptr<HeapCpu> heap;
  std::vector<CpuCall> ranks;
  WorkspaceLease lease;
  std::atomic<int> left;
  std::atomic<bool> failed{false};
};

uint64_t TimeoutNs(const HeapCpu& heap) { return NanosecondsOf(heap.deadline_s()); }

std::string Prefix(OpId op) { return std::string("jflux.") + NameOf(op) + ": "; }

// Completes ranks of a call that has failed. On threads of the pool, where XLA may go on as it
// likes; without any, on this one.
void Fail(std::vector<CpuCall> ranks, const CallError& error) {
  for (CpuCall& call : ranks) {
    const auto complete = [done = std::move(call.done), error] { done(error); };
    std::string no_thread;
    if (!RunOnPool({complete}, &no_thread)) complete();
  }
}

// The ranks will not make the call. Whoever asks for its workspace is told.
void Abandon(const WorkspaceKey& key, const HeapCpu& heap, const std::vector<CpuCall>& ranks) {
  if (ranks.empty() || heap.table() == nullptr) return;
  const auto world = static_cast<int32_t>(ranks.front().group.size());
  const auto count = static_cast<int32_t>(ranks.size());
  if (heap.table()->Abandon(key, world, count, NowNs() + TimeoutNs(heap))) return;
  std::fprintf(stderr, "%sthe directory of the symmetric heap is locked: did a process end?\n",
               Prefix(ranks.front().op).c_str());
}

// Runs the body; the error, or nothing.
CallError RunBody(Cohort& cohort, CpuCall& call) {
  SymmetricView view;  // Register has checked that the heap knows the devices
  cohort.heap->FillView(call.group, call.rank, cohort.lease.offset, &view);
  const TestHooks hooks = cohort.heap->hooks();
  if (hooks.max_delay_us > 0) {
    thread_local std::minstd_rand random(static_cast<uint32_t>(NowNs()) | 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % hooks.max_delay_us));
  }
  Fault fault{};
  uint64_t stop = 0;
  WaitContext ctx{&fault,
                  &stop,
                  /*deadline_ns=*/0,  // limits() have a timeout: each wait counts from its start
                  static_cast<uint32_t>(call.op),
                  call.rank,
                  hooks.skip_waits != 0,
                  cohort.heap->limits()};
  try {
    if (call.body(view, cohort.lease.epoch, ctx)) return {};
  } catch (const std::exception& e) {
    const bool memory = dynamic_cast<const std::bad_alloc*>(&e) != nullptr;
    return {memory ? ErrorKind::kResourceExhausted : ErrorKind::kInternal,
            Prefix(call.op) + "rank " + std::to_string(call.rank) + " failed: " + e.what()};
  }
  return {KindOf(fault), Describe(fault, cohort.heap->deadline_s())};
}

void RunRank(const std::shared_ptr<Cohort>& cohort, CpuCall& call) {
  CallError error = RunBody(*cohort, call);
  if (!error.empty()) cohort->failed = true;
  call.body = nullptr;
  auto done = std::move(call.done);
  if (--cohort->left == 0 &&
      !cohort->heap->table()->Release(cohort->lease, static_cast<int32_t>(cohort->ranks.size()),
                                      cohort->failed, NowNs() + TimeoutNs(*cohort->heap)) &&
      error.empty()) {
    error = {ErrorKind::kAborted,
             Prefix(call.op) +
                 "the directory of the symmetric heap is locked, so the call's workspace is lost: "
                 "did a process end?"};
  }
  done(error);
}

void RunCohort(const WorkspaceKey& key, std::shared_ptr<HeapCpu> heap, std::vector<CpuCall> ranks) {
  auto cohort = std::make_shared<Cohort>();
  cohort->heap = std::move(heap);
  cohort->ranks = std::move(ranks);
  const auto count = static_cast<int32_t>(cohort->ranks.size());
  cohort->left = count;
  std::string error;
  ErrorKind kind = ErrorKind::kInternal;
  const CpuCall& first = cohort->ranks.front();
  const auto world = static_cast<int32_t>(first.group.size());
  WorkspaceTable* table = cohort->heap->table();
  const uint64_t deadline_ns = NowNs() + TimeoutNs(*cohort->heap);
  if (!table->Acquire(
          key, world, first.bytes, cohort->heap->heap_bytes(), deadline_ns,
          [&](int64_t offset, int64_t bytes) { cohort->heap->ClearSignals(offset, bytes); },
          &cohort->lease, &error, &kind)) {
    Abandon(key, *cohort->heap, cohort->ranks);
    const std::string text = Prefix(first.op) + error;
    Fail(std::move(cohort->ranks), {kind, text});
    return;
  }
  std::vector<std::function<void()>> others;
  for (int32_t i = 1; i < count; ++i) {
    others.push_back([cohort, i] { RunRank(cohort, cohort->ranks[i]); });
  }
  if (!RunOnPool(std::move(others), &error)) {
    table->Release(cohort->lease, count, /*failed=*/true, deadline_ns);
    const std::string text = Prefix(first.op) + error;
    Fail(std::move(cohort->ranks), {ErrorKind::kResourceExhausted, text});
    return;
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

// Removes the calls that have failed from `pending`: (key, heap, ranks, error). Warns of those that
// wait long.
auto TakeFailed(Registry& calls) {
  std::vector<std::tuple<WorkspaceKey, std::shared_ptr<HeapCpu>, std::vector<CpuCall>, CallError>>
      taken;
  const auto heap = CurrentHeapCpu();
  for (auto it = calls.pending.begin(); it != calls.pending.end();) {
    Pending& pending = it->second;
    const bool gone = heap == nullptr || heap != pending.heap;
    const uint64_t now = NowNs();
    if (!gone && now < pending.deadline_ns) {
      if (!pending.warned && pending.deadline_ns - now < heap->limits()->warn_left_ns) {
        pending.warned = true;
        Warn(WaitsLong(it->first, pending, *heap));
      }
      ++it;
      continue;
    }
    const CallError error =
        gone ? CallError(ErrorKind::kAborted,
                         "jflux: the symmetric heap was shut down while a call waited for its "
                         "other ranks")
             : CallError(ErrorKind::kDeadlineExceeded,
                         MissingRanks(it->first, pending, heap->deadline_s(), *heap));
    taken.emplace_back(pending.key, pending.heap, std::move(pending.ranks), error);
    calls.failed[it->first] = error;
    calls.failed_order.push_back(it->first);
    if (calls.failed_order.size() > 4096) {
      calls.failed.erase(calls.failed_order.front());
      calls.failed_order.pop_front();
    }
    it = calls.pending.erase(it);
  }
  return taken;
}

// Fails calls whose deadline has passed, and warns of waits that last. Runs on one thread, started
// with the first call.
void Watch() {
  Registry& calls = Calls();
  for (;;) {
    std::unique_lock<std::mutex> lock(calls.mutex);
    calls.changed.wait_for(lock, std::chrono::milliseconds(200));
    auto taken = TakeFailed(calls);
    lock.unlock();
    if (const auto heap = CurrentHeapCpu()) {
      if (const auto text = heap->TakeWarning()) Warn(*text);
    }
    for (auto& [key, heap, ranks, error] : taken) {
      Abandon(key, *heap, ranks);
      Fail(std::move(ranks), error);
    }
  }
}

// ---- Handlers that wait for each other ----------------------------------------------------------

// The devices of this process that the call still lacks.
std::vector<int64_t> Missing(const CallId& id, const Pending& pending) {
  std::vector<int64_t> missing;
  for (int64_t device : std::get<2>(id)) {
    bool arrived = !pending.heap->IsLocal(device);
    for (const CpuCall& call : pending.ranks) arrived |= call.group[call.rank] == device;
    if (!arrived) missing.push_back(device);
  }
  return missing;
}

// Whether a handler of one of `devices` waits for `target`, directly or through other devices.
bool Waits(const Registry& calls, const std::vector<int64_t>& devices, int64_t target,
           std::set<int64_t>* seen) {
  for (int64_t device : devices) {
    if (device == target) return true;
    if (!seen->insert(device).second) continue;
    for (const auto& [id, pending] : calls.pending) {
      for (const auto& waiter : pending.waiters) {
        if (waiter->device() != device || !waiter->waits()) continue;
        if (Waits(calls, Missing(id, pending), target, seen)) return true;
      }
    }
  }
  return false;
}

// Whether a wait of `device` could leave XLA without a thread for a device that has no waiting
// handler yet. XLA has at least one thread for each device. A handler that waits takes one, and a
// device may wait in several handlers.
bool Starves(const Registry& calls, const HeapCpu& heap, int64_t device) {
  size_t waiting = 1;
  std::set<int64_t> devices{device};
  for (const auto& [id, pending] : calls.pending) {
    for (const auto& waiter : pending.waiters) {
      if (!waiter->waits()) continue;
      ++waiting;
      devices.insert(waiter->device());
    }
  }
  return waiting >= heap.devices().size() && devices.size() < heap.devices().size();
}

// A handler of a loop has returned before its call was complete.
void WarnOfLoop() {
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  std::fprintf(
      stderr,
      "WARNING: jflux: on the CPU, a call in a loop went on before it was complete: a rank "
      "was very late, or ranks started independent "
      "calls in different orders. If the program has XLA's own collectives in the loop, "
      "and others after it that do not depend on the loop, XLA may mix them up, and "
      "results may be wrong (docs/internals/cpu.md). Said once.\n");
}

// ---- Registration -------------------------------------------------------------------------------

// The run that makes the call. Counters of a run that may go on are kept: any of the last 1024
// runs, and any that made a call in the last two timeouts (no peer waits longer).
Run& RunOf(Registry& calls, const CpuCall& call, uint64_t timeout_ns) {
  const uint64_t now = NowNs();
  const auto [known, is_new] = calls.run_of.try_emplace(call.run_id);
  if (is_new) {
    known->second = calls.runs.insert(calls.runs.end(), Run{call.run_id, now, {}, {}, {}});
  } else {
    calls.runs.splice(calls.runs.end(), calls.runs, known->second);
  }
  Run& run = calls.runs.back();
  run.used_ns = now;
  const uint64_t kept_ns = 2 * std::max<uint64_t>(timeout_ns, 30'000'000'000);
  while (calls.runs.size() > 1024 && now - calls.runs.front().used_ns > kept_ns) {
    calls.run_of.erase(calls.runs.front().id);
    calls.runs.pop_front();
  }
  return run;
}

// The number of the run among the runs of its program. Runs of the executable since its last
// counted run, which made no call, count too: they may have failed in this process alone. Otherwise
// the next run would meet its peers' runs of an earlier number.
int64_t CountRun(RunsOfProgram& runs, int64_t id) {
  const auto last = std::find_if(runs.last_ids.begin(), runs.last_ids.end(), [&](int64_t known) {
    return known < id && id - known <= kMostLeftOut;
  });
  if (last == runs.last_ids.end()) {
    runs.last_ids.push_back(id);
    return runs.count++;
  }
  runs.count += id - *last;
  *last = id;
  return runs.count - 1;
}

// The call as all processes of its group name it. Nothing if the run has another call of that name:
// XLA has made two of one after Python had named it, and processes could mix them up.
std::optional<CallId> SharedName(Registry& calls, Run& run, const CpuCall& call,
                                 int64_t occurrence) {
  const CpuCallSite& site = *call.site;
  if (run.sites.try_emplace(site.name, site.number).first->second != site.number) {
    return std::nullopt;
  }
  const ProgramOfGroup program{site.name >> kCallBits, call.group};
  const auto [order, is_first] = run.order.try_emplace(program);
  if (is_first) order->second = CountRun(calls.runs_of[program], call.run_id);
  return CallId{order->second, site.name, call.group, occurrence};
}

// How long a handler waits at most, in a loop and elsewhere. XLA ends the process when one of its
// own collectives has waited for 40 seconds. Several handlers may reach their limits one after the
// other before that.
constexpr uint64_t kLoopNs = 30'000'000'000, kElsewhereNs = 2'000'000'000;
// How long it waits at most for ranks of other processes, in a loop and elsewhere.
constexpr uint64_t kRemoteLoopNs = 10'000'000'000, kRemoteNs = 1'000'000'000;

// How a handler waits after it has registered its rank's part.
struct Joined {
  std::shared_ptr<Waiter> waiter;  // null: it returns
  bool sees_all = true;            // all ranks are of this process
  uint64_t timeout_ns = 0;
};

Joined Register(CpuCall call) {
  const auto refuse = [&call](const std::string& text) {
    std::vector<CpuCall> ranks;
    ranks.push_back(std::move(call));
    Fail(std::move(ranks), {ErrorKind::kFailedPrecondition, text});
    return Joined{};
  };
  const auto heap = CurrentHeapCpu();
  if (heap == nullptr) {
    return refuse(
        "jflux: the symmetric heap is not initialised in this process; call jflux.init()");
  }
  if (heap->owner() != getpid()) {  // not by `refuse`: the pool's threads are not here
    call.done({ErrorKind::kFailedPrecondition,
               "jflux: this process was forked from one that has a symmetric heap, and can run no "
               "call; start processes with multiprocessing's \"spawn\" or \"forkserver\""});
    return Joined{};
  }
  size_t local = 0;
  for (int64_t device : call.group) {
    if (heap->SegmentOf(device) == nullptr) {
      return refuse("jflux: device " + std::to_string(device) +
                    " is not part of the symmetric heap; call jflux.init() after all devices "
                    "exist");
    }
    local += heap->IsLocal(device);
  }
  const uint64_t timeout_ns = TimeoutNs(*heap);
  Registry& calls = Calls();
  std::unique_lock<std::mutex> lock(calls.mutex);
  if (calls.counted_of.lock() != heap) {
    calls.counted_of = heap;
    calls.runs.clear();
    calls.run_of.clear();
    calls.runs_of.clear();
  }
  Run& run = RunOf(calls, call, timeout_ns);
  const int64_t occurrence = run.calls[{call.site->number, call.group[call.rank]}]++;
  const CallId id{call.run_id, call.site->number, call.group, occurrence};
  const auto name = local == call.group.size() ? id : SharedName(calls, run, call, occurrence);
  if (!name) {
    lock.unlock();
    return refuse(
        "jflux: XLA has copied a call of the program, so processes cannot tell the "
        "copies apart; run all devices of the program in one process");
  }
  const WorkspaceKey key = KeyOf(*name);
  std::string error;
  CallError refused;
  if (const auto it = calls.failed.find(id); it != calls.failed.end()) {
    refused = it->second;
  } else if (!calls.watching && !(calls.watching = StartThread(Watch, &error))) {
    refused = {ErrorKind::kResourceExhausted, Prefix(call.op) + error};
  }
  if (!refused.empty()) {
    lock.unlock();
    std::vector<CpuCall> ranks;
    ranks.push_back(std::move(call));
    Abandon(key, *heap, ranks);
    Fail(std::move(ranks), refused);
    return Joined{};
  }

  CpuCallSite* site = call.site;
  if (occurrence > 0) {
    site->loops = true;
    if (site->early_run == call.run_id) WarnOfLoop();
  }
  Pending& pending = calls.pending[id];
  if (pending.ranks.empty()) {
    pending.heap = heap;
    pending.key = key;
    pending.deadline_ns = NowNs() + timeout_ns;
  }
  Joined joined;
  joined.sees_all = local == call.group.size();
  joined.timeout_ns = timeout_ns;
  const bool waits = site->loops ? site->early_run != call.run_id : !site->skips_wait.load();
  if (site->waits && waits) {
    joined.waiter = std::make_shared<Waiter>(call.group[call.rank]);
    call.done = [waiter = joined.waiter, done = std::move(call.done)](const CallError& error) {
      done(error);
      waiter->Release();
    };
  }
  const int64_t device = call.group[call.rank], run_id = call.run_id;
  pending.ranks.push_back(std::move(call));
  if (joined.waiter != nullptr) {
    std::set<int64_t> seen;
    if (Waits(calls, Missing(id, pending), device, &seen) || Starves(calls, *heap, device)) {
      if (site->loops) WarnOfLoop();
      site->skips_wait = true;
      if (!joined.sees_all) site->early_run = run_id;
      joined.waiter = nullptr;
    } else {
      pending.waiters.push_back(joined.waiter);
    }
  }
  if (pending.ranks.size() < local) return joined;

  auto ranks = std::make_shared<std::vector<CpuCall>>(std::move(pending.ranks));
  calls.pending.erase(id);
  lock.unlock();
  if (!RunOnPool({[key, heap, ranks] { RunCohort(key, heap, std::move(*ranks)); }}, &error)) {
    Abandon(key, *heap, *ranks);
    const OpId op = ranks->front().op;
    Fail(std::move(*ranks), {ErrorKind::kResourceExhausted, Prefix(op) + error});
  }
  return joined;
}

}  // namespace

void JoinCpuCall(CpuCall call) {
  CpuCallSite* site = call.site;
  const int64_t run_id = call.run_id;
  const Joined joined = Register(std::move(call));
  if (joined.waiter == nullptr) return;
  const bool loops = site->loops;
  // A circle through handlers of other processes, or through XLA's own collectives, is not
  // detected. This wait would never end there, so it has a limit.
  uint64_t patience_ns = loops ? std::min(joined.timeout_ns / 4 * 3, kLoopNs)
                               : std::min(joined.timeout_ns / 4, kElsewhereNs);
  if (!joined.sees_all) patience_ns = std::min(patience_ns, loops ? kRemoteLoopNs : kRemoteNs);
  if (!joined.waiter->WaitFor(patience_ns)) {
    site->skips_wait = true;
    site->early_run = run_id;
    if (site->loops) WarnOfLoop();
  }
}

}  // namespace jflux
