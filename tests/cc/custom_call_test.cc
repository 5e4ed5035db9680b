// The C interface for handlers of custom calls.
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "jflux/call.h"
#include "runtime/capi.h"
#include "runtime/ffi.h"
#include "runtime/heap_cpu.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr char kName[] = "my_op";
constexpr int64_t kGroups[] = {0, 1, 3, 2};  // two groups of two

shmem::CallInfo Info() {
  shmem::CallInfo info{};
  info.version = shmem::kCallVersion;
  info.signature = 5;
  info.name = kName;
  info.name_size = std::strlen(kName);
  info.groups = kGroups;
  info.groups_size = 4;
  info.world = 2;
  info.data_bytes = 64;
  info.num_signals = 1;
  info.workspace_bytes = jflux_custom_workspace_bytes(64, 1);
  return info;
}

// A rank sends its device's id to the other rank of its group.
struct Rank {
  int64_t device, received = -1;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string error;

  static bool Body(void* data, const shmem::Context& ctx) {
    auto* rank = static_cast<Rank*>(data);
    const int other = 1 - my_pe(ctx);
    put_signal(ctx, ctx.data<int64_t>(), &rank->device, 1, ctx.signal(), other);
    if (!signal_wait_until(ctx, ctx.signal(), other)) return false;
    rank->received = *ctx.data<int64_t>();
    return true;
  }
  static void Done(void* data, int32_t, const char* error) {
    auto* rank = static_cast<Rank*>(data);
    std::lock_guard<std::mutex> lock(rank->mutex);
    rank->error = error == nullptr ? "" : error;
    rank->done = true;
    rank->changed.notify_all();
  }
  void Join(const shmem::CallInfo& info, int64_t run) {
    static CallSite site;
    site.skips_wait = true;  // a single thread makes the calls of all ranks
    jflux_cpu_join_call(&info, &site, run, static_cast<int32_t>(device), Body, Done, this);
  }
  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    EXPECT(changed.wait_for(lock, std::chrono::seconds(60), [this] { return done; }));
    return error;
  }
};

void UseHeap(double deadline_s) {
  std::string error;
  SetCurrentHeap(HeapPlatform::kCpu,
                 HeapCpu::Create({{0, 1, 2, 3}, {}, 64 << 20, deadline_s}, &error));
  EXPECT(error.empty()) << error;
}

TEST(GroupsOfACall) {
  UseHeap(60);
  Rank ranks[4];
  for (int64_t device = 0; device < 4; ++device) {
    ranks[device].device = device;
    ranks[device].Join(Info(), 1);
  }
  constexpr int64_t kOther[] = {1, 0, 3, 2};
  for (int device = 0; device < 4; ++device) {
    EXPECT_EQ(ranks[device].Wait(), "");
    EXPECT_EQ(ranks[device].received, kOther[device]);
  }
  EXPECT_EQ(CurrentHeapCpu()->table()->BytesInUse(), 0);
}

TEST(AMissingRankIsNamed) {
  UseHeap(0.2);
  Rank rank;
  rank.device = 2;
  rank.Join(Info(), 2);
  EXPECT(rank.Wait().find("jflux.custom_call(my_op): rank 1 waited 0.2 s for rank 0") == 0)
      << rank.error;
}

std::string Refused(const shmem::CallInfo& info, int64_t device) {
  Rank rank;
  rank.device = device;
  rank.Join(info, 3);
  EXPECT(rank.done) << "not at once";
  return rank.Wait();
}

TEST(WhatIsRefused) {
  UseHeap(60);
  shmem::CallInfo info = Info();
  info.version = shmem::kCallVersion + 1;
  info.name = nullptr;  // must not be read: another version may place it elsewhere
  EXPECT(Refused(info, 0).find("another version's headers") != std::string::npos);
  info = Info();
  info.world = kMaxRanks + 1;
  EXPECT(Refused(info, 0).find("my_op): malformed") != std::string::npos);
  info = Info();
  info.workspace_bytes *= 2;
  EXPECT(Refused(info, 0).find("custom_call(my_op): the call takes a workspace of") !=
         std::string::npos);
  EXPECT(Refused(Info(), 4).find("none of the call's groups") != std::string::npos);
}

TEST(WorkspacesHaveTheSizeThatPythonReserves) {
  for (int64_t data : {0, 100000}) {
    EXPECT_EQ(jflux_custom_workspace_bytes(data, 600), shmem::WorkspaceFor(data, 600).TotalBytes());
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
