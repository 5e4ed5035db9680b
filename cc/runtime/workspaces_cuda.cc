#ifdef JFLUX_WITH_CUDA

#include "runtime/workspaces_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <sstream>

#include "runtime/cuda_check.h"

namespace jflux {
namespace {

// Bytes at the start of a workspace that must be zeros before its first call: the signals, or all
// bytes of a workspace without a layout, as the probe of the links has. The memory may still hold
// data of an earlier probe, which the next one would take for its own.
int64_t BytesToClear(int64_t bytes) {
  const WorkspaceLayout layout = WorkspaceLayout::OfTotal(bytes);
  return layout.TotalBytes() == bytes ? layout.DataOffset(0) : bytes;
}

// Zeroes by the copy engine: a memset is a kernel, and all SMs may be taken by one that waits.
bool Clear(char* address, int64_t bytes, std::string* error) {
  constexpr int64_t kChunk = 1 << 20;
  static char* zeros = [] {
    void* p = nullptr;
    if (cudaHostAlloc(&p, kChunk, cudaHostAllocPortable) != cudaSuccess) return (char*)nullptr;
    std::fill_n(static_cast<char*>(p), kChunk, '\0');
    return static_cast<char*>(p);
  }();
  if (zeros == nullptr) {
    *error = "no pinned host memory to clear a workspace with";
    return false;
  }
  cudaStream_t stream;
  JFLUX_CUDA_OR_FALSE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), error);
  cudaError_t status = cudaSuccess;
  for (int64_t at = 0; at < bytes && status == cudaSuccess; at += kChunk) {
    status = cudaMemcpyAsync(address + at, zeros, std::min(kChunk, bytes - at),
                             cudaMemcpyHostToDevice, stream);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  JFLUX_CUDA_OR_FALSE(status, error);
  return true;
}

bool Missing(std::string* error) {
  *error = "the symmetric heap has no such workspace";
  return false;
}

}  // namespace

CudaWorkspaces::~CudaWorkspaces() {
  for (auto& [id, workspace] : workspaces_) {
    CloseOpened(&workspace.opened);
    FreeOwn(&workspace);
  }
}

bool CudaWorkspaces::Add(const WorkspaceId& id, std::string* handle, std::string* error) {
  handle->clear();
  Workspace workspace;
  const bool has_others = std::any_of(id.devices.begin(), id.devices.end(),
                                      [&](int64_t device) { return ordinals_.count(device) == 0; });
  for (int64_t device : id.devices) {
    if (ordinals_.count(device) == 0) continue;
    if (!AddCopy(id, device, &workspace, error) ||
        (has_others && !AppendHandle(device, workspace, handle, error))) {
      FreeOwn(&workspace);
      return false;
    }
  }
  for (const auto& [local, own] : workspace.own) {
    for (const auto& [device, address] : workspace.own) {
      workspace.reached[{local, device}] = PeerCopy{address, {address}};
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workspaces_.try_emplace(id, std::move(workspace)).second) return true;
  }
  FreeOwn(&workspace);
  *error = "the symmetric heap has this workspace";
  return false;
}

bool CudaWorkspaces::AddCopy(const WorkspaceId& id, int64_t device, Workspace* workspace,
                             std::string* error) {
  const int ordinal = ordinals_.at(device);
  JFLUX_CUDA_OR_FALSE(cudaSetDevice(ordinal), error);
  char* address = nullptr;
  if (!memory_->Allocate(ordinal, RoundUp(id.bytes, WorkspaceMemory::kBlockBytes), &address,
                         error)) {
    return false;
  }
  workspace->own[device] = address;
  return Clear(address, BytesToClear(id.bytes), error);
}

// Some systems have no CUDA IPC: one process must not ask for it.
bool CudaWorkspaces::AppendHandle(int64_t device, const Workspace& workspace, std::string* handle,
                                  std::string* error) {
  std::string exported;
  if (!memory_->Export(workspace.own.at(device), &exported, error)) return false;
  *handle += (handle->empty() ? "" : ",") + std::to_string(device) + "=" + exported;
  return true;
}

bool CudaWorkspaces::Attach(const WorkspaceId& id, const std::string& handle, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found == workspaces_.end()) return Missing(error);
  Workspace& workspace = found->second;
  std::istringstream in(handle);
  for (std::string item; std::getline(in, item, ',');) {
    std::istringstream of_device(item);
    int64_t device = 0;
    char equals = 0;
    std::string opens;
    if (!(of_device >> device >> equals >> opens) || equals != '=') {
      *error = "malformed handle of a peer process's workspace: " + handle;
      return false;
    }
    for (const auto& [local, own] : workspace.own) {
      const int ordinal = ordinals_.at(local);
      JFLUX_CUDA_OR_FALSE(cudaSetDevice(ordinal), error);
      PeerCopy copy;
      if (!memory_->Open(ordinal, opens, &copy, error)) {
        *error = "memory of device " + std::to_string(device) + ": " + *error;
        return false;
      }
      if (copy.mapped != nullptr) workspace.opened.emplace_back(ordinal, copy.mapped);
      workspace.reached[{local, device}] = copy;
    }
  }
  return true;
}

bool CudaWorkspaces::Commit(const WorkspaceId& id, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found == workspaces_.end()) return Missing(error);
  for (const auto& [local, own] : found->second.own) {
    for (int64_t device : id.devices) {
      if (found->second.reached.count({local, device}) != 0) continue;
      *error = "device " + std::to_string(device) + " has sent no handle of its workspace";
      return false;
    }
  }
  found->second.committed = true;
  return true;
}

bool CudaWorkspaces::Close(const WorkspaceId& id, std::string* error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = workspaces_.find(id);
    if (found == workspaces_.end()) return Missing(error);
    found->second.committed = false;
  }
  for (int64_t device : id.devices) {
    const auto ordinal = ordinals_.find(device);
    if (ordinal == ordinals_.end()) continue;
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(ordinal->second), error);
    JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
  }
  std::vector<std::pair<int, char*>> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    opened.swap(workspaces_.at(id).opened);
  }
  CloseOpened(&opened);
  return true;
}

bool CudaWorkspaces::Free(const WorkspaceId& id, std::string* error) {
  std::map<WorkspaceId, Workspace>::node_type freed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    freed = workspaces_.extract(id);
  }
  if (freed.empty()) return Missing(error);
  CloseOpened(&freed.mapped().opened);
  FreeOwn(&freed.mapped());
  return true;
}

void CudaWorkspaces::CloseAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [id, workspace] : workspaces_) {
    workspace.committed = false;
    CloseOpened(&workspace.opened);
  }
}

void CudaWorkspaces::CloseOpened(std::vector<std::pair<int, char*>>* opened) {
  for (const auto& [ordinal, address] : *opened) {
    cudaSetDevice(ordinal);
    memory_->Close(address);
  }
  opened->clear();
}

void CudaWorkspaces::FreeOwn(Workspace* workspace) {
  for (const auto& [device, address] : workspace->own) {
    cudaSetDevice(ordinals_.at(device));
    memory_->Free(address);
  }
  workspace->own.clear();
}

bool CudaWorkspaces::View(const std::vector<int64_t>& devices, int32_t rank, int64_t bytes,
                          SymmetricView* view, shmem::RemoteRef* remote) const {
  const WorkspaceId id = WorkspaceId::Of(devices, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found == workspaces_.end() || !found->second.committed) return false;
  *view = SymmetricView{};
  view->rank = rank;
  view->world = static_cast<int32_t>(devices.size());
  for (int32_t r = 0; r < view->world; ++r) {
    const auto copy = found->second.reached.find({devices[rank], devices[r]});
    if (copy == found->second.reached.end()) return false;
    view->base[r] = copy->second.mapped;
    remote[r] = copy->second.remote;
  }
  return true;
}

char* CudaWorkspaces::CopyOf(const WorkspaceId& id, int64_t local, int64_t device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found == workspaces_.end()) return nullptr;
  const auto copy = found->second.reached.find({local, device});
  return copy == found->second.reached.end() ? nullptr : copy->second.mapped;
}

bool CudaWorkspaces::Has(const WorkspaceId& id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  return found != workspaces_.end() && found->second.committed;
}

bool CudaWorkspaces::BeginUse(const WorkspaceId& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found == workspaces_.end() || !found->second.committed) return false;
  ++found->second.users;
  return true;
}

void CudaWorkspaces::EndUse(const WorkspaceId& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = workspaces_.find(id);
  if (found != workspaces_.end()) --found->second.users;
}

std::vector<WorkspaceId> CudaWorkspaces::Unused() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<WorkspaceId> unused;
  for (const auto& [id, workspace] : workspaces_) {
    if (workspace.committed && workspace.users == 0) unused.push_back(id);
  }
  return unused;
}

int64_t CudaWorkspaces::BytesTaken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<int64_t, int64_t> taken;
  for (const auto& [id, workspace] : workspaces_) {
    for (const auto& [device, address] : workspace.own) {
      taken[device] += RoundUp(id.bytes, WorkspaceMemory::kBlockBytes);
    }
  }
  int64_t most = 0;
  for (const auto& [device, bytes] : taken) most = std::max(most, bytes);
  return most;
}

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
