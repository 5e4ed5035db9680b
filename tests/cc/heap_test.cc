// The interface of the symmetric heap, through the CPU back end: handles, views, current heaps.
#include "runtime/heap.h"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/heap_cpu.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int64_t kBytes = 1 << 20;

std::shared_ptr<HeapCpu> Make(const std::vector<int64_t>& devices, bool leads) {
  std::string error;
  auto heap = CreateHeap("cpu", {devices, {}, kBytes, 60, leads}, &error);
  EXPECT(heap != nullptr) << error;
  return std::static_pointer_cast<HeapCpu>(heap);
}

// Two heaps of one process stand for those of two processes: the handle leads to the same memory.
TEST(AttachedHeapsAreOneHeap) {
  const auto first = Make({0, 1}, true), second = Make({2048}, false);
  std::string handles[2], error;
  EXPECT(first->Export(&handles[0], &error)) << error;
  EXPECT(second->Export(&handles[1], &error)) << error;
  EXPECT(first->SegmentOf(2048) == nullptr);
  EXPECT(first->Attach(handles[1], &error)) << error;
  EXPECT(second->Attach(handles[0], &error)) << error;
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
  WorkspaceLease lease;
  EXPECT(first->table()->Acquire(
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
       {"", "1", "1:2", "1:2:1", "1:2:3:1", "1;2;3;1;3", "a:2:3:1:3", "1:2:3:1:x", "1:2:3:1:3,x"}) {
    std::string error;
    EXPECT(!heap->Attach(handle, &error)) << handle;
    EXPECT(error.find("malformed handle") != std::string::npos) << error;
  }
  std::string error;
  EXPECT(!heap->Attach("999999999:3:5:0:1", &error));
  EXPECT(error.find("cannot open a peer process's heap at /proc/999999999/fd/3") !=
         std::string::npos)
      << error;
}

// In another PID namespace a path below /proc may lead to another file, even to the reader's own.
TEST(AHandleThatLeadsToAnotherFile) {
  const auto first = Make({0}, true), second = Make({1}, false);
  std::string handle, error;
  EXPECT(first->Export(&handle, &error)) << error;
  const auto own = handle;  // another number: of a file in the other namespace
  const size_t begin = own.find(':', own.find(':') + 1) + 1, end = own.find(':', begin);
  EXPECT(!second->Attach(own.substr(0, begin) + "1" + own.substr(end), &error));
  EXPECT(error.find("different PID namespaces") != std::string::npos) << error;
  EXPECT(second->SegmentOf(0) == nullptr);
  EXPECT(second->Attach(handle, &error)) << error;
  // A file that is no heap.
  const std::string nothing = std::to_string(getpid()) + ":0:1:0:7";
  EXPECT(!second->Attach(nothing, &error));
}

TEST(TheCpuReservesNothing) {
  const auto heap = Make({0}, true);
  std::string error, handle;
  const auto id = WorkspaceId::Of({0}, 4096);
  EXPECT(!heap->AddWorkspace(id, &handle, &error));
  EXPECT(error.find("back end cpu has no reserved workspaces") != std::string::npos) << error;
  EXPECT(heap->UnusedWorkspaces().empty());
  EXPECT(heap->SetEpochs(7, &error)) << error;  // of all workspaces: it counts them together
  EXPECT(!heap->FaultOf(0).has_value());
}

TEST(UnknownBackEnds) {
  std::string error;
  EXPECT(CreateHeap("tape", {{0}, {}, kBytes, 60}, &error) == nullptr);
  EXPECT(error.find("no back end \"tape\"") != std::string::npos) << error;
#ifndef JFLUX_WITH_CUDA
  EXPECT(CreateHeap("cuda", {{0}, {0}, kBytes, 60}, &error) == nullptr);
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
