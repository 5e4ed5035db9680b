// A mutant is a program with its own copy of the protocol in which one thing is broken, by macros
// that it defines before it includes the library's sources; so cc/ needs no hooks. The program runs
// itself as a child. The child runs two ranks through a schedule that exposes the damage, and
// checks the results. The test passes if the child fails (without a mutation: if it passes).
//
// A mutant_*_test.cc does, in this order:
//   #define jflux jflux_mutant      another namespace, to avoid clashes with the library
//   the macros that mutate          after the header that declares what they replace
//   #include "mutant.h"             this file: the library's sources, the schedule, MutantMain
//   int main(...) { return MutantMain(...); }
#ifndef JFLUX_TESTS_CC_MUTANT_H_
#define JFLUX_TESTS_CC_MUTANT_H_

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "core/layout.h"
#include "core/signal.h"

#if defined(__SANITIZE_THREAD__)
#define JFLUX_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define JFLUX_TSAN 1
#endif
#endif

#ifndef JFLUX_MUTANT_WAIT
#define JFLUX_MUTANT_WAIT WaitSignal
#endif
#ifndef JFLUX_MUTANT_DATA_EPOCH
#define JFLUX_MUTANT_DATA_EPOCH(epoch) (epoch)
#endif

namespace jflux {

#ifdef JFLUX_TSAN
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// The schedule. Rank 1 makes its first call after rank 0 has finished it, if rank 0 can do so
// alone. Then rank 1 waits for rank 0's data of call 1, and stops before it reads them until rank 0
// has sent its data of call 2. All accesses are relaxed: the schedule must not order what the
// protocol does not.
struct Schedule {
  std::atomic<bool> rank0_finished_call1{false};
  std::atomic<bool> rank0_sent_call2{false};

  static void Await(const std::atomic<bool>& flag, int64_t milliseconds) {
    const uint64_t deadline = NowNs() + milliseconds * 1'000'000;
    while (!flag.load(std::memory_order_relaxed) && NowNs() < deadline) std::this_thread::yield();
  }
};
inline Schedule* g_schedule = nullptr;

inline bool ScheduledWait([[maybe_unused]] const Signal* word, Signal expected, int32_t peer,
                          [[maybe_unused]] int64_t tile, const WaitContext& ctx) {
  const uint64_t epoch = EpochOf(expected);
  // All of them send what rank 1 waits for before rank 0 waits for rank 1.
  if (ctx.rank == 0 && epoch == 2 && peer == 1) {
    g_schedule->rank0_sent_call2.store(true, std::memory_order_relaxed);
  }
  if (!JFLUX_MUTANT_WAIT(word, expected, peer, tile, ctx)) return false;
  if (ctx.rank == 1 && epoch == 1 && peer == 0) {
    Schedule::Await(g_schedule->rank0_sent_call2, 5000);
  }
  return true;
}

}  // namespace jflux

#define WaitSignal ScheduledWait
#define DataOffset(epoch) DataOffset(JFLUX_MUTANT_DATA_EPOCH(epoch))
#include "ops/all_gather_matmul/all_gather_matmul_cpu.cc"
#include "ops/matmul_all_reduce/matmul_all_reduce_cpu.cc"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_cpu.cc"
#include "runtime/cpu_matmul.cc"
#include "runtime/fault.cc"
#undef DataOffset
#undef WaitSignal

#include "all_gather_matmul_call.h"
#include "matmul_all_reduce_call.h"
#include "matmul_reduce_scatter_call.h"
#include "no_ops.h"
#include "testing.h"

namespace jflux {

// True if both ranks' results of three calls are right.
template <typename Op, typename Params, typename Tiling>
bool SurvivesSchedule(const char* name, const Params& params, const Tiling& tiling) {
  Op first(params, tiling, 1), second(params, tiling, 2), third(params, tiling, 3);
  Schedule schedule;
  g_schedule = &schedule;
  RunOptions options;
  options.poison = false;
  options.deadline_s = 20;
  options.before = [&](int rank, size_t call) {
    if (rank == 0 && call == 1) {
      schedule.rank0_finished_call1.store(true, std::memory_order_relaxed);
    }
    if (rank == 1 && call == 0) Schedule::Await(schedule.rank0_finished_call1, 100);
  };
  PlainHeap heap(2, first.Workspace());
  const std::string error = Join(RunRanks(heap, {&first, &second, &third}, options));
  const int64_t wrong = first.Wrong() + second.Wrong() + third.Wrong();
  std::printf("%s: %lld wrong elements %s\n", name, static_cast<long long>(wrong), error.c_str());
  return error.empty() && wrong == 0;
}

inline int RunChild(const std::string& op) {
  const Rows rows{2, 1, 16};
  if (op == "all_gather_matmul") {
    const AllGatherMatmulParams p{rows, 8, 8, DType::kF32, DType::kF32, false, true};
    return SurvivesSchedule<AllGatherMatmulCall>(op.c_str(), p, CpuTiling{256, 8, 8}) ? 0 : 1;
  }
  const MatmulReduceScatterParams p{rows, 8, 8, DType::kF32, DType::kF32, false};
  if (op == "few_rows") {
    return SurvivesSchedule<FewRowsCall>(op.c_str(), MatmulAllReduceParams{p}, 4) ? 0 : 1;
  }
  return SurvivesSchedule<MatmulReduceScatterCall>(op.c_str(), p, ScatterTiling{8, 8}) ? 0 : 1;
}

enum class Expected {
  kWrongResults,  // the child's own checks fail
  kRace,          // only ThreadSanitizer can detect it: x86 orders what the mutant does not
  kNothing,       // no mutation: the schedule alone does no harm
};

inline int MutantMain(int argc, char** argv, Expected expected) {
  if (argc > 1) return RunChild(argv[1]);
  if (expected == Expected::kRace && !kThreadSanitizer) {
    return Skip("this mutation is visible to ThreadSanitizer only");
  }
  bool ok = true;
  setenv("TSAN_OPTIONS", "exitcode=0", 1);  // so that the exit status reflects the results alone
  for (const char* op : {"all_gather_matmul", "matmul_reduce_scatter", "few_rows"}) {
    const std::string command = std::string("'") + argv[0] + "' " + op + " 2>&1";
    FILE* child = popen(command.c_str(), "r");
    std::string output;
    for (char line[512]; std::fgets(line, sizeof(line), child) != nullptr;) output += line;
    const bool failed = pclose(child) != 0;
    const bool race = output.find("ThreadSanitizer: data race") != std::string::npos;
    const bool good = expected == Expected::kWrongResults ? failed
                      : expected == Expected::kRace       ? race
                                                          : !failed && !race;
    if (!good) std::printf("NOT AS EXPECTED:\n%s\n", output.c_str());
    std::printf("%s: %s%s\n", op, failed ? "wrong results" : "right results",
                race ? ", a data race" : "");
    ok = ok && good;
  }
  return ok ? 0 : 1;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MUTANT_H_
