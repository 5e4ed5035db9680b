#ifdef JFLUX_WITH_CUDA

#include "runtime/workspace_use.h"

#include <algorithm>
#include <string>

#include "runtime/ffi.h"

namespace jflux {

ffi::TypeId WorkspaceUse::id = {};
ffi::TypeInfo WorkspaceUse::info = ffi::MakeTypeInfo<WorkspaceUse>();

WorkspaceUse::~WorkspaceUse() {
  const auto heap = heap_.lock();
  if (heap == nullptr) return;
  for (const WorkspaceId& id : used_) heap->workspaces().EndUse(id);
}

bool WorkspaceUse::Begin(const std::shared_ptr<HeapCuda>& heap, const int64_t* groups, size_t count,
                         int64_t world, int64_t bytes, std::string* error) {
  heap_ = heap;
  const auto& local = heap->devices();
  const auto is_local = [&](int64_t device) {
    return std::find(local.begin(), local.end(), device) != local.end();
  };
  for (size_t i = 0; i + world <= count; i += world) {
    const auto id = WorkspaceId::Of(std::vector<int64_t>(groups + i, groups + i + world), bytes);
    const auto here = std::count_if(id.devices.begin(), id.devices.end(), is_local);
    if (here == 0) continue;
    if (!heap->workspaces().BeginUse(id)) {
      if (here != world) continue;  // the call says so when it runs
      std::string handle, exists;
      if (heap->workspaces().Add(id, &handle, error)) heap->workspaces().Commit(id, &exists);
      if (!heap->workspaces().BeginUse(id)) return false;
    }
    used_.push_back(id);
  }
  return true;
}

namespace {

ffi::ErrorOr<std::unique_ptr<WorkspaceUse>> Instantiate(ffi::Dictionary attrs) {
  const auto groups = attrs.get<ffi::Span<const int64_t>>("groups");
  const auto world = attrs.get<int64_t>("world"), bytes = attrs.get<int64_t>("workspace_bytes");
  if (!groups.has_value() || !world.has_value() || !bytes.has_value() || *world < 1) {
    return ffi::Unexpected(
        InvalidArgument("attribute `groups`, `world` or `workspace_bytes` is missing"));
  }
  auto use = std::make_unique<WorkspaceUse>();
  const auto heap = CurrentHeapCuda();
  std::string error;
  if (heap != nullptr &&
      !use->Begin(heap, groups->begin(), groups->size(), *world, *bytes, &error)) {
    return ffi::Unexpected(InvalidArgument("no workspace of " + std::to_string(*bytes) +
                                           " bytes for an executable: " + error));
  }
  return use;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace

XLA_FFI_Error* InstantiateWorkspaceUse(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
