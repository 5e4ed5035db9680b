// halo_exchange: y = (the previous rank's last rows, x, the next rank's first rows), around a ring.
// What a block of a kernel does, and the CPU's only thread.
#ifndef HALO_EXCHANGE_H_
#define HALO_EXCHANGE_H_

#include <algorithm>
#include <cstdint>

#include "jflux/shmem.h"

struct HaloParams {
  int64_t bytes;       // of x
  int64_t halo_bytes;  // of what each neighbour gets of it
};

// Two signals for each block; halo_exchange.py asks for as many.
constexpr int kMostBlocks = 64;

inline int BlocksFor(const HaloParams& p) {
  return static_cast<int>(std::clamp<int64_t>(p.bytes / (64 << 10), 1, kMostBlocks));
}

// A block's part of `bytes`, in whole units of 16.
struct Part {
  int64_t first, size;
};
JFLUX_HD Part PartOf(int64_t bytes, const jflux::shmem::Context& ctx) {
  const int64_t each = jflux::RoundUp<int64_t>(jflux::CeilDiv<int64_t>(bytes, ctx.blocks), 16);
  const int64_t first = jflux::Min(ctx.block * each, bytes);
  return Part{first, jflux::Min(each, bytes - first)};
}

// False if a wait failed.
JFLUX_HD bool HaloExchange(const jflux::shmem::Context& ctx, const HaloParams& p, const char* x,
                           char* y) {
  namespace shmem = jflux::shmem;
  const int me = shmem::my_pe(ctx), n = shmem::n_pes(ctx);
  const int previous = (me + n - 1) % n, next = (me + 1) % n;

  // In the symmetric heap: where the previous rank writes, where the next one does, and the signals
  // by which they say so. Block b talks to blocks b of its neighbours.
  const Part halo = PartOf(p.halo_bytes, ctx);
  char* above = ctx.data(halo.first);
  char* below = ctx.data(p.halo_bytes + halo.first);
  jflux::Signal* from_previous = ctx.signal(2 * ctx.block);
  jflux::Signal* from_next = ctx.signal(2 * ctx.block + 1);

  const char* last_rows = x + p.bytes - p.halo_bytes;
  shmem::putmem_signal_block(ctx, above, last_rows + halo.first, halo.size, from_previous, next);
  shmem::putmem_signal_block(ctx, below, x + halo.first, halo.size, from_next, previous);

  // While those are on their way, the rank's own rows.
  const Part own = PartOf(p.bytes, ctx);
  shmem::copymem_block(ctx, y + p.halo_bytes + own.first, x + own.first, own.size);

  if (!shmem::signal_wait_until_block(ctx, from_previous, previous)) return false;
  shmem::copymem_block(ctx, y + halo.first, above, halo.size);
  if (!shmem::signal_wait_until_block(ctx, from_next, next)) return false;
  shmem::copymem_block(ctx, y + p.halo_bytes + p.bytes + halo.first, below, halo.size);
  return true;
}

#endif  // HALO_EXCHANGE_H_
