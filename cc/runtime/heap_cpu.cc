#include "runtime/heap_cpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/packet.h"

namespace jflux {
namespace {

constexpr int64_t kTableBytes = RoundUp<int64_t>(sizeof(WorkspaceTable), 4096);

std::string Errno(const std::string& what) { return what + ": " + std::strerror(errno); }

std::mutex g_mutex;
std::shared_ptr<HeapCpu>& Current() {
  static auto* current = new std::shared_ptr<HeapCpu>;  // outlives XLA's threads on purpose
  return *current;
}

}  // namespace

std::shared_ptr<HeapCpu> CurrentHeapCpu() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return Current();
}

void SetCurrentHeapCpu(std::shared_ptr<HeapCpu> heap) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Current() = std::move(heap);
}

// File layout: [workspace table, if owned][segment of devices[0]][segment of devices[1]] ...
bool HeapCpu::MapFile(int fd, const std::vector<int64_t>& devices, bool has_table,
                      std::string* error) {
  const int64_t head = has_table ? kTableBytes : 0;
  const auto size = static_cast<size_t>(head + heap_bytes_ * static_cast<int64_t>(devices.size()));
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    *error = Errno("cannot map " + std::to_string(size) + " bytes for the symmetric heap");
    return false;
  }
  mappings_.emplace_back(base, size);
  if (has_table) table_ = static_cast<WorkspaceTable*>(base);
  char* segment = static_cast<char*>(base) + head;
  for (int64_t device : devices) {
    segments_[device] = segment;
    segment += heap_bytes_;
  }
  return true;
}

std::unique_ptr<HeapCpu> HeapCpu::Create(const std::vector<int64_t>& devices, int64_t heap_bytes,
                                         double deadline_s, bool owns_table, std::string* error) {
  std::unique_ptr<HeapCpu> heap(new HeapCpu);
  heap->heap_bytes_ = RoundUp<int64_t>(heap_bytes, 4096);
  heap->deadline_s_ = deadline_s;
  heap->fd_ = memfd_create("jflux-heap", MFD_CLOEXEC);
  const int64_t size =
      (owns_table ? kTableBytes : 0) + heap->heap_bytes_ * static_cast<int64_t>(devices.size());
  if (heap->fd_ < 0 || ftruncate(heap->fd_, size) != 0) {
    *error = Errno("cannot create a memory file of " + std::to_string(size) + " bytes");
    return nullptr;
  }
  if (!heap->MapFile(heap->fd_, devices, owns_table, error)) return nullptr;
  for (int64_t device : devices) heap->local_[device] = true;
  return heap;
}

HeapCpu::~HeapCpu() {
  for (auto& [base, size] : mappings_) munmap(base, size);
  if (fd_ >= 0) close(fd_);
}

std::string HeapCpu::Handle() const { return std::to_string(getpid()) + ":" + std::to_string(fd_); }

bool HeapCpu::Attach(const std::string& handle, const std::vector<int64_t>& devices, bool has_table,
                     std::string* error) {
  const size_t colon = handle.find(':');
  const std::string path = "/proc/" + handle.substr(0, colon) + "/fd/" + handle.substr(colon + 1);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    *error = Errno("cannot open a peer process's heap at " + path +
                   " (CPU processes must run on one machine, as one user)");
    return false;
  }
  const bool ok = MapFile(fd, devices, has_table, error);
  close(fd);
  return ok;
}

void HeapCpu::ClearSignals(int64_t offset, int64_t bytes) {
  const auto packets = PacketLayout::OfTotal(bytes);
  const int64_t signals = packets ? bytes : WorkspaceLayout::OfTotal(bytes).DataOffset(0);
  for (const auto& [device, segment] : segments_) std::memset(segment + offset, 0, signals);
}

void HeapCpu::PoisonFree() {
  table_->ForEachFree([this](int64_t offset, int64_t bytes) {
    const auto packets = PacketLayout::OfTotal(bytes);
    const WorkspaceLayout workspace = WorkspaceLayout::OfTotal(bytes);
    for (const auto& [device, is_local] : local_) {
      char* base = segments_.at(device) + offset;
      if (packets) {
        std::memset(base + packets->PacketOffset(0), kPacketPoison, 2 * packets->half_bytes);
      } else {
        std::memset(base + workspace.DataOffset(0), 0xff, 2 * workspace.data_bytes);
      }
    }
  });
}

char* HeapCpu::SegmentOf(int64_t device) const {
  const auto it = segments_.find(device);
  return it == segments_.end() ? nullptr : it->second;
}

}  // namespace jflux
