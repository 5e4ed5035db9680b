// The handle of a peer process's heap, which comes from another process through a store: whatever
// it says, Attach refuses it with a reason, or maps memory that can be read.
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "fuzz.h"
#include "runtime/heap_cpu.h"

namespace jflux {
namespace {

constexpr int64_t kBytes = 64 << 10;

std::shared_ptr<HeapCpu> Make(const std::vector<int64_t>& devices, bool leads) {
  std::string error;
  auto heap = HeapCpu::Create({devices, {}, kBytes, 60, leads}, &error);
  FUZZ_EXPECT(heap != nullptr, error);
  return heap;
}

// What a mutation may find: the heaps of this process.
const std::vector<std::shared_ptr<HeapCpu>>& Peers() {
  static const std::vector<std::shared_ptr<HeapCpu>> peers{Make({1}, true), Make({2, 3}, false)};
  return peers;
}

int g_attached = 0;

std::vector<std::string> Corpus() {
  std::vector<std::string> texts{"1:2:7:1:3", "999999999:3:5:0:1,2", ":::"};
  for (const auto& peer : Peers()) {
    std::string text, error;
    FUZZ_EXPECT(peer->Export(&text, &error), error);
    texts.push_back(text);
  }
  return texts;
}

}  // namespace
}  // namespace jflux

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jflux;  // NOLINT
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto heap = Make({0}, false);
  const char* own = heap->SegmentOf(0);
  std::string error;
  if (!heap->Attach(text, &error)) {
    FUZZ_EXPECT(!error.empty(), text);
    // The first line of an error is one that a log can show.
    FUZZ_EXPECT(error.size() < 400, text);
    return 0;
  }
  ++g_attached;
  FUZZ_EXPECT(heap->SegmentOf(0) == own, text);
  volatile char sum = 0;
  for (int64_t device = 0; device < 4; ++device) {
    const char* segment = heap->SegmentOf(device);
    if (segment != nullptr) sum = sum + segment[0] + segment[kBytes - 1];
  }
  return 0;
}

#ifndef JFLUX_LIBFUZZER
int main(int argc, char** argv) {
  const int status = jflux::FuzzMain(argc, argv, jflux::Corpus(), /*count=*/20000);
  std::printf("%d were attached\n", jflux::g_attached);
  FUZZ_EXPECT(argc > 1 || jflux::g_attached > 100, "too few are handles");
  return status;
}
#endif
