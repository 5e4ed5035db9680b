// The symmetric heap: the memory in which ranks (devices) write to each other. It holds workspaces
// (core/layout.h) and nothing of XLA's. Every device of a node has a copy of a workspace; a node is
// the devices that can map each other's memory (jflux/_heap/_nodes.py).
//
//   writers   A rank's kernels or threads write to its own copy and to its peers' copies. What they
//             write where, in which memory order, and how it is reset is the protocol of
//             core/signal.h and core/packet.h. A heap only gives out memory that starts as zeros.
//   waiters   Nothing here waits for a peer, except the probe of the links (runtime/link_probe.h),
//             and WorkspaceTable for room (the CPU back end alone).
//   order     Create, Export, Attach once for each other process of the node; on GPUs the steps of
//             the probe. Then calls may run. The processes exchange handles outside of this library
//             (jflux/_heap/_rendezvous.py).
//   reset     Only by destroying the heap. No call may be running then, in any process.
//
// Back ends, one class each:
//
//   cpu       runtime/heap_cpu.h   host memory; threads of one process or of several
//   cuda      runtime/heap_cuda.h  GPU memory; one process drives all GPUs of a node, or several do
//   nvshmem   the same class, with memory of NVSHMEM (runtime/workspace_memory.h), which also
//             reaches other nodes; a process drives one GPU
//
// They differ in when a workspace gets its memory, and the interface does not hide it:
//
//   per size  (cuda) A workspace belongs to a set of devices and a size, from the first lowering on
//             until no executable uses it: a captured CUDA graph holds its address. AddWorkspace
//             and the functions beside it.
//   per call  (cpu) Each call leases a workspace when it starts and gives it back when it ends,
//             because independent calls run in any order. Nothing is reserved: the lease is between
//             runtime/cpu_call and HeapCpu::table().
#ifndef JFLUX_RUNTIME_HEAP_H_
#define JFLUX_RUNTIME_HEAP_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/signal.h"
#include "runtime/link_probe.h"

namespace jflux {

// The options with which one process makes its part of the heap.
struct HeapConfig {
  std::vector<int64_t> devices;  // global ids of this process's devices
  std::vector<int> ordinals;     // CUDA's number of each of them; empty on the CPU
  int64_t heap_bytes = 0;        // the most that workspaces take, per device
  double deadline_s = 0;         // how long a wait in a call may last
  bool leads = true;             // this process owns what a node's heap has once
  double warn_s = 0;             // after how long a wait warns; 0, or not below deadline_s: never
};

// A timeout in seconds as nanoseconds. Longer than 30 years is 30 years.
inline uint64_t NanosecondsOf(double seconds) {
  return static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9);
}

struct HeapUsage {
  int64_t in_use;   // bytes of each device that are taken now: leased, or reserved
  int64_t touched;  // the most that have ever been
};

// Names a workspace by its set of devices and its size. The order of the devices does not matter: a
// rank finds its own copy and its peers' copies by device.
struct WorkspaceId {
  std::vector<int64_t> devices;  // ascending
  int64_t bytes;

  static WorkspaceId Of(std::vector<int64_t> devices, int64_t bytes) {
    std::sort(devices.begin(), devices.end());
    return WorkspaceId{std::move(devices), bytes};
  }
  bool operator<(const WorkspaceId& o) const {
    return bytes != o.bytes ? bytes < o.bytes : devices < o.devices;
  }
};

class Heap {
 public:
  virtual ~Heap() = default;

  virtual const char* name() const = 0;  // "cpu", "cuda" or "nvshmem"
  int64_t heap_bytes() const { return config_.heap_bytes; }
  double deadline_s() const { return config_.deadline_s; }
  double warn_s() const { return config_.warn_s; }
  // The devices of this process.
  const std::vector<int64_t>& devices() const { return config_.devices; }

  // ---- Several processes: each exports a handle, and attaches those of the node's other
  // processes. A handle is opaque text; empty if there is nothing to attach.
  virtual bool Export(std::string* handle, std::string* error) const = 0;
  virtual bool Attach(const std::string& handle, std::string* error) = 0;

  // ---- Reserved workspaces (cuda). See runtime/workspaces_cuda.h, which has the order.
  virtual bool AddWorkspace(const WorkspaceId& id, std::string* handle, std::string* error);
  virtual bool AttachWorkspace(const WorkspaceId& id, const std::string& handle,
                               std::string* error);
  virtual bool CommitWorkspace(const WorkspaceId& id, std::string* error);
  virtual bool HasWorkspace(const WorkspaceId&) const { return false; }  // committed
  virtual bool CloseWorkspace(const WorkspaceId& id, std::string* error);
  virtual bool FreeWorkspace(const WorkspaceId& id, std::string* error);
  virtual std::vector<WorkspaceId> UnusedWorkspaces() const { return {}; }
  virtual HeapUsage Usage() = 0;

  // ---- Links (cuda): one step of the probe, in the committed workspace `id` of all devices of the
  // node. False if a link cannot be trusted.
  virtual bool Probe(const WorkspaceId& id, ProbeStep step, std::string* error);
  const std::vector<Link>& links() const { return links_; }

  // Waits until no call of this process runs, and unmaps other processes' memory, which these may
  // then free. No call runs afterwards.
  virtual void Close() {}

  // ---- Faults: the first failed wait on a device of this process, as a sentence. A GPU that has
  // one makes no further call. On the CPU a fault belongs to the call, which returns it.
  virtual std::optional<std::string> FaultOf(int64_t) const { return std::nullopt; }

  // ---- Tests only, between calls. Poison fills with NaN what the last calls left in workspaces.
  virtual bool SetHooks(const TestHooks& hooks, std::string* error) = 0;
  virtual bool Poison(std::string* error) = 0;
  // Sets the number of calls that each reserved workspace has made; between calls of all processes.
  virtual bool SetEpochs(uint64_t epoch, std::string* error);

 protected:
  explicit Heap(HeapConfig config) : config_(std::move(config)) {}

  // WaitLimits::warn_left_ns of a wait that starts with all of its time.
  uint64_t WarnLeftNs() const {
    if (config_.warn_s <= 0) return 0;
    return static_cast<uint64_t>(Max(0.0, config_.deadline_s - config_.warn_s) * 1e9);
  }

  HeapConfig config_;
  std::vector<Link> links_;
};

// Makes this process's part of a heap with the back end of that name; null, and why, on failure.
std::shared_ptr<Heap> CreateHeap(const std::string& backend, const HeapConfig& config,
                                 std::string* error);

// A process has at most one heap per platform; null before it is created and after shutdown.
// Handlers hold the pointer while they run.
enum class HeapPlatform { kCpu, kCuda };
std::shared_ptr<Heap> CurrentHeap(HeapPlatform platform);
void SetCurrentHeap(HeapPlatform platform, std::shared_ptr<Heap> heap);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_H_
