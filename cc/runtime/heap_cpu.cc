#include "runtime/heap_cpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <sstream>

#include "core/packet.h"
#include "runtime/fault.h"

namespace jflux {
namespace {

constexpr int64_t kTableBytes = RoundUp<int64_t>(sizeof(WorkspaceTable), 4096);

// The first page of a memory file.
struct FileHead {
  uint64_t number;  // random, never 0
};
constexpr int64_t kHeadBytes = 4096;

std::string Errno(const std::string& what) { return what + ": " + std::strerror(errno); }

// The handle that Export writes.
struct Handle {
  int64_t pid, fd;
  uint64_t number;
  bool leads;
  std::vector<int64_t> devices;
};

// Digits, colons and commas, as Export writes them, and nothing else.
bool ParseHandle(const std::string& text, Handle* handle) {
  if (text.find_first_not_of("0123456789:,") != std::string::npos) return false;
  std::istringstream in(text);
  char colon[4];
  int leads = 0;
  if (!(in >> handle->pid >> colon[0] >> handle->fd >> colon[1] >> handle->number >> colon[2] >>
        leads >> colon[3])) {
    return false;
  }
  if (!std::all_of(colon, colon + 4, [](char c) { return c == ':'; }) || leads > 1) return false;
  handle->leads = leads != 0;
  while (in.peek() != EOF) {
    if (!handle->devices.empty() && in.get() != ',') return false;
    int64_t device;
    if (!(in >> device)) return false;
    handle->devices.push_back(device);
  }
  return true;
}

}  // namespace

std::shared_ptr<HeapCpu> CurrentHeapCpu() {
  return std::static_pointer_cast<HeapCpu>(CurrentHeap(HeapPlatform::kCpu));
}

std::optional<int64_t> HeapCpu::FillView(const std::vector<int64_t>& devices, int32_t rank,
                                         int64_t offset, SymmetricView* view) const {
  *view = SymmetricView{};
  view->rank = rank;
  view->world = static_cast<int32_t>(devices.size());
  for (int32_t r = 0; r < view->world; ++r) {
    char* segment = SegmentOf(devices[r]);
    if (segment == nullptr) return devices[r];
    view->base[r] = segment + offset;
  }
  return std::nullopt;
}

bool HeapCpu::MapFile(int fd, const std::vector<int64_t>& devices, bool has_table,
                      std::string* error) {
  const int64_t head = kHeadBytes + (has_table ? kTableBytes : 0);
  const auto size = static_cast<size_t>(head + heap_bytes() * static_cast<int64_t>(devices.size()));
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    *error = Errno("cannot map " + std::to_string(size) + " bytes for the symmetric heap");
    return false;
  }
  mappings_.emplace_back(base, size);
  if (has_table) {
    table_ = reinterpret_cast<WorkspaceTable*>(static_cast<char*>(base) + kHeadBytes);
  }
  char* segment = static_cast<char*>(base) + head;
  for (int64_t device : devices) {
    segments_[device] = segment;
    segment += heap_bytes();
  }
  return true;
}

std::shared_ptr<HeapCpu> HeapCpu::Create(const HeapConfig& config, std::string* error) {
  std::shared_ptr<HeapCpu> heap(new HeapCpu(config));
  heap->owner_ = getpid();
  heap->config_.heap_bytes = RoundUp<int64_t>(config.heap_bytes, 4096);
  heap->fd_ = memfd_create("jflux-heap", MFD_CLOEXEC);
  const int64_t size = kHeadBytes + (config.leads ? kTableBytes : 0) +
                       heap->heap_bytes() * static_cast<int64_t>(config.devices.size());
  std::random_device random;
  FileHead head{(static_cast<uint64_t>(random()) << 32 | random()) | 1};
  if (heap->fd_ < 0 || ftruncate(heap->fd_, size) != 0 ||
      pwrite(heap->fd_, &head, sizeof(head), 0) != static_cast<ssize_t>(sizeof(head))) {
    *error = Errno("cannot create a memory file of " + std::to_string(size) + " bytes");
    return nullptr;
  }
  heap->number_ = head.number;
  if (!heap->MapFile(heap->fd_, config.devices, config.leads, error)) return nullptr;
  return heap;
}

HeapCpu::~HeapCpu() {
  for (auto& [base, size] : mappings_) munmap(base, size);
  if (fd_ >= 0) close(fd_);
}

bool HeapCpu::Export(std::string* handle, std::string*) const {
  std::ostringstream out;
  out << getpid() << ':' << fd_ << ':' << number_ << ':' << config_.leads << ':';
  for (size_t i = 0; i < devices().size(); ++i) out << (i == 0 ? "" : ",") << devices()[i];
  *handle = out.str();
  return true;
}

// Whether the file can be the heap of the handle: pages behind its end could be mapped, and would
// end the process when they are read.
bool HeapCpu::CanBeHeapOf(const std::vector<int64_t>& devices, bool leads, uint64_t number, int fd,
                          std::string* error) const {
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto begin = devices.begin();
    const int64_t device = devices[i];
    if (segments_.count(device) != 0 || std::find(begin, begin + i, device) != begin + i) {
      *error = "two processes, or one twice, have the device " + std::to_string(device);
      return false;
    }
  }
  if (leads && table_ != nullptr) {
    *error = "two processes lead";
    return false;
  }
  const int64_t bytes =
      kHeadBytes + (leads ? kTableBytes : 0) + heap_bytes() * static_cast<int64_t>(devices.size());
  struct stat found{};
  FileHead head{};
  if (fstat(fd, &found) != 0 || found.st_size != bytes ||
      pread(fd, &head, sizeof(head), 0) != static_cast<ssize_t>(sizeof(head)) ||
      head.number != number) {
    *error =
        "a peer process's heap is not where its handle says: the processes are in different PID "
        "namespaces; in containers, share one (shareProcessNamespace, --pid=host)";
    return false;
  }
  return true;
}

bool HeapCpu::Attach(const std::string& text, std::string* error) {
  Handle handle{};
  if (!ParseHandle(text, &handle)) {
    *error = "malformed handle of a peer process's heap: " + text.substr(0, 200);
    return false;
  }
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    *error = Errno("cannot open a peer process's heap at " + path +
                   " (the processes of a node run as one user, in one PID namespace)");
    return false;
  }
  const bool ok = CanBeHeapOf(handle.devices, handle.leads, handle.number, fd, error) &&
                  MapFile(fd, handle.devices, handle.leads, error);
  close(fd);
  return ok;
}

HeapUsage HeapCpu::Usage() {
  if (table_ == nullptr) return HeapUsage{0, 0};
  return HeapUsage{table_->BytesInUse(), table_->BytesTouched()};
}

bool HeapCpu::SetHooks(const TestHooks& hooks, std::string*) {
  hooks_ = hooks;
  return true;
}

void HeapCpu::ClearSignals(int64_t offset, int64_t bytes) {
  const auto packets = PacketLayout::OfTotal(bytes);
  const int64_t signals = packets ? bytes : WorkspaceLayout::OfTotal(bytes).DataOffset(0);
  for (const auto& [device, segment] : segments_) std::memset(segment + offset, 0, signals);
}

bool HeapCpu::Poison(std::string* error) {
  const bool done = table_->ForEachFree([this](int64_t offset, int64_t bytes, uint64_t epoch) {
    // All workspaces share one count of epochs: an equal epoch means the same workspace, unused.
    const auto [last, is_new] = poisoned_.try_emplace(offset, epoch);
    if (!is_new && last->second == epoch) return;
    last->second = epoch;
    const auto packets = PacketLayout::OfTotal(bytes);
    const WorkspaceLayout workspace = WorkspaceLayout::OfTotal(bytes);
    for (int64_t device : devices()) {
      char* base = segments_.at(device) + offset;
      if (packets) {
        std::memset(base + packets->PacketOffset(0), kPacketPoison, 2 * packets->half_bytes);
      } else {
        std::memset(base + workspace.DataOffset(0), 0xff, 2 * workspace.data_bytes);
      }
    }
  });
  if (!done) *error = "the directory of the symmetric heap is locked: did a process end?";
  return done;
}

bool HeapCpu::SetEpochs(uint64_t epoch, std::string* error) {
  if (table_ != nullptr && table_->SetLastEpoch(epoch)) return true;
  *error = "the directory of the symmetric heap is locked, or not attached";
  return false;
}

std::optional<std::string> HeapCpu::TakeWarning() {
  if (LoadAcquire(&warning_.kind) == 0) return std::nullopt;
  const std::string text = DescribeWarning(warning_, warn_s(), deadline_s());
  StoreRelease(&warning_.kind, 0);
  return text;
}

char* HeapCpu::SegmentOf(int64_t device) const {
  const auto it = segments_.find(device);
  return it == segments_.end() ? nullptr : it->second;
}

bool HeapCpu::IsLocal(int64_t device) const {
  return std::find(devices().begin(), devices().end(), device) != devices().end();
}

}  // namespace jflux
