// How the ranks of a call meet on the CPU back end: ranks that arrive in any order from any thread,
// loops, several groups, and ranks that never come.
#include "runtime/cpu_call.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/all_gather_matmul/all_gather_matmul.h"
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
    site->second.skips_wait = true;
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
      EXPECT_EQ(view.At<uint64_t>(rank, data)[peer], value)
          << "run " << run << " site " << site->number;
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
        call.done = [&done, complete = std::move(call.done)](const std::string& error) {
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

TEST(TimeoutEndsOnce) {
  UseHeap(2, 60);
  Completions completions;
  CpuCallSite site;
  for (int run : {8000, 8001}) {
    const uint64_t start = NowNs();
    JoinCpuCall(Exchange(run, &site, {0, 1}, 0, run, &completions));  // rank 1 is not there yet
    EXPECT(site.skips_wait);
    EXPECT((NowNs() - start > 900'000'000) == (run == 8000));
    JoinCpuCall(Exchange(run, &site, {0, 1}, 1, run, &completions));
  }
  ExpectSuccess(&completions, 4);
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
  EXPECT(errors[1].find("rank 1 waited 0.2 s for rank 0 (unit 3") != std::string::npos)
      << errors[1];
  EXPECT(CurrentHeapCpu()->table()->BytesInUse() > 0);  // the workspace is lost
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
