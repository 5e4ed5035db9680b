// How many CTAs of a GPU send to peers at a time, while all of them multiply: pure functions.
//
// As long as stores wait for a link that is full, hardly any SM loads anything, whoever sends
// (docs/design/0010). So only some CTAs send at a time, each with few chunks in flight: enough to
// keep up with what all of them compute, and no more.
#ifndef JFLUX_GPU_SENDERS_H_
#define JFLUX_GPU_SENDERS_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

inline constexpr int kSendChunkBytes = 4096;   // of what a storer sends
inline constexpr int kSendChunksInFlight = 4;  // under way

// Storers of tiles for peers: `copies` times what a tile is in a 16-bit type goes to them, and each
// tile's sum is over `k`. 0: all.
inline int32_t SendingStorers(int64_t k, double copies, int sm_count) {
  // A short k is all in the stages: then a tile's consumers may be a tile apart, and one wait for
  // peers, while the storer that holds the semaphore waits for it.
  constexpr int64_t kInStages = 5 * 64;
  // Bytes per microsecond: of a tile's result over the time of its product, times k; of a storer.
  constexpr double kOfTiles = 7.0e6, kOfStorer = 1.6e4;
  constexpr double kLeast = 8, kMost = 32;
  if (k <= kInStages) return 0;
  const double made = sm_count * kOfTiles * copies / static_cast<double>(k);
  // Twice as many as would do, so that a wave's results leave in half of the next one's time.
  return static_cast<int32_t>(Max(kLeast, Min(kMost, 2 * made / kOfStorer)));
}

// CTAs that send the rows of an all-gather, of which the product has `n` columns on each rank.
inline int32_t SendingGatherers(int world, int64_t n, int sm_count) {
  // Bytes per microsecond: what a rank sends in the time of its product, times n; of a sender, who
  // reads what it sends first.
  constexpr double kOfRank = 6.5e8, kOfSender = 3.3e3;
  const double sent = kOfRank * sm_count / 132 * (world - 1) / world / static_cast<double>(n);
  const double least = CeilDiv(sm_count, 3);
  return static_cast<int32_t>(Max(least, Min<double>(sm_count, 2 * sent / kOfSender)));
}

}  // namespace jflux

#endif  // JFLUX_GPU_SENDERS_H_
