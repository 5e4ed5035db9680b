// The GPU back ends' reserved workspaces: which offset belongs to (groups, size).
//
//   writers   Threads that lower a program (Add, Find) and, in one process, handlers (Find).
//   readers   Handlers (Find), on XLA's threads.
//   order     A mutex. A handler that runs a program sees what the lowering of it reserved.
//   reset     Never: a captured CUDA graph holds the addresses for as long as the heap lives.
//
// Who decides the place:
//
//   kHere     One process: the next free place, when a workspace is first asked for.
//   kAgreed   Several processes: they agree on it (jflux/_heap/_agreement.py) and call Add. Find
//             alone never makes a workspace, or processes would put it in different places.
#ifndef JFLUX_RUNTIME_WORKSPACE_MAP_H_
#define JFLUX_RUNTIME_WORKSPACE_MAP_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace jflux {

class WorkspaceMap {
 public:
  enum class Places { kHere, kAgreed };

  // Workspaces take the bytes [first_offset, first_offset + capacity) of each segment.
  WorkspaceMap(int64_t first_offset, int64_t capacity, Places places)
      : first_offset_(first_offset), capacity_(capacity), places_(places) {}

  // Reserves a place that all processes have agreed on, counted from the first workspace.
  bool Add(const std::vector<int64_t>& groups, int64_t bytes, int64_t place, std::string* error);

  // The offset in each segment; nothing if there is no room (kHere) or no place yet (kAgreed).
  std::optional<int64_t> Find(const int64_t* groups, size_t count, int64_t bytes);

  int64_t BytesTaken() const;

  // visit(offset, bytes) -> bool for each workspace, until it returns false. None is added
  // meanwhile.
  template <typename F>
  bool ForEach(F&& visit) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Workspace& w : workspaces_) {
      if (!visit(w.offset, w.bytes)) return false;
    }
    return true;
  }

 private:
  struct Workspace {
    std::vector<int64_t> groups;
    int64_t bytes;
    int64_t offset;
  };

  const int64_t first_offset_;
  const int64_t capacity_;
  const Places places_;
  mutable std::mutex mutex_;
  std::vector<Workspace> workspaces_;
  int64_t taken_ = 0;
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_WORKSPACE_MAP_H_
