// How the ranks of a call meet on the CPU back end: ranks that arrive in any order from any thread,
// loops, several groups, and ranks that never come.
#include "runtime/cpu_call.h"

#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/cpu_matmul.h"
#include "runtime/elastic_pool.h"
#include "runtime/heap_cpu.h"
#include "testing.h"

namespace jflux {
namespace {

void UseHeap(int devices, double deadline_s) {
  std::vector<int64_t> ids;
  for (int i = 0; i < devices; ++i) ids.push_back(i);
  std::string error;
  std::shared_ptr<Heap> heap = HeapCpu::Create({ids, {}, 64 << 20, deadline_s}, &error);
  EXPECT(heap != nullptr) << error;
  SetCurrentHeap(HeapPlatform::kCpu, heap);
}

// Collects the results with which calls complete.
class Completions {
 public:
  std::function<void(const std::string&)> Expect() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++expected_;
    return [this](const std::string& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      errors_.push_back(error);
      changed_.notify_all();
    };
  }
  // The results of all calls so far, in any order.
  std::vector<std::string> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool all = changed_.wait_for(lock, std::chrono::seconds(60),
                                       [this] { return errors_.size() == expected_; });
    EXPECT(all) << errors_.size() << " of " << expected_ << " calls have completed";
    return errors_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t expected_ = 0;
  std::vector<std::string> errors_;
};

// A call site whose handlers do not wait.
CpuCallSite* Impatient(uint64_t number) {
  static std::mutex mutex;
  static std::map<uint64_t, CpuCallSite> sites;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [site, made] = sites.try_emplace(number);
  if (made) {  // once shared, other threads read it
    site->second.number = number;
    site->second.waits = false;
  }
  return &site->second;
}

// A call in which every rank sends `value` to every rank and checks what it receives.
CpuCall Exchange(int64_t run, CpuCallSite* site, std::vector<int64_t> group, int rank,
                 uint64_t value, Completions* completions) {
  CpuCall call;
  call.op = kAllGatherMatmulId;
  call.run_id = run;
  call.site = site;
  call.group = std::move(group);
  call.rank = rank;
  const uint64_t number = site->number;  // the site may end before the body does
  const WorkspaceLayout workspace = WorkspaceLayout::For(0, 0);
  call.bytes = workspace.TotalBytes();
  call.body = [=](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
    const int64_t data = workspace.DataOffset(epoch), signals = workspace.SignalOffset(epoch);
    const Signal signal = MakeSignal(epoch, 7);
    for (int peer = 0; peer < view.world; ++peer) {
      view.At<uint64_t>(peer, data)[rank] = value;
      StoreRelease(&view.At<Signal>(peer, signals)[rank], signal);
    }
    for (int peer = 0; peer < view.world; ++peer) {
      if (!WaitSignal(&view.At<Signal>(rank, signals)[peer], signal, peer, 0, ctx)) return false;
      EXPECT_EQ(view.At<uint64_t>(rank, data)[peer], value) << "run " << run << " site " << number;
    }
    return true;
  };
  call.done = completions->Expect();
  return call;
}

void ExpectSuccess(Completions* completions, size_t count) {
  const auto errors = completions->Wait();
  EXPECT_EQ(errors.size(), count);
  for (const auto& e : errors) EXPECT(e.empty()) << e;
  EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);
}

// The first test, while the pool has no threads.
TEST(WithoutThreadsACallIsAnError) {
  constexpr int kWorld = 8;
  std::vector<int64_t> group;
  for (int i = 0; i < kWorld; ++i) group.push_back(i);
  UseHeap(kWorld, 60);
  int run = 100;
  const auto make_call = [&](int world, bool fails) {
    Completions completions;
    ++run;
    const std::vector<int64_t> some(group.begin(), group.begin() + world);
    for (int rank = 0; rank < world; ++rank) {
      JoinCpuCall(Exchange(run, Impatient(1), some, rank, 1, &completions));
    }
    for (const auto& e : completions.Wait()) {
      EXPECT((e.find("cannot start a thread") != std::string::npos) == fails) << e;
      EXPECT(e.empty() != fails) << e;
    }
    EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);
  };
  RefuseThreads(true);
  make_call(2, true);  // no thread for deadlines
  RefuseThreads(false);
  make_call(1, false);
  RefuseThreads(true);
  make_call(kWorld, true);  // one idle thread has begun with it
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  make_call(1, false);  // and is enough for this
  RefuseThreads(false);
  make_call(kWorld, false);
}

TEST(RanksMayArriveInAnyOrder) {
  constexpr int kWorld = 4, kRuns = 20, kSites = 6;
  UseHeap(kWorld, 60);
  Completions completions;
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kWorld; ++rank) {
    devices.emplace_back([&, rank] {
      std::mt19937 random(rank);
      for (int run = 0; run < kRuns; ++run) {
        std::vector<uint64_t> sites(kSites);
        for (int i = 0; i < kSites; ++i) sites[i] = i;
        std::shuffle(sites.begin(), sites.end(), random);
        for (uint64_t site : sites) {
          JoinCpuCall(
              Exchange(run, Impatient(site), {0, 1, 2, 3}, rank, 100 * run + site, &completions));
        }
      }
    });
  }
  for (auto& d : devices) d.join();
  ExpectSuccess(&completions, kWorld * kRuns * kSites);
}

TEST(AHandlerWaitsForItsCall) {
  constexpr int kWorld = 3, kRuns = 50;
  UseHeap(kWorld, 60);
  Completions completions;
  CpuCallSite site;
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kWorld; ++rank) {
    devices.emplace_back([&, rank] {
      for (int run = 0; run < kRuns; ++run) {
        std::atomic<bool> done{false};
        CpuCall call = Exchange(6000 + run, &site, {0, 1, 2}, rank, run, &completions);
        call.done = [&done, complete = std::move(call.done)](const CallError& error) {
          complete(error);
          done = true;
        };
        JoinCpuCall(std::move(call));
        EXPECT(done) << "rank " << rank << " run " << run;
      }
    });
  }
  for (auto& d : devices) d.join();
  EXPECT(!site.skips_wait);
  ExpectSuccess(&completions, kWorld * kRuns);
}

TEST(CrossedHandlersLetGo) {
  UseHeap(2, 60);
  Completions completions;
  const uint64_t start = NowNs();
  CpuCallSite sites[2];
  sites[0].number = 1;
  sites[1].number = 2;
  std::vector<std::thread> devices;
  for (int rank = 0; rank < 2; ++rank) {
    devices.emplace_back([&, rank] {
      for (int i = 0; i < 2; ++i) {  // rank 1 makes the second call first
        JoinCpuCall(Exchange(7000, &sites[i ^ rank], {0, 1}, rank, i ^ rank, &completions));
      }
    });
  }
  for (auto& d : devices) d.join();
  ExpectSuccess(&completions, 4);
  EXPECT(NowNs() - start < 900'000'000) << "they have waited for each other";
}

TEST(CirclesLetGo) {
  // Device i waits in call i, with device i + 1, which waits in call i + 1.
  constexpr int kWorld = 4;
  UseHeap(kWorld, 60);
  Completions completions;
  CpuCallSite sites[kWorld];
  for (int i = 0; i < kWorld; ++i) sites[i].number = 10 + i;
  const uint64_t start = NowNs();
  std::vector<std::thread> devices;
  for (int device = 0; device < kWorld; ++device) {
    devices.emplace_back([&, device] {
      const int next = (device + 1) % kWorld, last = (device + kWorld - 1) % kWorld;
      JoinCpuCall(Exchange(7100, &sites[device], {device, next}, 0, device, &completions));
      JoinCpuCall(Exchange(7100, &sites[last], {last, device}, 1, last, &completions));
    });
  }
  for (auto& d : devices) d.join();
  ExpectSuccess(&completions, 2 * kWorld);
  EXPECT(NowNs() - start < 5'000'000'000) << "they have waited for each other";
}

TEST(TimeoutEndsOnce) {
  UseHeap(2, 2);
  Completions completions;
  CpuCallSite site;
  for (int run : {8000, 8001}) {
    const uint64_t start = NowNs();
    JoinCpuCall(Exchange(run, &site, {0, 1}, 0, run, &completions));  // rank 1 is not there yet
    EXPECT(site.skips_wait);
    EXPECT((NowNs() - start > 450'000'000) == (run == 8000));
    JoinCpuCall(Exchange(run, &site, {0, 1}, 1, run, &completions));
  }
  EXPECT(!site.loops);
  ExpectSuccess(&completions, 4);
}

// A rank that is late once, by more than a handler outside of loops waits.
TEST(AHandlerOfALoopWaitsForALateRank) {
  UseHeap(2, 4);
  Completions completions;
  CpuCallSite site;
  for (int run : {8100, 8101}) {
    std::vector<std::thread> devices;
    for (int rank = 0; rank < 2; ++rank) {
      devices.emplace_back([&, rank] {
        for (int i = 0; i < 6; ++i) {
          if (rank == 1 && i == 3 && run == 8100) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1500));
          }
          std::atomic<bool> done{false};
          CpuCall call = Exchange(run, &site, {0, 1}, rank, 10 * run + i, &completions);
          call.done = [&done, complete = std::move(call.done)](const CallError& error) {
            complete(error);
            done = true;
          };
          JoinCpuCall(std::move(call));
          EXPECT(done) << "rank " << rank << " run " << run << " iteration " << i;
        }
      });
    }
    for (auto& d : devices) d.join();
  }
  EXPECT(site.loops && !site.skips_wait);
  ExpectSuccess(&completions, 24);
}

// What fprintf(stderr) writes while it exists.
class Stderr {
 public:
  Stderr() : saved_(dup(2)) {
    std::fflush(stderr);
    dup2(fileno(file_), 2);
  }
  std::string Read() {
    std::fflush(stderr);
    dup2(saved_, 2);
    std::rewind(file_);
    std::string text(1 << 16, 0);
    text.resize(std::fread(text.data(), 1, text.size(), file_));
    return text;
  }
  ~Stderr() {
    close(saved_);
    std::fclose(file_);
  }

 private:
  std::FILE* file_ = std::tmpfile();
  int saved_;
};

TEST(CrossedCallsInALoopAreToldOnce) {
  UseHeap(2, 60);
  Completions completions;
  CpuCallSite sites[2];
  sites[0].number = 21;
  sites[1].number = 22;
  Stderr captured;
  std::vector<std::thread> devices;
  for (int rank = 0; rank < 2; ++rank) {
    devices.emplace_back([&, rank] {
      for (int i = 0; i < 10; ++i) {  // rank 1 makes each iteration's second call first
        const int site = (i ^ rank) & 1;
        JoinCpuCall(Exchange(8200, &sites[site], {0, 1}, rank, i / 2 * 2 + site, &completions));
      }
    });
  }
  for (auto& d : devices) d.join();
  ExpectSuccess(&completions, 20);
  const std::string told = captured.Read();
  const size_t first = told.find("WARNING: jflux: on the CPU, a call in a loop went on");
  EXPECT(first != std::string::npos) << told;
  EXPECT(told.find("WARNING", first + 1) == std::string::npos) << told;
  for (const CpuCallSite& site : sites) EXPECT(site.loops);
}

TEST(OneRankMayRunAhead) {
  UseHeap(2, 60);
  Completions completions;
  for (int rank : {1, 0}) {
    for (int i = 0; i < 20; ++i) {  // iterations of a loop: same run, same site
      JoinCpuCall(Exchange(1000, Impatient(1), {0, 1}, rank, i, &completions));
    }
  }
  ExpectSuccess(&completions, 40);
}

TEST(GroupsRunSideBySide) {
  UseHeap(4, 60);
  Completions completions;
  for (int i = 0; i < 10; ++i) {
    for (int rank : {0, 1}) {
      JoinCpuCall(Exchange(2000 + i, Impatient(1), {0, 2}, rank, 2 * i, &completions));
      JoinCpuCall(Exchange(2000 + i, Impatient(1), {3, 1}, rank, 2 * i + 1, &completions));
    }
  }
  ExpectSuccess(&completions, 40);
}

// Two heaps of this process, which play two processes with a device each.
std::array<std::shared_ptr<Heap>, 2> TwoProcesses(double deadline_s) {
  std::array<std::shared_ptr<Heap>, 2> heaps;
  std::string error, handles[2];
  for (int process = 0; process < 2; ++process) {
    HeapConfig config{{process}, {}, 64 << 20, deadline_s};
    config.leads = process == 0;
    heaps[process] = HeapCpu::Create(config, &error);
    EXPECT(heaps[process] != nullptr) << error;
    EXPECT(heaps[process]->Export(&handles[process], &error)) << error;
  }
  for (int process = 0; process < 2; ++process) {
    EXPECT(heaps[process]->Attach(handles[1 - process], &error)) << error;
  }
  return heaps;
}

// They have compiled different things besides.
TEST(ProcessesNameACallByItsPlaceAndTheOrderOfRuns) {
  const auto heaps = TwoProcesses(60);
  Completions completions;
  CpuCallSite sites[2][2];
  uint64_t number = 100;
  for (int process = 0; process < 2; ++process) {
    SetCurrentHeap(HeapPlatform::kCpu, heaps[process]);
    for (int place : {1, 0}) {  // the calls of a program
      CpuCallSite& site = sites[process][place];
      site.number = ++number;
      site.name = (77 << 20) + place;
      site.waits = false;
    }
    for (int run = 0; run < 3; ++run) {
      for (int i = 0; i < 4; ++i) {  // each of the two in two iterations, in another order
        const int place = (i ^ process) & 1;
        JoinCpuCall(Exchange(1000 * process + run, &sites[process][place], {0, 1}, process,
                             100 * run + 10 * place + i / 2, &completions));
      }
    }
  }
  ExpectSuccess(&completions, 2 * 3 * 4);
  // A second call of a name, in one run.
  CpuCallSite copy;
  copy.number = ++number;
  copy.name = sites[1][0].name;
  JoinCpuCall(Exchange(1002, &copy, {0, 1}, 1, 0, &completions));
  EXPECT(completions.Wait().back().find("XLA has copied a call") != std::string::npos);
  SetCurrentHeap(HeapPlatform::kCpu, nullptr);
}

// It has failed before: the other process waits in vain for that run's call, and for no other.
TEST(ARunWithoutCallsInOneProcessIsCounted) {
  const auto heaps = TwoProcesses(2);
  Completions completions;
  CpuCallSite sites[2];
  for (int process = 0; process < 2; ++process) {
    SetCurrentHeap(HeapPlatform::kCpu, heaps[process]);
    sites[process].number = 200 + process;
    sites[process].name = 78 << 20;
    sites[process].waits = false;
    for (int run = 0; run < 3; ++run) {
      if (process == 1 && run == 1) continue;
      JoinCpuCall(Exchange(5000 + 1000 * process + run, &sites[process], {0, 1}, process, run,
                           &completions));
    }
  }
  int failed = 0;
  for (const auto& error : completions.Wait()) {
    failed += !error.empty();
    EXPECT(error.empty() || error.find("rank 0 waited 2 s for rank 1") != std::string::npos)
        << error;
  }
  EXPECT_EQ(failed, 1);
  SetCurrentHeap(HeapPlatform::kCpu, nullptr);
}

TEST(AMissingRankIsNamed) {
  UseHeap(3, 0.2);
  Completions completions;
  for (int rank : {0, 2})
    JoinCpuCall(Exchange(3000, Impatient(1), {0, 1, 2}, rank, 1, &completions));
  for (const auto& e : completions.Wait()) {
    EXPECT(e.find("rank 0, 2 waited 0.2 s for rank 1") != std::string::npos) << e;
  }
  // A late rank gets the same error, at once.
  JoinCpuCall(Exchange(3000, Impatient(1), {0, 1, 2}, 1, 1, &completions));
  const auto errors = completions.Wait();
  EXPECT_EQ(errors.size(), 3u);
  EXPECT_EQ(errors.back(), errors.front());
  EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);
}

TEST(CountersOfARunThatGoesOnAreKept) {
  UseHeap(4, 60);
  Completions completions;
  constexpr int kShort = 3000;
  for (int i = 0; i < 5; ++i) {
    JoinCpuCall(Exchange(9000, Impatient(1), {0, 1}, 0, i, &completions));
  }
  for (int run = 0; run < kShort; ++run) {
    for (int rank : {0, 1}) {
      JoinCpuCall(Exchange(10'000 + run, Impatient(1), {2, 3}, rank, run, &completions));
    }
  }
  for (int i = 5; i < 7; ++i) {
    JoinCpuCall(Exchange(9000, Impatient(1), {0, 1}, 0, i, &completions));
  }
  for (int i = 0; i < 7; ++i) {
    JoinCpuCall(Exchange(9000, Impatient(1), {0, 1}, 1, i, &completions));
  }
  ExpectSuccess(&completions, 14 + 2 * kShort);
}

// That this process has used.
double ProcessorSeconds() {
  timespec used;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

// Sanitizers take a multiple of the time, and more for each thread.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// More calls at once than the heap has room for, all with their ranks there: those that wait for
// room leave the processors to those that run.
TEST(CallsThatWaitForRoomLeaveTheOthersTime) {
  const double before_s = ProcessorSeconds();
  cpu_set_t all, one;  // they have one processor
  sched_getaffinity(0, sizeof(all), &all);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof(one), &one);
  UseHeap(2, 60);
  Completions completions;
  constexpr int kCalls = kSanitized ? 700 : 3000;  // there is room for 478
  std::promise<void> all_joined;
  const std::shared_future<void> start(all_joined.get_future());
  for (int run = 0; run < kCalls; ++run) {
    for (int rank : {0, 1}) {
      CpuCall call = Exchange(20'000 + run, Impatient(1), {0, 1}, rank, run, &completions);
      call.body = [start, body = std::move(call.body)](const SymmetricView& view, uint64_t epoch,
                                                       const WaitContext& ctx) {
        start.wait();
        return body(view, epoch, ctx);
      };
      JoinCpuCall(std::move(call));
    }
  }
  all_joined.set_value();
  ExpectSuccess(&completions, 2 * kCalls);
  sched_setaffinity(0, sizeof(all), &all);
  const double used_s = ProcessorSeconds() - before_s;
  // 1, and 25 if each polled as often as it would alone.
  EXPECT(kSanitized || used_s < 12) << used_s;
}

// A product may take longer than a wait may: each tile is progress.
TEST(WorkIsNoWait) {
  UseHeap(2, 0.3);
  Completions completions;
  std::vector<float> w(64 * 64, 1), x(64 * 64, 1);
  for (int rank = 0; rank < 2; ++rank) {
    CpuCall call = Exchange(4100, Impatient(1), {0, 1}, rank, 1, &completions);
    call.body = [&, body = std::move(call.body)](const SymmetricView& view, uint32_t epoch,
                                                 const WaitContext& ctx) {
      const CpuRhs rhs(w.data(), DType::kF32, 64, 64, false);
      std::vector<float> y(64 * 64);
      const uint64_t end = NowNs() + 900'000'000;
      while (NowNs() < end) rhs.Multiply(x.data(), 64, 0, 64, y.data());
      return body(view, epoch, ctx);
    };
    JoinCpuCall(std::move(call));
  }
  ExpectSuccess(&completions, 2);
}

TEST(ABodyThatThrowsIsAnError) {
  UseHeap(2, 0.2);
  Completions completions;
  for (int rank = 0; rank < 2; ++rank) {
    CpuCall call = Exchange(4200, Impatient(1), {0, 1}, rank, 1, &completions);
    if (rank == 1) {
      call.body = [](const SymmetricView&, uint32_t, const WaitContext&) -> bool {
        throw std::bad_alloc();
      };
    }
    JoinCpuCall(std::move(call));
  }
  auto errors = completions.Wait();
  std::sort(errors.begin(), errors.end());
  EXPECT(errors[0].find("rank 0 waited 0.2 s for rank 1") != std::string::npos) << errors[0];
  EXPECT(errors[1].find("rank 1 failed: std::bad_alloc") != std::string::npos) << errors[1];
  EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);
}

// How a call of one rank ends whose body does so.
ErrorKind KindOfEnd(std::function<bool(const WaitContext&)> body,
                    int64_t bytes = WorkspaceLayout::For(0, 0).TotalBytes()) {
  static int run = 5000;
  std::promise<ErrorKind> kind;
  Completions unused;
  CpuCall call = Exchange(++run, Impatient(1), {0}, 0, 1, &unused);
  call.bytes = bytes;
  call.body = [&](const SymmetricView&, uint64_t, const WaitContext& ctx) { return body(ctx); };
  call.done = [&](const CallError& error) { kind.set_value(error.kind); };
  JoinCpuCall(std::move(call));
  return kind.get_future().get();
}

TEST(EachFailureHasItsKind) {
  UseHeap(1, 0.2);
  const auto ends = [](FaultKind kind) {
    return KindOfEnd([kind](const WaitContext& ctx) {
      ReportFault(ctx, kind, 0, 3, 1, 0);
      return false;
    });
  };
  const auto passes = [](const WaitContext&) { return true; };
  EXPECT(KindOfEnd(passes) == ErrorKind::kNone);
  EXPECT(ends(FaultKind::kTimeout) == ErrorKind::kDeadlineExceeded);
  EXPECT(ends(FaultKind::kMismatch) == ErrorKind::kInvalidArgument);
  EXPECT(ends(FaultKind::kAborted) == ErrorKind::kAborted);
  EXPECT(KindOfEnd([](const WaitContext&) -> bool { throw std::bad_alloc(); }) ==
         ErrorKind::kResourceExhausted);
  EXPECT(KindOfEnd([](const WaitContext&) -> bool { throw std::runtime_error("no"); }) ==
         ErrorKind::kInternal);
  EXPECT(KindOfEnd(passes, 65 << 20) == ErrorKind::kResourceExhausted);
  SetCurrentHeap(HeapPlatform::kCpu, nullptr);
  EXPECT(KindOfEnd(passes) == ErrorKind::kFailedPrecondition);
}

TEST(AForkMakesNoCall) {
  UseHeap(1, 60);
  EXPECT(KindOfEnd([](const WaitContext&) { return true; }) == ErrorKind::kNone);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const ErrorKind kind = KindOfEnd([](const WaitContext&) { return true; });
    _exit(kind == ErrorKind::kFailedPrecondition ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT(KindOfEnd([](const WaitContext&) { return true; }) == ErrorKind::kNone);
}

TEST(AFailedBodyFailsItsRankOnly) {
  UseHeap(2, 0.2);
  Completions completions;
  CpuCall good = Exchange(4000, Impatient(1), {0, 1}, 0, 1, &completions);
  CpuCall bad = Exchange(4000, Impatient(1), {0, 1}, 1, 1, &completions);
  bad.body = [body = std::move(bad.body)](const SymmetricView& view, uint64_t epoch,
                                          const WaitContext& ctx) {
    body(view, epoch, ctx);
    ReportFault(ctx, FaultKind::kTimeout, 0, 3, 1, 0);
    return false;
  };
  JoinCpuCall(std::move(good));
  JoinCpuCall(std::move(bad));
  auto errors = completions.Wait();
  std::sort(errors.begin(), errors.end());
  EXPECT(errors[0].empty());
  EXPECT(errors[1].find("rank 1 waited 0.2 s for rank 0 (item 3") != std::string::npos)
      << errors[1];
  EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);  // both ranks are done with it
}

TEST(WithoutAHeapTheErrorSaysWhatToDo) {
  SetCurrentHeap(HeapPlatform::kCpu, nullptr);
  Completions completions;
  JoinCpuCall(Exchange(5000, Impatient(1), {0, 1}, 0, 1, &completions));
  EXPECT(completions.Wait()[0].find("jflux.init()") != std::string::npos);
  UseHeap(2, 60);
  JoinCpuCall(Exchange(5000, Impatient(2), {0, 7}, 0, 1, &completions));
  EXPECT(completions.Wait()[1].find("device 7 is not part of") != std::string::npos);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
