// The symmetric heap: one segment of memory per rank (device), in which the same offset means the
// same object on every rank. It holds workspaces (core/layout.h) and nothing of XLA's.
//
//   writers   A rank's kernels or threads write to its own segment and to its peers' segments. What
//             they write where, in which memory order, and how it is reset is the protocol of
//             core/signal.h and core/packet.h. A heap only gives out memory that starts as zeros.
//   waiters   Nothing here waits, except Attach (for the other process's memory to be mapped) and
//             WorkspaceTable (for room; the CPU back end alone).
//   order     Create, Export, Attach once for each other process, Probe; then calls may run. The
//             processes exchange handles outside of this library (jflux/_heap/_rendezvous.py),
//             which orders one process's Create before another's Attach.
//   reset     Only by destroying the heap. No call may be running then, in any process.
//
// Back ends, one class each:
//
//   cpu        runtime/heap_cpu.h       host memory; threads of one process or of several
//   cuda_peer  runtime/heap_cuda_peer.h  one process drives all GPUs
//   cuda_ipc   runtime/heap_cuda_ipc.h  one process per GPU (or per several) on one host
//
// They differ in when a workspace gets its place, and the interface does not hide it:
//
//   per size  (cuda_*) A workspace belongs to one set of groups and one size from the first
//   lowering
//             on, as long as the heap lives: a captured CUDA graph holds its address. workspaces()
//             is where it is reserved.
//   per call  (cpu) Each call leases a workspace when it starts and gives it back when it ends,
//             because independent calls run in any order. Nothing is reserved: workspaces() is
//             null, and the lease is between runtime/cpu_call and HeapCpu::table().
#ifndef JFLUX_RUNTIME_HEAP_H_
#define JFLUX_RUNTIME_HEAP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/signal.h"
#include "runtime/link_probe.h"
#include "runtime/workspace_map.h"

namespace jflux {

// What one process asks for when it makes its part of the heap.
struct HeapConfig {
  std::vector<int64_t> devices;  // global ids of this process's devices
  std::vector<int> ordinals;     // CUDA's number of each of them; empty on the CPU
  int64_t heap_bytes = 0;        // per device
  double deadline_s = 0;         // how long a wait in a call may last
  bool leads = true;             // this process owns what a heap has once; true in one process
};

struct HeapUsage {
  int64_t in_use;   // bytes of each segment that are taken now: leased, or reserved
  int64_t touched;  // the most that have ever been
};

class Heap {
 public:
  virtual ~Heap() = default;

  virtual const char* name() const = 0;  // "cpu", "cuda_peer", "cuda_ipc"
  int64_t heap_bytes() const { return config_.heap_bytes; }
  double deadline_s() const { return config_.deadline_s; }
  // The devices of this process.
  const std::vector<int64_t>& devices() const { return config_.devices; }

  // ---- Several processes: each exports its segments, and attaches those of each other process. A
  // handle is opaque text. A back end for one process has neither.
  virtual bool Export(std::string* handle, std::string* error) const;
  virtual bool Attach(const std::string& handle, std::string* error);

  // After all attachments. False if a link cannot be trusted. On the CPU there are no links.
  virtual bool Probe(std::string* error) = 0;
  const std::vector<Link>& links() const { return links_; }

  // ---- Views: where `device`'s segment is for a kernel or thread of `local`, a device of this
  // process; null for a device that the heap does not know.
  virtual char* SegmentOf(int64_t local, int64_t device) const = 0;
  // The workspace at `offset` as rank `rank` of these devices sees it. Returns a device that the
  // heap does not know, if there is one.
  std::optional<int64_t> FillView(const std::vector<int64_t>& devices, int32_t rank, int64_t offset,
                                  SymmetricView* view) const;

  // ---- Allocation, see above.
  virtual WorkspaceMap* workspaces() { return nullptr; }
  virtual HeapUsage Usage() = 0;

  // ---- Faults: the first failed wait on a device of this process, as a sentence. A GPU that has
  // one makes no further call. On the CPU a fault belongs to the call, which returns it.
  virtual std::optional<std::string> FaultOf(int64_t) const { return std::nullopt; }

  // ---- Tests only, between calls. Poison fills with NaN what the last calls left in workspaces.
  virtual bool SetHooks(const TestHooks& hooks, std::string* error) = 0;
  virtual bool Poison(std::string* error) = 0;
  // As if each reserved workspace had made so many calls; between calls of all processes.
  virtual bool SetEpochs(uint32_t epoch, std::string* error);

 protected:
  explicit Heap(HeapConfig config) : config_(std::move(config)) {}

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
