// Back end `cpu`: the symmetric heap in host memory.
//
// Each process makes one memory file for the segments of its own devices, and maps the files of
// the node's other processes through /proc. Nothing is left behind when a process is killed.
// The leading process's file begins with the workspace table, which all processes share:
//
//   [FileHead][WorkspaceTable, if this process leads][segment of devices[0]][... of devices[1]] ...
//
// A path below /proc names a file only within one PID namespace: in another it may lead to some
// other file, even to the reader's own. FileHead has a random number, and the handle has it too.
//
//   writers   Every process writes the table (under its lock) and the segments (by the protocol of
//             core/signal.h). A call's workspace is leased from the table when it starts.
//   waiters   WorkspaceTable::Acquire waits for room.
//   reset     Memory that was part of another workspace has its signals zeroed (ClearSignals)
//             under the table's lock, before anybody gets the lease.
#ifndef JFLUX_RUNTIME_HEAP_CPU_H_
#define JFLUX_RUNTIME_HEAP_CPU_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/heap.h"
#include "runtime/workspace_table.h"

namespace jflux {

class HeapCpu final : public Heap {
 public:
  static std::shared_ptr<HeapCpu> Create(const HeapConfig& config, std::string* error);
  ~HeapCpu() override;

  const char* name() const override { return "cpu"; }
  // "pid:fd:number of FileHead:leads:devices"
  bool Export(std::string* handle, std::string* error) const override;
  bool Attach(const std::string& handle, std::string* error) override;
  HeapUsage Usage() override;
  bool SetHooks(const TestHooks& hooks, std::string* error) override;
  // Fills the data of every free workspace of the local segments with NaN (all bits set).
  bool Poison(std::string* error) override;
  bool SetEpochs(uint64_t epoch, std::string* error) override;

  // The workspace at `offset` as rank `rank` of these devices sees it. Returns a device that the
  // heap does not know, if there is one.
  std::optional<int64_t> FillView(const std::vector<int64_t>& devices, int32_t rank, int64_t offset,
                                  SymmetricView* view) const;
  // All of this process's threads have the same addresses. Null for an unknown device.
  char* SegmentOf(int64_t device) const;
  bool IsLocal(int64_t device) const;
  // The process that has made the heap, by getpid().
  int64_t owner() const { return owner_; }
  const TestHooks& hooks() const { return hooks_; }

  // The limits of the waits of this process's ranks. TakeWarning is HeapCuda's, for any of these
  // waits.
  WaitLimits* limits() { return &limits_; }
  std::optional<std::string> TakeWarning();

  // Leases: null before the leading process's file is attached.
  WorkspaceTable* table() const { return table_; }
  // Zeroes the signals of a workspace on all ranks.
  void ClearSignals(int64_t offset, int64_t bytes);

 private:
  explicit HeapCpu(HeapConfig config)
      : Heap(std::move(config)), limits_{NanosecondsOf(deadline_s()), WarnLeftNs(), /*warned=*/0,
                                         /*fault=*/nullptr,           &warning_,    &abort_} {}
  bool CanBeHeapOf(const std::vector<int64_t>& devices, bool leads, uint64_t number, int fd,
                   std::string* error) const;
  bool MapFile(int fd, const std::vector<int64_t>& devices, bool has_table, std::string* error);

  Fault warning_{};
  uint64_t abort_ = 0;  // nobody sets it: a rank that fails ends its call, and no other
  WaitLimits limits_;
  TestHooks hooks_{};
  int64_t owner_ = 0;
  int fd_ = -1;
  uint64_t number_ = 0;  // of FileHead
  WorkspaceTable* table_ = nullptr;
  std::map<int64_t, char*> segments_;
  std::map<int64_t, uint64_t> poisoned_;  // a workspace's last epoch when it was, by offset
  std::vector<std::pair<void*, size_t>> mappings_;
};

std::shared_ptr<HeapCpu> CurrentHeapCpu();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CPU_H_
