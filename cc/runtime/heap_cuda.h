// What the back ends cuda_peer and cuda_ipc share: the symmetric heap in GPU memory.
//
// One cudaMalloc per device. Nothing is allocated, opened or freed once calls run.
//
//   +-------------+-----------+-----------+-----+-------------+
//   | DeviceState | workspace | workspace | ... | probe areas |   the same offsets on every device
//   +-------------+-----------+-----------+-----+-------------+
//
//   writers   The host writes DeviceState between calls (cudaMemcpy after a synchronisation, so
//             every later kernel sees it). Kernels write workspaces by the protocol of
//             core/signal.h. Fault is in mapped host memory: the first failed wait of a device
//             writes it, `kind` last and with release at system scope.
//   waiters   A thread of the host polls Fault with acquire, and prints a fault once.
//   reset     Never, while the heap lives.
#ifndef JFLUX_RUNTIME_HEAP_CUDA_H_
#define JFLUX_RUNTIME_HEAP_CUDA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_state.h"
#include "runtime/heap.h"

namespace jflux {

// A device of this process.
struct CudaDevice {
  int ordinal;
  int64_t id;  // global
  int sm_count;
  char* heap;
  Fault* fault;                    // host address; the kernels' address is in DeviceState
  Timeline timeline;               // device addresses
  int64_t timer_ahead_ns;          // of the host's clock, when the timeline began
  std::map<int64_t, char*> peers;  // every device's heap, as this one addresses it
};

class HeapCuda : public Heap {
 public:
  ~HeapCuda() override;

  // Probes every local device's link to every peer.
  bool Probe(std::string* error) override;
  char* SegmentOf(int64_t local, int64_t device) const override;
  WorkspaceMap* workspaces() override { return &workspaces_; }
  HeapUsage Usage() override;
  std::optional<std::string> FaultOf(int64_t local) const override;
  bool SetHooks(const TestHooks& hooks, std::string* error) override;
  bool Poison(std::string* error) override;
  bool SetEpochs(uint32_t epoch, std::string* error) override;

  const CudaDevice* DeviceOf(int ordinal) const;
  const std::vector<int>& ordinals() const { return config_.ordinals; }

  // The timeline (timeline_cuda.cu); between calls only. Start has all kernels record what they do,
  // up to `capacity` events for each device. Stop frees the events.
  bool StartTimeline(uint32_t capacity, std::string* error);
  // What a local device has recorded, by the host's clock. `*missed` events found no room.
  bool ReadTimeline(int64_t id, std::vector<TimelineEvent>* events, uint32_t* missed,
                    std::string* error);
  bool StopTimeline(std::string* error);

 protected:
  HeapCuda(HeapConfig config, WorkspaceMap::Places places)
      : Heap(std::move(config)),
        workspaces_(kDeviceStateBytes, config_.heap_bytes, places),
        shared_(places == WorkspaceMap::Places::kAgreed) {}

  // Memory on each device of the configuration, and peer access among them. Loads every kernel on
  // every device: a kernel that is loaded later could wait for one that spins.
  bool Allocate(std::string* error);

  std::vector<CudaDevice> devices_;

 private:
  bool AllocateOn(CudaDevice* device, std::string* error);

  WorkspaceMap workspaces_;
  const bool shared_;  // other processes write to it too
};

std::shared_ptr<HeapCuda> CurrentHeapCuda();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CUDA_H_
