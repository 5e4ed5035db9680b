// Back end `cpu`: the symmetric heap in host memory.
//
// Each process makes one memory file for the segments of its own devices, and maps the files of
// the machine's other processes through /proc. Nothing is left behind when a process is killed.
// The leading process's file begins with the workspace table, which all processes share:
//
//   [WorkspaceTable, if this process leads][segment of devices[0]][segment of devices[1]] ...
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
  // "pid:fd:leads:devices"
  bool Export(std::string* handle, std::string* error) const override;
  bool Attach(const std::string& handle, std::string* error) override;
  bool Probe(std::string*) override { return true; }
  char* SegmentOf(int64_t, int64_t device) const override { return SegmentOf(device); }
  HeapUsage Usage() override;
  bool SetHooks(const TestHooks& hooks, std::string* error) override;
  // Fills the data of every free workspace of the local segments with NaN (all bits set).
  bool Poison(std::string* error) override;

  // All of this process's threads have the same addresses. Null for an unknown device.
  char* SegmentOf(int64_t device) const;
  bool IsLocal(int64_t device) const;
  const TestHooks& hooks() const { return hooks_; }

  // Leases: null before the leading process's file is attached.
  WorkspaceTable* table() const { return table_; }
  // Zeroes the signals of a workspace on all ranks.
  void ClearSignals(int64_t offset, int64_t bytes);

 private:
  explicit HeapCpu(HeapConfig config) : Heap(std::move(config)) {}
  bool MapFile(int fd, const std::vector<int64_t>& devices, bool has_table, std::string* error);

  TestHooks hooks_{};
  int fd_ = -1;
  WorkspaceTable* table_ = nullptr;
  std::map<int64_t, char*> segments_;
  std::map<int64_t, uint32_t> poisoned_;  // a workspace's last epoch when it was, by offset
  std::vector<std::pair<void*, size_t>> mappings_;
};

std::shared_ptr<HeapCpu> CurrentHeapCpu();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CPU_H_
