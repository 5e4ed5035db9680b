// Waits for k-panels (core/k_panel_layout.h), by the warp of a GEMM kernel that waits for rows.
#ifndef JFLUX_GPU_K_PANEL_WAITS_CUH_
#define JFLUX_GPU_K_PANEL_WAITS_CUH_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

// A look at k-panels arrived .. arrived + 31 of `count`: how many have arrived then, or at least
// one more than `arrived`. has(i): whether k-panel i has; await(i): one lane, waits for it. Called
// by a full warp. After a failed wait the panel counts as arrived.
template <typename Has, typename Await>
__device__ __forceinline__ int LookAtPanels(int arrived, int count, Has&& has, Await&& await) {
  const int lane = threadIdx.x % 32;
  const bool has_arrived = arrived + lane >= count || has(arrived + lane);
  const uint32_t missing = __ballot_sync(0xffffffff, !has_arrived);
  if ((missing & 1) != 0 && lane == 0) await(arrived);
  __syncwarp();
  return Min(count, arrived + (missing == 0 ? 32 : Max(1, __ffs(missing) - 1)));
}

}  // namespace jflux

#endif  // JFLUX_GPU_K_PANEL_WAITS_CUH_
