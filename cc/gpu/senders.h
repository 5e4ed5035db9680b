// How many CTAs or warps of a GPU send to peers at a time, while all of them multiply: pure
// functions, which plans call.
//
// While stores wait for a full link, all SMs load very slowly, and not only those that store
// (docs/experiments/0025). So only some CTAs send at a time, each with few chunks in flight: enough
// to send results as fast as all CTAs compute them, and no more. Over links that are slower than
// the reference's, PCIe's for one, also no more than fill the link: results wait for it however
// many send, and 6 CTAs with 16 KiB in flight each fill one of 50 GB/s as 132 do.
#ifndef JFLUX_GPU_SENDERS_H_
#define JFLUX_GPU_SENDERS_H_

#include <cstdint>

#include "core/format.h"
#include "core/platform.h"
#include "gpu/machine.h"

namespace jflux {

inline constexpr int kSendChunkBytes = 4096;   // of what a store warp sends
inline constexpr int kSendChunksInFlight = 4;  // under way

// The most of a row that the pipeline's stages of any configuration hold (GemmConfig asserts it).
inline constexpr int64_t kMostStagedBytes = 5 * kBlockBytes;

// As many senders as fill a slow link twice, each of which sends `of_one` bytes per microsecond;
// the reference's link, and one that is nearly as fast, takes any number. (An estimate.)
inline double MostSenders(double of_one, const Machine& machine) {
  const double share = machine.LinkShare();
  return share == 1 ? INT32_MAX : Max(1.0, 2 * share * kReferenceLinkGbps * 1e3 / of_one);
}

// Bytes per microsecond of a store warp, and of a send warp, which reads what it sends first.
inline constexpr double kOfStoreWarp = 1.6e4, kOfSendWarp = 3.3e3;

// Store warps that send tiles to peers at a time; 0: all. A tile's sum is over rows of k_bytes.
// `copies`: what is sent of a tile, over the tile in a 16-bit type.
inline int32_t SendingStoreWarps(int64_t k_bytes, double copies, const Machine& machine) {
  constexpr double kOfTiles = 1.4e7;  // bytes per microsecond of an SM's tiles, times k_bytes
  constexpr double kLeast = 8, kMost = 32;
  // If a whole row is in the pipeline's stages, two consumers that share tiles may be a whole tile
  // apart. One of them could then wait for a peer, while the store warp with a ticket waits for
  // that consumer.
  if (k_bytes <= kMostStagedBytes) return 0;
  const double made = machine.sm_count * kOfTiles * copies / static_cast<double>(k_bytes);
  // Twice as many as keep up, so that the results of a wave leave in half of the next wave's time.
  const double wanted = Max(kLeast, Min(kMost, 2 * made / kOfStoreWarp));
  return static_cast<int32_t>(Min(wanted, MostSenders(kOfStoreWarp, machine)));
}

// CTAs that send x's shards at a time, where x is gathered and its product has `n` columns on each
// rank.
inline int32_t SendingCtas(int world, int64_t n, const Machine& machine) {
  // Bytes per microsecond that a rank sends in the time of its product, times n.
  constexpr double kOfRank = 6.5e8;
  const double sent =
      kOfRank * machine.sm_count / kReferenceSms * (world - 1) / world / static_cast<double>(n);
  const double least = CeilDiv(machine.sm_count, 3);
  const double wanted = Max(least, Min<double>(machine.sm_count, 2 * sent / kOfSendWarp));
  return static_cast<int32_t>(Min(wanted, MostSenders(kOfSendWarp, machine)));
}

}  // namespace jflux

#endif  // JFLUX_GPU_SENDERS_H_
