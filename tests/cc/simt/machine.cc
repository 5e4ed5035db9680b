// The loop that runs threads and asynchronous operations, and the life of kernels, CTAs and
// threads.
#include "simt/machine.h"

#include <pthread.h>
#include <setjmp.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <random>

#include "simt/keywords.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace jflux::simt {

Thread* current = nullptr;

// The largest that a kernel's parameters can be.
struct alignas(128) Parameters {
  char bytes[4096];
};

struct Grid {
  Launch launch;
  Parameters parameters;
  std::vector<std::unique_ptr<Cluster>> clusters;  // that have begun
  int begun = 0, ended = 0;                        // of launch.ctas / launch.cluster
  int operations = 0;                              // asynchronous ones, not complete
  int Clusters() const { return launch.ctas / launch.cluster; }
};

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
  std::map<std::pair<int, const void*>, std::deque<std::unique_ptr<Grid>>> streams;
  jmp_buf failed;
  std::string failure;
};

Machine* machine = nullptr;
std::vector<Launch>& Launched() {
  static auto* launched = new std::vector<Launch>;
  return *launched;
}
std::vector<std::unique_ptr<Parameters>>& LaunchedParameters() {
  static auto* parameters = new std::vector<std::unique_ptr<Parameters>>;
  return *parameters;
}
int sm_count = 4;

// Calls the kernel. A struct of more than 16 bytes is passed in memory (the System V ABI of
// x86-64), where this one puts its bytes too: so the kernel finds its own parameter.
void CallKernel(const Grid& grid) {
  reinterpret_cast<void (*)(Parameters)>(const_cast<void*>(grid.launch.kernel))(grid.parameters);
}

void EndThread(Thread* thread) {
  Cta* cta = thread->cta;
  Warp* warp = thread->warp;
  thread->ended = true;
  warp->ended |= 1u << thread->lane;
  for (const Meeting& meeting : warp->meetings) {
    if (meeting.mask >> thread->lane & 1) {
      Fail("a lane ends that lanes %08x wait for in %s", meeting.arrived, meeting.what);
    }
  }
  machine->polls = 0;
  if (--cta->live > 0) return;
  machine->begins = true;
  cta->ended = true;
  Cluster* cluster = cta->cluster;
  if (--cluster->live == 0) ++cluster->grid->ended;
}

void RunThread(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  CallKernel(*thread->cta->cluster->grid);
  EndThread(thread);
  thread->fiber.Leave();
}

void BeginCta(Cluster* cluster, Cta* cta, uint32_t rank, int number) {
  const Launch& launch = cluster->grid->launch;
  cta->cluster = cluster;
  cta->rank = rank;
  cta->block = {static_cast<unsigned>(number), 0, 0};
  cta->dynamic_bytes = static_cast<uint32_t>(launch.smem_bytes);
  cta->smem = static_cast<char*>(std::aligned_alloc(1024, kSmemBytes));
  std::memset(cta->smem, 0xff, kSmemBytes);  // not a number, in each type
  cta->writes.resize(kSmemBytes / 16);
  cta->warps.resize((launch.threads + 31) / 32);
  cta->warpgroups.resize((launch.threads + 127) / 128);
  cta->live = launch.threads;
  for (int i = 0; i < launch.threads; ++i) {
    cta->threads.push_back(std::make_unique<Thread>());
    Thread* thread = cta->threads.back().get();
    thread->cta = cta;
    thread->warp = &cta->warps[i / 32];
    thread->index = i;
    thread->lane = i % 32;
    thread->warp->lanes[i % 32] = thread;
    thread->fiber.Start(RunThread, thread);
    machine->runnable.push_back(thread);
  }
}

void BeginCluster(Grid* grid) {
  const int number = static_cast<int>(grid->clusters.size());
  grid->clusters.push_back(std::make_unique<Cluster>());
  Cluster* cluster = grid->clusters.back().get();
  cluster->grid = grid;
  cluster->live = grid->launch.cluster;
  for (int i = 0; i < grid->launch.cluster; ++i) cluster->ctas.push_back(std::make_unique<Cta>());
  for (int i = 0; i < grid->launch.cluster; ++i) {
    BeginCta(cluster, cluster->ctas[i].get(), i, number * grid->launch.cluster + i);
  }
}

// Clusters that fit beside those that run. At least one always does.
int ClustersAtOnce(const Launch& launch) {
  const int by_threads = 2048 / launch.threads;
  const int by_smem = 233472 / (launch.smem_bytes + 1024);
  return std::max(1, sm_count * std::min({by_threads, by_smem, 32}) / launch.cluster);
}

// Has kernels and clusters begin, each at some later step.
void BeginWhatFits() {
  machine->begins = false;
  for (auto& [key, grids] : machine->streams) {
    while (!grids.empty() && grids.front()->ended == grids.front()->Clusters() &&
           grids.front()->operations == 0) {
      grids.pop_front();
    }
    if (grids.empty()) continue;
    Grid* grid = grids.front().get();
    while (grid->begun < grid->Clusters() &&
           grid->begun - grid->ended < ClustersAtOnce(grid->launch)) {
      ++grid->begun;
      Defer([grid] {
        BeginCluster(grid);
        return Step::kDone;
      });
    }
  }
}

bool AllEnded() {
  for (const auto& [key, grids] : machine->streams) {
    if (!grids.empty()) return false;
  }
  return true;
}

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
  if (thread->ended) thread->fiber.FreeStack();
  if (thread->cta->ended) {
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

// One line for each warp and reason.
std::string WhoWaits() {
  std::map<std::string, std::pair<uint32_t, Thread*>> lines;
  for (auto& [key, grids] : machine->streams) {
    if (grids.empty()) continue;
    for (auto& cluster : grids.front()->clusters) {
      for (auto& cta : cluster->ctas) {
        for (auto& thread : cta->threads) {
          if (thread->ended) continue;
          char line[200];
          std::snprintf(line, sizeof(line), "device %d CTA %3u warp %2d: %s 0x%x, %u", key.first,
                        cta->block.x, thread->index / 32,
                        thread->wait == nullptr ? "runs" : thread->wait, thread->wait_at,
                        thread->wait_for);
          lines[line].first |= 1u << thread->lane;
        }
      }
    }
  }
  std::string text;
  int count = 0;
  for (const auto& [line, lanes] : lines) {
    if (++count > 60) return text + "\n  ...";
    char mask[40];
    std::snprintf(mask, sizeof(mask), ", lanes %08x", lanes.first);
    text += "\n  " + line + mask;
  }
  return text;
}

void Loop() {
  for (;;) {
    ++machine->now;
    if (machine->begins) BeginWhatFits();
    if (machine->now >= machine->next_change) ChangePace();
    auto& runnable = machine->runnable;
    const bool only_polls = runnable.empty() || machine->polls > kManyPolls;
    if (only_polls || Random(machine->copy_odds) == 0) {
      if (only_polls ? CompleteLeastLazy() : CompleteSome(0)) continue;
    }
    if (runnable.empty()) {
      if (machine->begins) continue;
      if (AllEnded()) return;
      Fail("deadlock: no thread can run%s", WhoWaits().c_str());
    }
    size_t at = Random(runnable.size());
    if (runnable[at]->warp->slow && Random(machine->slow_odds) != 0) {
      at = Random(runnable.size());
    }
    ResumeThread(at);
    if (++machine->polls > kMostPolls) {
      Fail("deadlock: threads look for what does not come%s", WhoWaits().c_str());
    }
  }
}

}  // namespace

Cta::~Cta() { std::free(smem); }

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

void Unblock(Thread* thread) {
  if (!thread->blocked) return;
  thread->blocked = false;
  machine->polls = 0;
  machine->runnable.push_back(thread);
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

void* DynamicShared(uint32_t align) {
  static_assert(kDynamicAt + kMostDynamicBytes <= kSmemBytes && kDynamicAt % 1024 == 0);
  if (align > 1024) Fail("shared memory is aligned to 1024 bytes, not %u", align);
  return current->cta->smem + kDynamicAt;
}

void* SharedVariable(const void* key, uint32_t bytes, uint32_t align) {
  Cta* cta = current->cta;
  const auto found = cta->variables.find(key);
  if (found != cta->variables.end()) return cta->smem + found->second;
  const uint32_t at = (cta->static_end + align - 1) / align * align;
  cta->static_end = at + bytes;
  if (cta->static_end > kDynamicAt) Fail("too many shared variables");
  cta->variables[key] = at;
  return cta->smem + at;
}

// Bytes from p on, at most `most`, that are not past the end of this thread's stack.
size_t ReadableBytes(const void* p, size_t most) {
  pthread_attr_t attributes;
  void* stack = nullptr;
  size_t size = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &size);
  pthread_attr_destroy(&attributes);
  const auto* at = static_cast<const char*>(p);
  const char* end = static_cast<char*>(stack) + size;
  return at < end && end - at < static_cast<ptrdiff_t>(most) ? end - at : most;
}

void SetSmCount(int count) { sm_count = count; }
int SmCount() { return sm_count; }

void Enqueue(const Launch& launch) {
  Launched().push_back(launch);
  // How long the parameters are only the compiler knows. What follows them is not used.
  LaunchedParameters().push_back(std::make_unique<Parameters>());
  std::memcpy(LaunchedParameters().back()->bytes, launch.parameters,
              ReadableBytes(launch.parameters, sizeof(Parameters)));
}

std::string Run(uint64_t seed) {
  Machine here;
  here.random.seed(seed * 1000003 + 17);
  for (size_t i = 0; i < Launched().size(); ++i) {
    auto grid = std::make_unique<Grid>();
    grid->launch = Launched()[i];
    grid->parameters = *LaunchedParameters()[i];
    here.streams[{grid->launch.device, grid->launch.stream}].push_back(std::move(grid));
  }
  Launched().clear();
  LaunchedParameters().clear();
  machine = &here;
  current = nullptr;
  if (_setjmp(here.failed) == 0) Loop();
  machine = nullptr;
  current = nullptr;
  return here.failure;
}

}  // namespace jflux::simt
