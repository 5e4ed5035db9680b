// The probe of the links (runtime/link_probe.h) on simulated devices: what it says of links that
// lead to other memory or lose data, and of a runtime that fails.
#include "runtime/link_probe.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;

// What goes wrong in the runtime below.
struct Planted {
  bool no_streams = false;
  const void* broken = nullptr;  // copies to it lose their last word
};
Planted planted;
uint64_t seed = 1;
std::string failure;  // of the simulator

// Devices of a node, each with a copy of the probe's workspace.
class Node {
 public:
  explicit Node(int devices) : elsewhere_(ProbeBytes(devices)) {
    for (int i = 0; i < devices; ++i) {
      ids_.push_back(10 * i + 3);
      memory_.emplace_back(ProbeBytes(devices));
    }
    for (int i = 0; i < devices; ++i) {
      ProbedDevice device{ids_[i], i, i, {}};
      for (auto& copy : memory_) device.copies.push_back(copy.get());
      devices_.push_back(device);
    }
  }
  // Device `from` finds other memory where the copy of device `to` should be.
  void Mislead(int from, int to) { devices_[from].copies[to] = elsewhere_.get(); }
  // Where device `from` copies its pattern at device `of`.
  char* Slot(int of, int from) { return memory_[of].get() + from * (2 << 20); }

  // What the first step that fails says; empty if none does.
  std::string Probe() {
    links_.clear();
    for (const auto step : {ProbeStep::kCopies, ProbeStep::kCheck, ProbeStep::kTalk}) {
      std::string error;
      if (!RunProbe(step, devices_, ids_, &links_, &error)) return error;
    }
    return "";
  }
  const std::vector<Link>& links() const { return links_; }

 private:
  std::vector<int64_t> ids_;
  std::vector<Array<char>> memory_;
  Array<char> elsewhere_;
  std::vector<ProbedDevice> devices_;
  std::vector<Link> links_;
};

void ExpectSaid(const std::string& said, const std::string& text) {
  EXPECT(said.find(text) != std::string::npos) << "\"" << said << "\" has no \"" << text << "\"";
}

TEST(LinksThatWork) {
  for (int devices : {2, 3, 8}) {
    Node node(devices);
    const std::string said = node.Probe();
    EXPECT(said.empty() && failure.empty()) << said << failure;
    EXPECT_EQ(static_cast<int>(node.links().size()), devices * (devices - 1));
    for (const Link& link : node.links()) {
      EXPECT(link.push_gbps > 0 && link.pull_gbps > 0 && link.signal_us > 0)
          << link.from << " to " << link.to;
    }
  }
}

// The writer reads back what it wrote, through its own mapping. Only the peer can tell.
TEST(AMappingThatLeadsToOtherMemory) {
  Node node(3);
  node.Mislead(0, 2);
  const std::string said = node.Probe();
  ExpectSaid(said, "the link from device 3 to device 23 cannot be trusted: ");
  ExpectSaid(said, "bytes that it wrote are not in the memory of the second one");
  ExpectSaid(said, "CUDA_VISIBLE_DEVICES");
}

TEST(ALinkThatLosesData) {
  Node node(2);
  planted.broken = node.Slot(1, 0);
  const std::string said = node.Probe();
  planted = {};
  ExpectSaid(said, "the link from device 3 to device 13 cannot be trusted: 4 of 2097152 bytes");
  ExpectSaid(said, "came back different from a copy to the peer");
}

TEST(ARuntimeThatFailsIsNoBadLink) {
  Node node(2);
  planted.no_streams = true;
  const std::string said = node.Probe();
  planted = {};
  ExpectSaid(said, "the probe of the links could not run (cudaStreamCreateWithFlags");
  EXPECT(said.find("cannot be trusted") == std::string::npos) << said;
}

}  // namespace
}  // namespace jflux

// ---- What the probe calls of the CUDA runtime beside the simulator's functions ------------------

using namespace jflux;  // NOLINT

extern "C" {

cudaError_t cudaSetDevice(int ordinal) {
  simt::SetDevice(ordinal);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (planted.no_streams) return cudaErrorInvalidValue;
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::free(stream);
  return cudaSuccess;
}
// Runs what has been launched on all devices.
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  failure += simt::Run(seed++);
  return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
// Copies are made at once: the probe has waited for the kernels before them.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes - (to == planted.broken ? 4 : 0));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

}  // extern "C"

int main() { return jflux::RunAll(); }
