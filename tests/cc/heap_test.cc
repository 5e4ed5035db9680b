// The interface of the symmetric heap, through the CPU back end: handles, views, current heaps.
#include "runtime/heap.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/heap_cpu.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int64_t kBytes = 1 << 20;

std::shared_ptr<Heap> Make(const std::vector<int64_t>& devices, bool leads) {
  std::string error;
  auto heap = CreateHeap("cpu", {devices, {}, kBytes, 60, leads}, &error);
  EXPECT(heap != nullptr) << error;
  return heap;
}

// Two heaps of one process stand for those of two processes: the handle leads to the same memory.
TEST(AttachedHeapsAreOneHeap) {
  const auto first = Make({0, 1}, true), second = Make({2048}, false);
  std::string handles[2], error;
  EXPECT(first->Export(&handles[0], &error)) << error;
  EXPECT(second->Export(&handles[1], &error)) << error;
  EXPECT(first->SegmentOf(0, 2048) == nullptr);
  EXPECT(first->Attach(handles[1], &error)) << error;
  EXPECT(second->Attach(handles[0], &error)) << error;
  EXPECT(first->Probe(&error) && second->Probe(&error)) << error;
  EXPECT(first->links().empty());

  const std::vector<int64_t> group{2048, 0, 1};
  SymmetricView from_first, from_second;
  EXPECT(!first->FillView(group, 1, 512, &from_first).has_value());
  EXPECT(!second->FillView(group, 0, 512, &from_second).has_value());
  EXPECT_EQ(from_first.world, 3);
  EXPECT_EQ(from_first.rank, 1);
  for (int r = 0; r < 3; ++r) {
    const std::string text = "to rank " + std::to_string(r);
    std::strcpy(from_first.base[r], text.c_str());
    EXPECT_EQ(std::string(from_second.base[r]), text);
    EXPECT(from_first.base[r] != from_second.base[r]);  // two mappings
  }

  // The table of the one that leads is the other's too.
  auto& leader = static_cast<HeapCpu&>(*first);
  WorkspaceLease lease;
  EXPECT(leader.table()->Acquire(
      {1, 2}, 3, 4096, kBytes, NowNs() + 1'000'000'000, [](int64_t, int64_t) {}, &lease, &error))
      << error;
  EXPECT_EQ(second->Usage().in_use, 4096);
  EXPECT_EQ(second->Usage().touched, 4096);
}

TEST(AViewNamesAnUnknownDevice) {
  const auto heap = Make({0, 1}, true);
  SymmetricView view;
  const auto unknown = heap->FillView({1, 7}, 0, 0, &view);
  EXPECT(unknown.has_value());
  EXPECT_EQ(unknown.value_or(-1), 7);
}

TEST(MalformedHandles) {
  const auto heap = Make({0}, true);
  for (const char* handle :
       {"", "1", "1:2", "1:2:1", "1;2;1;3", "a:2:1:3", "1:2:1:x", "1:2:1:3,x"}) {
    std::string error;
    EXPECT(!heap->Attach(handle, &error)) << handle;
    EXPECT(error.find("malformed handle") != std::string::npos) << error;
  }
  std::string error;
  EXPECT(!heap->Attach("999999999:3:0:1", &error));
  EXPECT(error.find("cannot open a peer process's heap at /proc/999999999/fd/3") !=
         std::string::npos)
      << error;
}

TEST(TheCpuReservesNothing) {
  const auto heap = Make({0}, true);
  std::string error;
  EXPECT(heap->workspaces() == nullptr);
  EXPECT(!heap->SetEpochs(7, &error));
  EXPECT(error.find("back end cpu") != std::string::npos) << error;
  EXPECT(!heap->FaultOf(0).has_value());
}

TEST(UnknownBackEnds) {
  std::string error;
  EXPECT(CreateHeap("tape", {{0}, {}, kBytes, 60}, &error) == nullptr);
  EXPECT(error.find("no back end \"tape\"") != std::string::npos) << error;
#ifndef JFLUX_WITH_CUDA
  EXPECT(CreateHeap("cuda_peer", {{0}, {0}, kBytes, 60}, &error) == nullptr);
  EXPECT(error.find("no CUDA kernels") != std::string::npos) << error;
#endif
}

TEST(OneCurrentHeapPerPlatform) {
  SetCurrentHeap(HeapPlatform::kCpu, Make({0}, true));
  const std::weak_ptr<Heap> first = CurrentHeap(HeapPlatform::kCpu);
  EXPECT(first.lock() == CurrentHeapCpu());
  EXPECT(CurrentHeap(HeapPlatform::kCuda) == nullptr);
  SetCurrentHeap(HeapPlatform::kCpu, Make({0}, true));
  EXPECT(first.expired());  // nobody holds it
  SetCurrentHeap(HeapPlatform::kCpu, nullptr);
  EXPECT(CurrentHeapCpu() == nullptr);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
