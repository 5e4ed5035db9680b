#include "simt/grid.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "simt/keywords.h"

namespace jflux::simt {
namespace {

std::vector<Launch>& Launched() {
  static auto* launched = new std::vector<Launch>;
  return *launched;
}
std::vector<std::unique_ptr<Parameters>>& LaunchedParameters() {
  static auto* parameters = new std::vector<std::unique_ptr<Parameters>>;
  return *parameters;
}
int sm_count = 4;
int most_resident = 0;

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

// Calls the kernel. A struct of more than 16 bytes is passed in memory (the System V ABI of
// x86-64), where this one puts its bytes too: so the kernel finds its own parameter.
void CallKernel(const Grid& grid) {
  reinterpret_cast<void (*)(Parameters)>(const_cast<void*>(grid.launch.kernel))(grid.parameters);
}

// What follows a kernel's shared memory: another NaN of each type than what nothing has written.
constexpr uint16_t kPastShared = 0xfffe;

template <typename Body>
void ForWordsPastShared(const Cta& cta, Body&& body) {
  const uint32_t end = (kDynamicAt + cta.dynamic_bytes + 1) / 2;
  auto* words = reinterpret_cast<uint16_t*>(cta.smem);
  for (uint32_t i = end; i < kSmemBytes / 2; ++i) body(words[i]);
}

void CheckPastShared(const Cta& cta) {
  ForWordsPastShared(cta, [&](const uint16_t& word) {
    if (word == kPastShared) return;
    Fail("shared memory at 0x%x was written, past the kernel's, which ends at 0x%x",
         static_cast<uint32_t>(reinterpret_cast<const char*>(&word) - cta.smem),
         kDynamicAt + cta.dynamic_bytes);
  });
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
  if (--cta->live > 0) return;
  CheckPastShared(*cta);
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
  ForWordsPastShared(*cta, [](uint16_t& word) { word = kPastShared; });
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
    AddRunnable(thread);
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
  const int fit = std::max(1, sm_count * std::min({by_threads, by_smem, 32}) / launch.cluster);
  return most_resident > 0 ? std::min(most_resident, fit) : fit;
}

}  // namespace

Cta::~Cta() { std::free(smem); }

void SetSmCount(int count) { sm_count = count; }
int SmCount() { return sm_count; }
void SetMostResident(int clusters) { most_resident = clusters; }

void Enqueue(const Launch& launch) {
  Launched().push_back(launch);
  // How long the parameters are only the compiler knows. What follows them is not used.
  LaunchedParameters().push_back(std::make_unique<Parameters>());
  std::memcpy(LaunchedParameters().back()->bytes, launch.parameters,
              ReadableBytes(launch.parameters, sizeof(Parameters)));
}

Streams TakeLaunched() {
  Streams streams;
  for (size_t i = 0; i < Launched().size(); ++i) {
    auto grid = std::make_unique<Grid>();
    grid->launch = Launched()[i];
    grid->parameters = *LaunchedParameters()[i];
    streams[{grid->launch.device, grid->launch.stream}].push_back(std::move(grid));
  }
  Launched().clear();
  LaunchedParameters().clear();
  return streams;
}

void BeginWhatFits(Streams& streams) {
  for (auto& [key, grids] : streams) {
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

bool AllEnded(const Streams& streams) {
  for (const auto& [key, grids] : streams) {
    if (!grids.empty()) return false;
  }
  return true;
}

std::string WhoWaits(const Streams& streams) {
  std::map<std::string, std::pair<uint32_t, Thread*>> lines;
  for (auto& [key, grids] : streams) {
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

}  // namespace jflux::simt
