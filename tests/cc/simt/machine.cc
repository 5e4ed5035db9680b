// The loop that runs threads and asynchronous operations.
#include "simt/machine.h"

#include <setjmp.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <random>

#include "simt/grid.h"
#include "simt/keywords.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace jflux::simt {

Thread* current = nullptr;

namespace {

// How often the loop lets threads look for something in vain, one after the other, before it calls
// that a deadlock.
constexpr int64_t kMostPolls = 3000000, kManyPolls = 1500;

struct Machine {
  std::mt19937_64 random;
  uint64_t now = 1;
  std::vector<Thread*> runnable;
  struct Deferred {
    std::function<Step()> step;
    Grid* grid;  // of the thread that issued it
    int laziness;
  };
  std::vector<Deferred> deferred;
  bool begins = true;  // whether a kernel or a cluster may be able to begin
  int64_t polls = 0;
  uint64_t clock_ns = 0;
  // One in so many steps completes an asynchronous operation; of as many visits, a slow warp takes
  // one. They change all the time, so that some runs have late copies, others late warps.
  uint64_t copy_odds = 4, slow_odds = 16, next_change = 0;
  Streams streams;
  jmp_buf failed;
  std::string failure;
};

Machine* machine = nullptr;

// How lazy an operation is. A lazier one waits until no other can complete, and no thread can run
// but those that poll: so it overtakes nothing, and much overtakes it.
int RandomLaziness() {
  constexpr int kOf16[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3};
  return kOf16[Random(16)];
}
constexpr int kLaziest = 3;

// Completes an asynchronous operation that is no lazier, or a phase of it. False if none can.
bool CompleteSome(int laziest) {
  auto& deferred = machine->deferred;
  const size_t count = deferred.size(), first = count == 0 ? 0 : Random(count);
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (first + i) % count;
    if (deferred[at].laziness > laziest) continue;
    // It may add others, which would move it.
    Machine::Deferred operation = std::move(deferred[at]);
    const Step result = operation.step();
    if (result == Step::kDone) {
      if (operation.grid != nullptr && --operation.grid->operations == 0) machine->begins = true;
      if (at + 1 != deferred.size()) deferred[at] = std::move(deferred.back());
      deferred.pop_back();
    } else {
      if (result == Step::kAgain) operation.laziness = RandomLaziness();
      deferred[at] = std::move(operation);
    }
    if (result == Step::kNotReady) continue;
    machine->polls = 0;
    return true;
  }
  return false;
}

bool CompleteLeastLazy() {
  for (int laziness = 0; laziness <= kLaziest; ++laziness) {
    if (CompleteSome(laziness)) return true;
  }
  return false;
}

void ResumeThread(size_t at) {
  Thread* thread = machine->runnable[at];
  current = thread;
  const Launch& launch = thread->cta->cluster->grid->launch;
  threadIdx = {static_cast<unsigned>(thread->index), 0, 0};
  blockIdx = thread->cta->block;
  blockDim = dim3(launch.threads);
  gridDim = dim3(launch.ctas);
  thread->fiber.Resume();
  current = nullptr;
  if (thread->blocked || thread->ended) {
    // Nothing removes others from the list, and what was added is behind.
    machine->runnable[at] = machine->runnable.back();
    machine->runnable.pop_back();
  }
  if (!thread->ended) return;
  machine->polls = 0;
  thread->fiber.FreeStack();
  if (thread->cta->ended) {
    machine->begins = true;
    std::free(thread->cta->smem);
    thread->cta->smem = nullptr;
    thread->cta->writes.clear();
  }
}

void ChangePace() {
  constexpr uint64_t kCopyOdds[] = {2, 8, 64, 1024};
  machine->copy_odds = kCopyOdds[Random(4)];
  machine->next_change = machine->now + 500 + Random(20000);
  for (auto& [key, grids] : machine->streams) {
    if (grids.empty()) continue;
    const bool late_device = Random(8) == 0;
    for (auto& cluster : grids.front()->clusters) {
      for (auto& cta : cluster->ctas) {
        const bool late_cta = Random(8) == 0;
        for (Warp& warp : cta->warps) warp.slow = late_device || late_cta || Random(8) == 0;
      }
    }
  }
}

void Loop() {
  for (;;) {
    ++machine->now;
    if (machine->begins) {
      machine->begins = false;
      BeginWhatFits(machine->streams);
    }
    if (machine->now >= machine->next_change) ChangePace();
    auto& runnable = machine->runnable;
    const bool only_polls = runnable.empty() || machine->polls > kManyPolls;
    if (only_polls || Random(machine->copy_odds) == 0) {
      if (only_polls ? CompleteLeastLazy() : CompleteSome(0)) continue;
    }
    if (runnable.empty()) {
      if (machine->begins) continue;
      if (AllEnded(machine->streams)) return;
      Fail("deadlock: no thread can run%s", WhoWaits(machine->streams).c_str());
    }
    size_t at = Random(runnable.size());
    if (runnable[at]->warp->slow && Random(machine->slow_odds) != 0) {
      at = Random(runnable.size());
    }
    ResumeThread(at);
    if (++machine->polls > kMostPolls) {
      Fail("deadlock: threads look for what does not come%s", WhoWaits(machine->streams).c_str());
    }
  }
}

}  // namespace

void Fail(const char* format, ...) {
  char text[16 << 10];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (machine == nullptr) {
    std::fprintf(stderr, "%s\n", text);
    std::abort();
  }
  machine->failure = text;
  if (current != nullptr) {
    char place[160];
    std::snprintf(place, sizeof(place), " (device %d, CTA %u, warp %d, lane %d)",
                  current->cta->cluster->grid->launch.device, current->cta->block.x,
                  current->index / 32, current->lane);
    machine->failure += place;
  }
  _longjmp(machine->failed, 1);  // fibers are not resumed any more
}

uint64_t Random(uint64_t below) { return machine->random() % below; }
uint64_t Now() { return machine == nullptr ? 0 : machine->now; }

void Point() {
  if (current == nullptr) return;
  machine->polls = 0;
  if (Random(4) == 0) current->fiber.Leave();
}

void Look() {
  if (current != nullptr && Random(4) == 0) current->fiber.Leave();
}

void Poll() {
  if (current != nullptr) current->fiber.Leave();
}

void Block(const char* wait, uint32_t at, uint32_t wait_for) {
  current->blocked = true;
  current->wait = wait;
  current->wait_at = at;
  current->wait_for = wait_for;
  current->fiber.Leave();
  current->wait = nullptr;
}

void AddRunnable(Thread* thread) { machine->runnable.push_back(thread); }

void Resume(Thread* thread) {
  if (!thread->blocked) return;
  thread->blocked = false;
  machine->runnable.push_back(thread);
}

void Unblock(Thread* thread) {
  if (thread->blocked) machine->polls = 0;
  Resume(thread);
}

uint64_t ClockNs() {
  if (machine == nullptr) return 0;
  Poll();
  machine->clock_ns += 1000;
  return machine->clock_ns + 100 * machine->now;
}

void Defer(std::function<Step()> step) {
  Grid* grid = current == nullptr ? nullptr : current->cta->cluster->grid;
  if (grid != nullptr) ++grid->operations;
  machine->deferred.push_back({std::move(step), grid, RandomLaziness()});
}

std::string Run(uint64_t seed) {
  Machine here;
  here.random.seed(seed * 1000003 + 17);
  here.streams = TakeLaunched();
  machine = &here;
  current = nullptr;
  if (_setjmp(here.failed) == 0) Loop();
  machine = nullptr;
  current = nullptr;
  return here.failure;
}

}  // namespace jflux::simt
