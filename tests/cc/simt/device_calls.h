// Runs the calls of an op (foo_bar_call.h, ranks.h) by its kernels, on a device for each rank.
#ifndef JFLUX_TESTS_CC_SIMT_DEVICE_CALLS_H_
#define JFLUX_TESTS_CC_SIMT_DEVICE_CALLS_H_

#include <memory>
#include <string>
#include <vector>

#include "simt/device_heap.h"
#include "simt/machine.h"
#include "testing.h"

namespace jflux::simt {

// Ranks of the calls of an op that takes any number of them: the most that there are, and no power
// of two, among them.
inline constexpr int kWorlds[] = {2, 3, 4, 5, 8};

// SMs that launchers count on. In every third run twice as many as there are, as if other kernels
// held some: half of the CTAs begin when others have ended.
inline int SmsOfLaunch(uint32_t seed) { return (seed % 3 == 2 ? 2 : 1) * SmCount(); }

// Clusters that run at once, as if another kernel held the rest of the device: in two of five runs
// one, or two.
inline int MostResident(uint32_t seed) { return seed % 5 == 1 ? 1 : seed % 5 == 3 ? 2 : 0; }

// launch(i, device, view, error) enqueues call i of the rank of `view`: false, with a reason, if it
// cannot. Runs what was enqueued. False, after a message, if a launch or the run has failed.
template <typename Launch>
bool RunOnDevices(DeviceHeap& heap, int world, int calls, uint32_t seed, Launch&& launch) {
  std::string error;
  bool launched = true;
  for (int i = 0; i < calls; ++i) {
    for (int rank = 0; rank < world; ++rank) {
      SetDevice(rank);
      launched &= launch(i, heap.Device(rank, SmsOfLaunch(seed)), heap.View(rank, i + 1), &error);
    }
  }
  EXPECT(launched) << error;
  SetMostResident(MostResident(seed));
  const std::string failure = Run(seed);
  SetMostResident(0);
  EXPECT(failure.empty()) << failure << ", seed " << seed;
  for (int rank = 0; rank < world; ++rank) EXPECT_EQ(heap.FaultOf(rank).kind, 0u);
  return launched && failure.empty();
}

// C: a call of ranks.h with
//   bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error)
// How many elements are wrong of all calls' results; -1, after a message, if the run has failed.
template <typename C>
int64_t WrongOnDevices(DeviceHeap& heap, int world, const std::vector<std::unique_ptr<C>>& calls,
                       uint32_t seed) {
  const bool ran =
      RunOnDevices(heap, world, static_cast<int>(calls.size()), seed,
                   [&](int i, const CudaDevice& device, const SymmetricView& view,
                       std::string* error) { return calls[i]->Launch(device, view, error); });
  if (!ran) return -1;
  int64_t wrong = 0;
  for (const auto& call : calls) wrong += call->Wrong();
  return wrong;
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_DEVICE_CALLS_H_
