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

// The same of three calls, make(seed) each, one after the other on one workspace.
template <typename Make>
int64_t WrongOnDevices(DeviceHeap& heap, int world, uint32_t seed, const Make& make) {
  std::vector<decltype(make(seed))> calls;
  for (uint32_t i = 0; i < 3; ++i) calls.push_back(make(3 * seed + i));
  return WrongOnDevices(heap, world, calls, seed);
}
// Of C(c, seed), for a case with hooks.
template <typename C, typename Case>
int64_t WrongOnDevices(const Case& c, int world, uint32_t seed) {
  DeviceHeap heap(world, C(c, 0).Workspace(), c.hooks);
  return WrongOnDevices(heap, world, seed, [&](uint32_t of) { return std::make_unique<C>(c, of); });
}

// run(case, seed) finds nothing wrong in each of the first `count` cases.
template <typename Case, size_t kCases, typename Run>
void ExpectNoneWrong(const Case (&cases)[kCases], const Run& run, size_t count = kCases) {
  uint32_t seed = 1;
  for (size_t i = 0; i < count; ++i) {
    for (int schedule = 0; schedule < Schedules(1); ++schedule, ++seed) {
      EXPECT_EQ(run(cases[i], seed), 0) << "case " << i << ", seed " << seed;
    }
  }
}

// run(case, seed) finds something wrong if waits are left out.
template <typename Case, typename Run>
void ExpectWrongWithoutWaits(Case c, const Run& run, uint32_t seed = 1) {
  c.hooks.skip_waits = 1;
  EXPECT(run(c, seed) > 0);
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_DEVICE_CALLS_H_
