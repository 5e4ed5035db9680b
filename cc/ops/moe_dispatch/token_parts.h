// The items of a dispatch and a combine: a token's row, or a part of it where a rank has so few
// tokens that warps would have nothing to do. Item i of a rank concerns its token i / parts, and on
// all ranks the block that has item i has all items i.
#ifndef JFLUX_OPS_MOE_DISPATCH_TOKEN_PARTS_H_
#define JFLUX_OPS_MOE_DISPATCH_TOKEN_PARTS_H_

#include <cstdint>

#include "core/platform.h"
#include "jflux/shmem.h"

namespace jflux {

// The number of this warp among the warps of its block, and how many there are.
JFLUX_HD int WarpOfBlock() { return shmem::Block::rank() / shmem::Warp::size(); }
JFLUX_HD int WarpsOfBlock() { return shmem::Block::size() / shmem::Warp::size(); }

// The items of a warp: first, first + step, ...
struct WarpShare {
  int64_t first, step;

  // The share of warp `warp` of `warps` in each block. Consecutive items belong to different
  // blocks, so that few items use all SMs.
  static JFLUX_HD WarpShare Of(const shmem::Context& ctx, int warp, int warps) {
    return WarpShare{ctx.block + int64_t{ctx.blocks} * warp, int64_t{ctx.blocks} * warps};
  }
};

struct TokenParts {
  int64_t tokens;   // of a rank
  int64_t vectors;  // of 16 bytes, of a row
  int32_t parts;    // of a row

  JFLUX_HD int64_t Items() const { return tokens * parts; }
  JFLUX_HD int64_t Token(int64_t item) const { return Quotient(item, parts); }
  JFLUX_HD int32_t Part(int64_t item) const { return static_cast<int32_t>(Remainder(item, parts)); }
  // The vectors of an item: from First(part) on, before First(part + 1).
  JFLUX_HD int64_t First(int32_t part) const { return Quotient(vectors * part, parts); }

  // The item's signal, of those that rank `src` sets.
  JFLUX_HD int64_t Signal(int src, int64_t item) const { return src * Items() + item; }

  static constexpr int32_t kMostParts = 8;

  // Parts that give `warps` warps an item each, if a part has at least two vectors for each thread
  // (an estimate); at most `most`.
  static int32_t PartsFor(int64_t tokens, int64_t vectors, int64_t warps,
                          int32_t most = kMostParts) {
    constexpr int64_t kLeastVectors = 64;
    int32_t parts = 1;
    while (parts * 2 <= most && tokens * parts * 2 <= warps &&
           vectors >= kLeastVectors * parts * 2) {
      parts *= 2;
    }
    return parts;
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_TOKEN_PARTS_H_
