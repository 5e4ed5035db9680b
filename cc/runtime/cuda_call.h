// What every op's CUDA handler does around its launch: find the device, the group, the workspace.
#ifndef JFLUX_RUNTIME_CUDA_CALL_H_
#define JFLUX_RUNTIME_CUDA_CALL_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "gpu/gemm_config.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// The attribute `choice`: tile_n, cluster_m, group_m, splits, or nothing, for the heuristic's.
inline std::optional<GemmChoice> ChoiceOf(ffi::Span<const int64_t> choice) {
  if (choice.size() != 4) return std::nullopt;
  return GemmChoice{static_cast<int32_t>(choice[0]), static_cast<int32_t>(choice[1]),
                    static_cast<int32_t>(choice[2]), static_cast<int32_t>(choice[3])};
}

inline bool IsPossibleChoice(ffi::Span<const int64_t> choice) {
  const auto c = ChoiceOf(choice);
  return choice.size() == 0 || (c && IsPossible(*c));
}

// How many kernels handlers have enqueued. A captured graph that is replayed runs no handler.
inline std::atomic<int64_t>& CudaLaunches() {
  static std::atomic<int64_t> launches{0};
  return launches;
}

// workspace_of(sm_count) -> WorkspaceLayout; launch(device, view, &error) -> bool.
template <typename WorkspaceOf, typename Launch>
ffi::Error LaunchCudaCall(OpId op, int32_t ordinal, ffi::Span<const int64_t> groups, int64_t world,
                          WorkspaceOf&& workspace_of, Launch&& launch) {
  const auto heap = CurrentHeapCuda();
  const std::string name = std::string("jflux.") + NameOf(op) + ": ";
  const auto failed = [](const std::string& why) {
    return ffi::Error(ffi::ErrorCode::kInternal, why);
  };
  const CudaDevice* device = heap == nullptr ? nullptr : heap->DeviceOf(ordinal);
  if (device == nullptr) {
    return failed(name + "the symmetric heap does not exist on GPU " + std::to_string(ordinal) +
                  "; call jflux.init()");
  }
  if (const auto fault = heap->FaultOf(*device)) return failed(*fault);
  const auto group = FindGroup(groups, world, device->id);
  if (!group) return failed(name + "device is in none of the call's groups");
  const int64_t total_bytes = workspace_of(device->sm_count).TotalBytes();
  const auto offset = heap->FindWorkspace(groups.begin(), groups.size(), total_bytes);
  if (!offset) {
    return failed(name + "the symmetric heap of " + std::to_string(heap->heap_bytes()) +
                  " bytes has no workspace of " + std::to_string(total_bytes) +
                  " bytes for these devices; was the program compiled with a larger heap? Call "
                  "jflux.init(heap_bytes=...)");
  }
  SymmetricView view{};
  view.rank = group->rank;
  view.world = static_cast<int32_t>(world);
  for (int32_t r = 0; r < view.world; ++r) {
    const auto peer = device->peers.find(group->devices[r]);
    if (peer == device->peers.end()) {
      return failed(name + "device " + std::to_string(group->devices[r]) +
                    " is not part of the symmetric heap: call jflux.init() after "
                    "jax.distributed.initialize()");
    }
    view.base[r] = peer->second + *offset;
  }
  std::string error;
  ++CudaLaunches();
  if (!launch(*device, view, &error)) return failed(name + error);
  return ffi::Error::Success();
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CUDA_CALL_H_
