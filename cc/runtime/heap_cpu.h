// The symmetric heap in host memory: one segment per rank (CPU device), plus one workspace table.
//
// Each process makes one memory file for the segments of its own devices, and maps those of the
// machine's other processes through /proc; nothing is left behind when a process is killed. The
// workspace table lives in the first process's file.
#ifndef JFLUX_RUNTIME_HEAP_CPU_H_
#define JFLUX_RUNTIME_HEAP_CPU_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/layout.h"
#include "runtime/workspace_table.h"

namespace jflux {

class HeapCpu {
 public:
  // Step 1, in every process: memory for `devices` (global ids) of this process. Returns null and
  // says why on failure.
  static std::unique_ptr<HeapCpu> Create(const std::vector<int64_t>& devices, int64_t heap_bytes,
                                         double deadline_s, bool owns_table, std::string* error);
  ~HeapCpu();

  // "pid:fd", for the other processes.
  std::string Handle() const;

  // Step 2, for each other process: maps its segments. `has_table`: it is the one that owns the
  // workspace table.
  bool Attach(const std::string& handle, const std::vector<int64_t>& devices, bool has_table,
              std::string* error);

  // Zeroes the signals of a workspace on all ranks.
  void ClearSignals(int64_t offset, int64_t bytes);

  // Fills the data of every free workspace of the local segments with NaN (all bits set).
  void PoisonFree();

  int64_t heap_bytes() const { return heap_bytes_; }
  double deadline_s() const { return deadline_s_; }
  WorkspaceTable* table() const { return table_; }
  bool IsLocal(int64_t device) const { return local_.count(device) != 0; }
  TestHooks& hooks() { return hooks_; }
  // Null for a device that this heap does not know.
  char* SegmentOf(int64_t device) const;

 private:
  HeapCpu() = default;
  bool MapFile(int fd, const std::vector<int64_t>& devices, bool has_table, std::string* error);

  int64_t heap_bytes_ = 0;
  TestHooks hooks_{};
  double deadline_s_ = 0;
  int fd_ = -1;
  WorkspaceTable* table_ = nullptr;
  std::map<int64_t, char*> segments_;
  std::map<int64_t, bool> local_;
  std::vector<std::pair<void*, size_t>> mappings_;
};

// The process's heap; null before init. Handlers hold the pointer while they run.
std::shared_ptr<HeapCpu> CurrentHeapCpu();
void SetCurrentHeapCpu(std::shared_ptr<HeapCpu> heap);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEAP_CPU_H_
