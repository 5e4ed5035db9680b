// Back end `cuda`: the symmetric heap in GPU memory.
//
// Each device has a DeviceState, which its kernels read, and the workspaces of runtime/
// workspaces_cuda.h. One process drives all GPUs of a node, or several processes do.
//
//   writers   The host writes DeviceState between calls (cudaMemcpy after a synchronisation, so
//             every later kernel sees it). Kernels write workspaces by the protocol of
//             core/signal.h. HostRecords are in mapped host memory: the first failed wait of a
//             device writes the fault, `kind` last and with release at system scope; the first
//             wait of a call that lasts long writes the warning likewise.
//   waiters   A thread of the host polls the records with acquire. It prints a fault once, and has
//             the waits on the process's other devices end (Abort). It prints each warning, and
//             clears it.
//   reset     Never, while the heap lives.
#ifndef JFLUX_RUNTIME_HEAP_CUDA_H_
#define JFLUX_RUNTIME_HEAP_CUDA_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda_device.h"
#include "runtime/heap.h"
#include "runtime/workspaces_cuda.h"

namespace jflux {

class HeapCuda final : public Heap {
 public:
  // Loads every kernel on every device. A later load could have to wait for a kernel that spins.
  static std::shared_ptr<HeapCuda> Create(const HeapConfig& config, std::string* error);
  // The same for one device, with memory of NVSHMEM, which has been started.
  static std::shared_ptr<HeapCuda> CreateWithNvshmem(const HeapConfig& config, std::string* error);
  ~HeapCuda() override;

  const char* name() const override { return name_; }
  // An empty handle: workspaces have handles of their own.
  bool Export(std::string* handle, std::string*) const override {
    handle->clear();
    return true;
  }
  bool Attach(const std::string&, std::string*) override { return true; }

  bool AddWorkspace(const WorkspaceId& id, std::string* handle, std::string* error) override {
    return workspaces_.Add(id, handle, error);
  }
  bool AttachWorkspace(const WorkspaceId& id, const std::string& handle,
                       std::string* error) override {
    return workspaces_.Attach(id, handle, error);
  }
  bool CommitWorkspace(const WorkspaceId& id, std::string* error) override {
    return workspaces_.Commit(id, error);
  }
  bool HasWorkspace(const WorkspaceId& id) const override { return workspaces_.Has(id); }
  bool CloseWorkspace(const WorkspaceId& id, std::string* error) override {
    return workspaces_.Close(id, error);
  }
  bool FreeWorkspace(const WorkspaceId& id, std::string* error) override {
    return workspaces_.Free(id, error);
  }
  std::vector<WorkspaceId> UnusedWorkspaces() const override { return workspaces_.Unused(); }
  HeapUsage Usage() override;

  bool Probe(const WorkspaceId& id, ProbeStep step, std::string* error) override;
  void Close() override;
  std::optional<std::string> FaultOf(int64_t local) const override;

  // Called when this process has failed on one device. Its kernels on other devices would wait for
  // that device in vain, so this ends their waits, and makes AbortReason() `why`. The first reason
  // stays.
  //
  // A wait learns of it from a word in host memory, which it reads after half a millisecond. (A
  // word in device memory would need a copy by a stream of this thread's, which can wait behind a
  // lock that a launch holds, and which fails after a trap.)
  void Abort(const std::string& why);
  // The reason for which no device of this process can make a call any more. A new heap has none.
  std::optional<std::string> AbortReason();
  // Takes the warning of a wait on a local device, if there is a new one.
  std::optional<std::string> TakeWarning(int64_t local);
  bool SetHooks(const TestHooks& hooks, std::string* error) override;
  bool Poison(std::string* error) override;
  bool Read(const WorkspaceId& id, int64_t device, int64_t offset, int64_t bytes, char* to,
            std::string* error);
  bool SetEpochs(uint64_t epoch, std::string* error) override;

  const CudaDevice* DeviceOf(int ordinal) const;
  const std::vector<int>& ordinals() const { return config_.ordinals; }
  CudaWorkspaces& workspaces() { return workspaces_; }

  // The timeline (timeline_cuda.cu); between calls only. Start has all kernels record what they do,
  // up to `capacity` events for each device. Stop frees the events.
  bool StartTimeline(uint32_t capacity, std::string* error);
  // Reads the events of a local device, by the host's clock. `*missed` events found no room.
  bool ReadTimeline(int64_t id, std::vector<TimelineEvent>* events, uint32_t* missed,
                    std::string* error);
  bool StopTimeline(std::string* error);

 private:
  HeapCuda(HeapConfig config, const char* name, std::unique_ptr<WorkspaceMemory> memory);
  static std::shared_ptr<HeapCuda> Create(const HeapConfig& config, const char* name,
                                          std::unique_ptr<WorkspaceMemory> memory,
                                          std::string* error);
  bool PrepareDevice(CudaDevice* device, std::string* error);
  bool Synchronize(std::string* error);
  bool EnablePeerAccess(const CudaDevice& device, std::string* error);

  const char* name_;
  CudaWorkspaces workspaces_;
  std::vector<CudaDevice> devices_;
  mutable std::mutex abort_mutex_;
  std::string abort_reason_;  // empty: none
};

std::shared_ptr<HeapCuda> CurrentHeapCuda();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CUDA_H_
