// The device primitives, as kernels use them: 1 to 8 ranks of one thread each, or of several
// threads that share a scope, like the threads of a block.
#include "jflux/shmem.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "jflux/call.h"
#include "ranks.h"
#include "testing.h"

namespace jflux {
namespace {

using shmem::Context;
using shmem::internal::AwaitHellos;
using shmem::internal::SendHellos;

// A scope of several host threads. Each first sets the team it belongs to.
struct Team {
  explicit Team(int threads) : size(threads), votes(threads) {
    pthread_barrier_init(&barrier, nullptr, threads);
  }
  ~Team() { pthread_barrier_destroy(&barrier); }
  int size;
  std::vector<char> votes;
  pthread_barrier_t barrier;
};
struct TeamScope {
  static thread_local Team* team;
  static thread_local int number;
  static int rank() { return number; }
  static int size() { return team->size; }
  static void sync() { pthread_barrier_wait(&team->barrier); }
  static bool all(bool ok) {
    team->votes[number] = ok;
    sync();
    ok = std::accumulate(team->votes.begin(), team->votes.end(), true, std::logical_and<>());
    sync();
    return ok;
  }
};
thread_local Team* TeamScope::team;
thread_local int TeamScope::number;

// A call: what each rank's thread does with its context.
class ShmemCall : public AnyCall {
 public:
  using Body = std::function<bool(const Context&)>;

  ShmemCall(int64_t data_bytes, int64_t signals, Body body, uint32_t signature = 7)
      : workspace_(shmem::WorkspaceFor(data_bytes, signals)),
        signature_(signature),
        body_(std::move(body)) {}

  WorkspaceLayout Workspace() const { return workspace_; }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext wait) override {
    wait.op = op_;
    const Context ctx{view, workspace_, epoch, signature_, wait, 0, 1};
    return shmem::internal::RunCall(ctx, body_);
  }
  int64_t Wrong() const override { return 0; }  // bodies check what they receive

 private:
  // Taken once: its lock would order ranks.
  const uint32_t op_ = static_cast<uint32_t>(CustomOp("custom_call(test)"));
  WorkspaceLayout workspace_;
  uint32_t signature_;
  Body body_;
};

// Like a kernel of one block of `threads` threads.
class TeamCall : public ShmemCall {
 public:
  TeamCall(int64_t data_bytes, int64_t signals, int threads, Body body)
      : ShmemCall(data_bytes, signals, [=](const Context& ctx) {
          Team team(threads);
          std::atomic<int> failed{0};
          std::vector<std::thread> running;
          for (int t = 0; t < threads; ++t) {
            running.emplace_back([&, t] {
              TeamScope::team = &team;
              TeamScope::number = t;
              failed += !body(ctx);
            });
          }
          for (auto& t : running) t.join();
          return failed == 0;
        }) {}
};

void Expect(PlainHeap& heap, const std::vector<AnyCall*>& calls, RunOptions options = {}) {
  options.deadline_s = 30;
  const std::string error = Join(RunRanks(heap, calls, options));
  EXPECT(error.empty()) << error;
}

std::vector<AnyCall*> Times(AnyCall* call, int times) { return std::vector<AnyCall*>(times, call); }

// The data that `from` sends to `to` in a call.
int32_t Value(const Context& ctx, int from, int to, int64_t i) {
  return static_cast<int32_t>(ctx.epoch * 100000 + from * 10000 + to * 1000 + i);
}

std::vector<int32_t> Values(const Context& ctx, int from, int to, int64_t count) {
  std::vector<int32_t> v(count);
  for (int64_t i = 0; i < count; ++i) v[i] = Value(ctx, from, to, i);
  return v;
}

void ExpectValues(const Context& ctx, const int32_t* got, int from, int to, int64_t count,
                  const char* what) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong += got[i] != Value(ctx, from, to, i);
  EXPECT_EQ(wrong, 0) << what << " from " << from << " to " << to << " of " << ctx.view.world;
}

constexpr int64_t kCount = 37;  // not a multiple of a vector

// Calls every function once, with the suffix of a scope. On a host every scope is one thread.
#define JFLUX_EVERYTHING(name, suffix)                                                            \
  bool name(const Context& ctx) {                                                                 \
    using namespace shmem;                                                                        \
    const int me = my_pe(ctx), n = n_pes(ctx);                                                    \
    const auto slot = [&](int area, int pe) {                                                     \
      return ctx.data<int32_t>((area * n + pe) * kCount * 4);                                     \
    };                                                                                            \
    int64_t taken = 0;                                                                            \
    const auto signals = [&](int64_t count) { return ctx.signal((taken += count) - count); };     \
    /* Each rank to each: put, then a signal; and put_signal. */                                  \
    Signal *puts = signals(n), *put_signals = signals(n), *in_bytes = signals(n);                 \
    for (int pe = 0; pe < n; ++pe) {                                                              \
      const auto v = Values(ctx, me, pe, kCount);                                                 \
      put##suffix(ctx, slot(0, me), v.data(), 20, pe);                                            \
      putmem##suffix(ctx, slot(0, me) + 20, v.data() + 20, 4 * (kCount - 20), pe);                \
      signal_set##suffix(ctx, puts + me, pe);                                                     \
      put_signal##suffix(ctx, slot(1, me), v.data(), kCount, put_signals + me, pe);               \
      putmem_signal##suffix(ctx, slot(2, me), v.data(), 4 * kCount, in_bytes + me, pe);           \
    }                                                                                             \
    for (int pe = 0; pe < n; ++pe) {                                                              \
      if (!signal_wait_until##suffix(ctx, puts + pe, pe)) return false;                           \
      ExpectValues(ctx, slot(0, pe), pe, me, kCount, "put");                                      \
      if (!signal_wait_until##suffix(ctx, put_signals + pe, pe)) return false;                    \
      ExpectValues(ctx, slot(1, pe), pe, me, kCount, "put_signal");                               \
      if (!signal_wait_until##suffix(ctx, in_bytes + pe, pe)) return false;                       \
      ExpectValues(ctx, slot(2, pe), pe, me, kCount, "putmem_signal");                            \
    }                                                                                             \
    /* Stores through ptr, and what others then get. */                                           \
    for (int pe = 0; pe < n; ++pe) {                                                              \
      for (int64_t i = 0; i < kCount; ++i) ptr(ctx, slot(3, me), pe)[i] = Value(ctx, me, pe, i);  \
      for (int64_t i = 0; i < kCount; ++i) slot(4, pe)[i] = Value(ctx, me, pe, i);                \
    }                                                                                             \
    fence(ctx);                                                                                   \
    if (!barrier_all##suffix(ctx, signals(n))) return false;                                      \
    for (int pe = 0; pe < n; ++pe) {                                                              \
      ExpectValues(ctx, slot(3, pe), pe, me, kCount, "ptr");                                      \
      std::vector<int32_t> got(kCount);                                                           \
      get##suffix(ctx, got.data(), slot(4, me), 11, pe);                                          \
      getmem##suffix(ctx, got.data() + 11, slot(4, me) + 11, 4 * (kCount - 11), pe);              \
      ExpectValues(ctx, got.data(), pe, me, kCount, "get");                                       \
    }                                                                                             \
    for (int root = 0; root < n; ++root) {                                                        \
      const auto v = Values(ctx, root, root, kCount);                                             \
      int32_t* dest = slot(5, root);                                                              \
      if (!broadcast##suffix(ctx, dest, v.data(), 5, signals(1), root)) return false;             \
      if (!broadcastmem##suffix(ctx, dest + 5, v.data() + 5, 4 * (kCount - 5), signals(1), root)) \
        return false;                                                                             \
      ExpectValues(ctx, dest, root, root, kCount, "broadcast");                                   \
    }                                                                                             \
    quiet(ctx);                                                                                   \
    return barrier_all##suffix(ctx, signals(n)); /* peers have got what they wanted */            \
  }
JFLUX_EVERYTHING(EverythingThread, )
JFLUX_EVERYTHING(EverythingWarp, _warp)
JFLUX_EVERYTHING(EverythingBlock, _block)
#undef JFLUX_EVERYTHING

constexpr int64_t kAreas = 6;

void CheckEverything(int world, uint64_t first_epoch, int times, int max_delay_us) {
  for (const auto body : {EverythingThread, EverythingWarp, EverythingBlock}) {
    ShmemCall call(kAreas * world * kCount * 4, 7 * world, body);
    PlainHeap heap(world, call.Workspace(), first_epoch);
    RunOptions options;
    options.first_epoch = first_epoch;
    options.max_delay_us = max_delay_us;
    options.seed = world;
    Expect(heap, Times(&call, times), options);
  }
}

TEST(EveryPrimitive) {
  for (int world = 1; world <= kMaxRanks; ++world) CheckEverything(world, 1, 5, 300);
}
TEST(WithoutDelays) {
  for (int world : {2, 3, 8}) CheckEverything(world, 1, 10, 0);
}
TEST(AcrossTheWrapOfEpochs) { CheckEverything(3, 0xfffffffd, 6, 100); }

// All alignments and sizes, by one thread and by several. Nothing else is written.
TEST(CopiesOfAnySizeAndAlignment) {
  for (int threads : {1, 3}) {
    std::vector<char> source(400), dest(400);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7 + 1);
    Team team(threads);
    TeamScope::team = &team;
    for (int to = 0; to < 17; ++to) {
      for (int from = 0; from < 17; ++from) {
        for (int bytes : {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 100, 129, 256, 300}) {
          std::fill(dest.begin(), dest.end(), kPoison);
          for (int t = 0; t < threads; ++t) {  // one after the other: they do not wait for each
                                               // other
            TeamScope::number = t;
            shmem::internal::Copy<TeamScope>(dest.data() + to, source.data() + from, bytes);
          }
          int wrong = 0;
          for (int i = 0; i < static_cast<int>(dest.size()); ++i) {
            const bool written = to <= i && i < to + bytes;
            wrong += dest[i] != (written ? source[from + i - to] : kPoison);
          }
          EXPECT_EQ(wrong, 0) << "to " << to << " from " << from << " bytes " << bytes;
        }
      }
    }
  }
}

// The threads of a scope share a put and one of them sets the signal; one thread waits, and all
// read.
TEST(ThreadsShareAScope) {
  constexpr int64_t kBytes = 1000;
  for (int world : {1, 2, 5}) {
    for (int threads : {1, 2, 3}) {
      const auto body = [=](const Context& ctx) {
        using namespace shmem;
        const int me = my_pe(ctx), n = n_pes(ctx), next = (me + 1) % n, last = (me + n - 1) % n;
        const auto value = [&](int from, int step) {
          return static_cast<char>(ctx.epoch * 50 + from * 5 + step);
        };
        if (TeamScope::rank() == 0) SendHellos<Thread>(ctx);
        bool ok = true;
        for (int step = 0; ok && step < 3; ++step) {
          const std::vector<char> mine(kBytes, value(me, step));
          char* dest = ctx.data(step * 1024);
          internal::PutSignal<TeamScope>(ctx, dest, mine.data(), kBytes, ctx.signal(step), next);
          ok = internal::SignalWait<TeamScope>(ctx, ctx.signal(step), last);
          EXPECT_EQ(std::count(dest, dest + kBytes, value(last, step)), ok ? kBytes : 0);
        }
        // Each thread's stores to a peer, then one signal for all of them.
        char* stored = ctx.data(3 * 1024);
        for (int t = TeamScope::rank(); t < kBytes; t += threads) {
          ptr(ctx, stored, next)[t] = value(me, 3);
        }
        internal::SignalSet<TeamScope>(ctx, ctx.signal(3), next);
        ok = ok && internal::SignalWait<TeamScope>(ctx, ctx.signal(3), last);
        EXPECT_EQ(std::count(stored, stored + kBytes, value(last, 3)), ok ? kBytes : 0);
        // Stores of any thread of any rank are visible after a barrier of one thread of each rank.
        int32_t* own = ctx.data<int32_t>(4096);
        own[TeamScope::rank()] = me * 10 + TeamScope::rank();
        ok = ok && internal::BarrierAll<TeamScope>(ctx, ctx.signal(4));
        std::vector<int32_t> got(threads);
        for (int pe = 0; ok && pe < n; ++pe) {
          internal::Get<Thread>(ctx, got.data(), own, 4 * threads, pe);
          for (int t = 0; t < threads; ++t) EXPECT_EQ(got[t], pe * 10 + t);
        }
        char* dest = ctx.data(8192);
        const std::vector<char> from_root(kBytes, value(n - 1, 4));
        ok = ok && internal::Broadcast<TeamScope>(ctx, dest, from_root.data(), kBytes,
                                                  ctx.signal(4 + n), n - 1);
        EXPECT_EQ(std::count(dest, dest + kBytes, value(n - 1, 4)), ok ? kBytes : 0);
        return TeamScope::all(ok && AwaitHellos<TeamScope>(ctx) &&
                              internal::BarrierAll<TeamScope>(ctx, ctx.signal(5 + n)));
      };
      TeamCall call(16384, 5 + 2 * kMaxRanks, threads, body);
      PlainHeap heap(world, call.Workspace());
      RunOptions options;
      options.max_delay_us = 300;
      Expect(heap, Times(&call, 6), options);
    }
  }
}

// Rank 0 sends and never waits; the last rank is slow. Only the hellos keep rank 0 from overwriting
// what the slow rank still reads: every rank hears from every peer.
TEST(NobodyIsAWholeCallAhead) {
  for (int world : {2, 4}) {
    const auto body = [](const Context& ctx) {
      using namespace shmem;
      const int me = my_pe(ctx), last = n_pes(ctx) - 1;
      const std::vector<int32_t> v(256, static_cast<int32_t>(ctx.epoch));
      int32_t* dest = ctx.data<int32_t>();
      if (me == 0) put_signal(ctx, dest, v.data(), 256, ctx.signal(), last);
      if (me != last) return true;
      if (!signal_wait_until(ctx, ctx.signal(), 0)) return false;
      for (int part = 0; part < 4; ++part) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        for (int i = 64 * part; i < 64 * part + 64; ++i) EXPECT_EQ(dest[i], v[i]);
      }
      return true;
    };
    ShmemCall call(1024, 1, body);
    PlainHeap heap(world, call.Workspace());
    RunOptions options;
    options.poison = false;
    Expect(heap, Times(&call, 30), options);
  }
}

// Calls with different data and receivers, in one workspace.
TEST(CallsShareAWorkspace) {
  for (int world : {2, 3, 8}) {
    std::mt19937 random(world);
    std::vector<std::unique_ptr<ShmemCall>> calls;
    for (int i = 0; i < 60; ++i) {
      const int shift = static_cast<int>(random() % world), count = 1 + random() % 200;
      const int word = static_cast<int>(random() % 8);
      calls.push_back(std::make_unique<ShmemCall>(
          4096, 8,
          [=](const Context& ctx) {
            using namespace shmem;
            const int me = my_pe(ctx), n = n_pes(ctx);
            const int to = (me + shift) % n, from = (me + n - shift) % n;
            const auto v = Values(ctx, me, to, count);
            put_signal(ctx, ctx.data<int32_t>(4 * shift), v.data(), count, ctx.signal(word), to);
            if (!signal_wait_until(ctx, ctx.signal(word), from)) return false;
            ExpectValues(ctx, ctx.data<int32_t>(4 * shift), from, me, count, "put_signal");
            return true;
          },
          /*signature=*/i));
    }
    PlainHeap heap(world, calls[0]->Workspace());
    RunOptions options;
    options.max_delay_us = 100;
    Expect(heap, Pointers(calls), options);
  }
}

bool Ring(const Context& ctx) {
  using namespace shmem;
  const int me = my_pe(ctx), n = n_pes(ctx);
  signal_set(ctx, ctx.signal(5), (me + 1) % n);
  return signal_wait_until_block(ctx, ctx.signal(5), (me + n - 1) % n);
}

TEST(AnAbsentRankIsNamed) {
  ShmemCall call(0, 8, Ring);
  PlainHeap heap(4, call.Workspace());
  RunOptions options;
  options.absent = 1;
  options.deadline_s = 0.05;
  const auto errors = RunRanks(heap, {&call}, options);
  for (int rank : {0, 2, 3}) {  // rank 2 waits for its signal, the others for its hello
    EXPECT(errors[rank].find("jflux.custom_call(test): rank " + std::to_string(rank) +
                             " waited 0.05 s for rank 1 (item " + (rank == 2 ? "5" : "-1")) !=
           std::string::npos)
        << errors[rank];
  }
}

TEST(AWaitThatFailsEndsTheOthers) {
  // Rank 1 never signals: rank 0's waits after the first fail at once.
  ShmemCall call(0, 8, [](const Context& ctx) {
    using namespace shmem;
    if (my_pe(ctx) == 1) return true;
    bool ok = false;
    for (int i = 0; i < 8; ++i) ok |= signal_wait_until(ctx, ctx.signal(i), 1);
    ok |= barrier_all_warp(ctx, ctx.signal());
    return ok;
  });
  PlainHeap heap(2, call.Workspace());
  RunOptions options;
  options.deadline_s = 0.5;
  const uint64_t start = NowNs();
  const auto errors = RunRanks(heap, {&call}, options);
  EXPECT(NowNs() - start < 3'000'000'000) << "each wait had its deadline";
  EXPECT(errors[1].empty() && errors[0].find("for rank 1 (item 0") != std::string::npos)
      << errors[0];
}

class Disagreeing : public AnyCall {
 public:
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    return calls_[view.rank == 1].Run(view, epoch, ctx);
  }
  int64_t Wrong() const override { return 0; }

 private:
  ShmemCall calls_[2] = {{0, 8, Ring, 1}, {0, 8, [](const Context&) { return true; }, 2}};
};

TEST(RanksThatDisagreeAreTold) {
  Disagreeing call;
  PlainHeap heap(3, shmem::WorkspaceFor(0, 8));
  RunOptions options;
  options.deadline_s = 0.5;
  const auto errors = RunRanks(heap, {&call}, options);
  for (int rank = 0; rank < 2; ++rank) {  // rank 2 waits for a signal that rank 1 never sends
    EXPECT(errors[rank].find("The ranks run different calls") != std::string::npos)
        << rank << errors[rank];
  }
  EXPECT(!errors[2].empty());
}

TEST(AWorkspaceHasRoomForAll) {
  for (int64_t data : {0, 1, 65536, 65537, 1 << 20}) {
    for (int64_t signals : {0, 1, 504, 505, 10000}) {
      const WorkspaceLayout workspace = shmem::WorkspaceFor(data, signals);
      EXPECT(workspace.data_bytes >= data && workspace.SignalBytes() >= 8 * (kMaxRanks + signals));
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
