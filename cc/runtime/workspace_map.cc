#include "runtime/workspace_map.h"

#include <algorithm>

namespace jflux {

bool WorkspaceMap::Add(const std::vector<int64_t>& groups, int64_t bytes, int64_t place,
                       std::string* error) {
  if (place < 0 || bytes < 0 || place + bytes > capacity_) {
    *error = "workspace outside the heap";
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  workspaces_.push_back(Workspace{groups, bytes, first_offset_ + place});
  taken_ = std::max(taken_, place + bytes);
  return true;
}

std::optional<int64_t> WorkspaceMap::Find(const int64_t* groups, size_t count, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Workspace& w : workspaces_) {
    if (w.bytes == bytes && std::equal(w.groups.begin(), w.groups.end(), groups, groups + count)) {
      return w.offset;
    }
  }
  if (places_ == Places::kAgreed || taken_ + bytes > capacity_) return std::nullopt;
  workspaces_.push_back(
      Workspace{std::vector<int64_t>(groups, groups + count), bytes, first_offset_ + taken_});
  taken_ += bytes;
  return workspaces_.back().offset;
}

int64_t WorkspaceMap::BytesTaken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return taken_;
}

}  // namespace jflux
