// Counts of stored tiles: how warps of a rank learn that other warps of it have stored what they
// are about to sum.
//
//   memory  WorkspaceHeader::tiles_stored: a word for each class of tiles (core/scattered_tiles.h),
//           in the rank's own memory
//   writer  whoever has stored an m64 block of a tile: makes the stores complete, then adds 1 with
//           release at GPU scope
//   reader  polls with acquire until all blocks of the class are counted. The rows are then visible
//   reset   when all readers of the call are done, and so all writers too: LeaveCounters
//           (gpu/gemm_call.cuh)
//
// TestHooks::skip_waits does not skip these waits: a count that is added to after the reset would
// be wrong in the next call.
#ifndef JFLUX_CORE_TILE_COUNTS_H_
#define JFLUX_CORE_TILE_COUNTS_H_

#include <cstdint>

#include "core/atomic.h"
#include "core/platform.h"
#include "core/signal.h"

namespace jflux {

// False if the timeout passed, or another wait of the rank failed; the fault's record has the
// reason.
JFLUX_HD bool AwaitTiles(const uint64_t* stored, uint64_t blocks, int32_t tile_class,
                         const WaitContext& ctx) {
  Patience patience(ctx);
  for (uint32_t attempt = 0;; ++attempt) {
    const uint64_t seen = LoadAcquire(stored);
    if (seen >= blocks) return true;
    if (Patience::Looks(attempt) &&
        !patience.Lasts(ctx, attempt, FaultKind::kUnfinished, ctx.rank, tile_class, blocks, seen)) {
      return false;
    }
    PollPause(attempt);
  }
}

}  // namespace jflux

#endif  // JFLUX_CORE_TILE_COUNTS_H_
