// The symmetric heap in GPU memory.
//
// One cudaMalloc per device. The devices of one process reach each other's through peer access
// (back end `peer`); those of other processes of the host through CUDA IPC handles, which Python
// carries (back end `ipc`). Nothing is allocated, opened or freed once calls run.
//
//   +-------------+-----------+-----------+-----+-------------+
//   | DeviceState | workspace   | workspace   | ... | probe areas |   the same offsets on every
//   device
//   +-------------+-----------+-----------+-----+-------------+
#ifndef JFLUX_RUNTIME_HEAP_CUDA_H_
#define JFLUX_RUNTIME_HEAP_CUDA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/signal.h"
#include "gpu/device_state.h"
#include "runtime/link_probe.h"

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

class HeapCuda {
 public:
  // Memory on each (ordinal, global id), and peer access among them. Loads every kernel on every
  // device: a kernel that is loaded later could wait for one that spins.
  static std::shared_ptr<HeapCuda> Create(const std::vector<int>& ordinals,
                                          const std::vector<int64_t>& ids, int64_t heap_bytes,
                                          double deadline_s, std::string* error);
  ~HeapCuda();

  // The IPC handle of a local device's heap, as hex digits.
  bool Export(int64_t id, std::string* handle, std::string* error) const;
  // Opens another process's heap on every local device.
  bool Attach(int64_t id, const std::string& handle, std::string* error);

  // Probes every local device's link to every peer. False if one cannot be trusted.
  bool Probe(std::string* error);
  const std::vector<Link>& links() const { return links_; }

  // Gives the workspaces of this size of these groups a place that all processes have agreed on.
  bool AddWorkspace(const std::vector<int64_t>& groups, int64_t total_bytes, int64_t offset,
                    std::string* error);
  // Where they are. In a single process a missing workspace gets the next free place; nothing if
  // the heap is full, or if several processes have yet to agree.
  std::optional<int64_t> FindWorkspace(const int64_t* groups, size_t count, int64_t total_bytes);
  // Bytes that workspaces have taken, of heap_bytes().
  int64_t BytesTaken() const;

  CudaDevice* DeviceOf(int ordinal);
  double deadline_s() const { return deadline_s_; }
  int64_t heap_bytes() const { return heap_bytes_; }

  // A local device's fault as a sentence, if there is one.
  std::optional<std::string> FaultOf(const CudaDevice& device) const;

  // Has all kernels record what they do, up to `capacity` events for each device; StopTimeline
  // frees the events. Between calls only.
  bool StartTimeline(uint32_t capacity, std::string* error);
  // What a local device has recorded, by the host's clock. `*missed` events found no room.
  bool ReadTimeline(int64_t id, std::vector<TimelineEvent>* events, uint32_t* missed,
                    std::string* error);
  bool StopTimeline(std::string* error);

  // Tests only. Poison fills, between calls, what the last call of each workspace left with NaN.
  bool SetHooks(const TestHooks& hooks, std::string* error);
  bool Poison(std::string* error);
  // SetEpochs: as if each workspace had made so many calls; between calls of all processes.
  bool SetEpochs(uint32_t epoch, std::string* error);

 private:
  HeapCuda() = default;

  struct Workspace {
    std::vector<int64_t> groups;
    int64_t total_bytes;
    int64_t offset;
  };

  int64_t heap_bytes_ = 0;
  double deadline_s_ = 0;
  std::vector<CudaDevice> devices_;
  std::vector<Link> links_;
  std::vector<std::pair<int, void*>> opened_;  // (ordinal, address) of IPC mappings
  mutable std::mutex mutex_;
  std::vector<Workspace> workspaces_;
  int64_t taken_ = 0;
};

std::shared_ptr<HeapCuda> CurrentHeapCuda();
void SetCurrentHeapCuda(std::shared_ptr<HeapCuda> heap);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CUDA_H_
