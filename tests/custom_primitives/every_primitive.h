// every_primitive: all of jflux/shmem.h's functions, as a thread, a warp and a block call them.
//
// x and y are int32, x [level, shard, rank, count] and y [level, shard, area, rank, count]. Rank r
// sends x[l, p, q] to each rank q in seven ways, an area each: y[l, p, a, r] is what came from rank
// r. In the last area it is x[l, p, r] of rank p (modulo the ranks), which broadcasts x[l, p].
#ifndef EVERY_PRIMITIVE_H_
#define EVERY_PRIMITIVE_H_

#include <cstdint>

#include "jflux/ffi.h"
#include "jflux/shmem.h"

namespace every_primitive {

namespace ffi = xla::ffi;
namespace shmem = jflux::shmem;

// As custom_primitives/__init__.py has them.
constexpr int kLevels = 3, kShards = 4;
enum Area { kPut, kPutSignal, kPutmemSignal, kFence, kQuiet, kBarrier, kGet, kBroadcast, kAreas };

// The functions of one level, under one name. Sizes of a kernel's blocks are whole warps.
#define FORWARD(name, suffix)                      \
  template <typename... Args>                      \
  static JFLUX_HD auto name(const Args&... args) { \
    return shmem::name##suffix(args...);           \
  }
#define LEVEL(Name, number, Scope, suffix) \
  struct Name : shmem::Scope {             \
    static constexpr int kNumber = number; \
    FORWARD(put, suffix)                   \
    FORWARD(putmem, suffix)                \
    FORWARD(get, suffix)                   \
    FORWARD(getmem, suffix)                \
    FORWARD(put_signal, suffix)            \
    FORWARD(putmem_signal, suffix)         \
    FORWARD(signal_set, suffix)            \
    FORWARD(signal_wait_until, suffix)     \
    FORWARD(barrier_all, suffix)           \
    FORWARD(broadcast, suffix)             \
    FORWARD(broadcastmem, suffix)          \
  };
LEVEL(ThreadLevel, 0, Thread, )
LEVEL(WarpLevel, 1, Warp, _warp)
LEVEL(BlockLevel, 2, Block, _block)
#undef LEVEL
#undef FORWARD

// A shard of a level, by one thread, warp or block of each rank. False if a wait failed.
template <typename Level>
JFLUX_HD bool Shard(const shmem::Context& ctx, int shard, int64_t count, const int32_t* x,
                    int32_t* y) {
  const int me = shmem::my_pe(ctx), n = shmem::n_pes(ctx);
  const int64_t unit = Level::kNumber * kShards + shard, bytes = 4 * count;
  // In the symmetric heap an area has a place for each rank, as in y, and a signal.
  const auto index = [&](int area, int pe) { return (unit * kAreas + area) * n + pe; };
  const auto place = [&](int area, int pe) { return ctx.data<int32_t>(index(area, pe) * bytes); };
  const auto signal = [&](int area, int pe) { return ctx.signal(index(area, pe)); };
  const auto to = [&](int pe) { return x + (unit * n + pe) * count; };
  const auto result = [&](int area, int pe) { return y + index(area, pe) * count; };
  const auto store = [&](int32_t* dest, const int32_t* source) {
    for (int64_t i = Level::rank(); i < count; i += Level::size()) dest[i] = source[i];
  };
  const auto copy = [&](int32_t* dest, const int32_t* source) {
    if constexpr (Level::kNumber == BlockLevel::kNumber) {
      shmem::copymem_block(ctx, dest, source, bytes);
    } else {
      Level::getmem(ctx, dest, source, bytes, me);
    }
  };
  const auto pause = [](bool late) {
    for (const uint64_t start = jflux::NowNs(); late && jflux::NowNs() - start < 20000;) {
    }
  };
  // Before each way of sending one of the ranks is late, so that the others have to wait.
  const auto begin = [&](int area) { pause(me == (shard + area) % n); };
  const auto receive = [&](int area) {
    for (int pe = 0; pe < n; ++pe) {
      if (!Level::signal_wait_until(ctx, signal(area, pe), pe)) return false;
      copy(result(area, pe), place(area, pe));
    }
    return true;
  };
  // Of a copy, so many elements are counted as such, and the others in bytes.
  const int64_t typed = count / 2, rest = 4 * (count - typed);

  begin(kPut);
  for (int pe = 0; pe < n; ++pe) {
    Level::put(ctx, place(kPut, me), to(pe), typed, pe);
    Level::putmem(ctx, place(kPut, me) + typed, to(pe) + typed, rest, pe);
    Level::signal_set(ctx, signal(kPut, me), pe);
  }
  if (!receive(kPut)) return false;

  begin(kPutSignal);
  for (int pe = 0; pe < n; ++pe) {
    Level::put_signal(ctx, place(kPutSignal, me), to(pe), count, signal(kPutSignal, me), pe);
  }
  if (!receive(kPutSignal)) return false;

  begin(kPutmemSignal);
  for (int pe = 0; pe < n; ++pe) {
    Level::putmem_signal(ctx, place(kPutmemSignal, me), to(pe), bytes, signal(kPutmemSignal, me),
                         pe);
  }
  if (!receive(kPutmemSignal)) return false;

  // Plain stores, and a signal that has no order of itself, as a flag of one's own.
  for (const Area area : {kFence, kQuiet}) {
    begin(area);
    for (int pe = 0; pe < n; ++pe) {
      store(shmem::ptr(ctx, place(area, me), pe), to(pe));
      Level::sync();
      if (Level::rank() != 0) continue;
      area == kFence ? shmem::fence(ctx) : shmem::quiet(ctx);
      jflux::StoreRelaxed(shmem::ptr(ctx, signal(area, me), pe), ctx.SignalValue());
    }
    if (!receive(area)) return false;
  }

  // Plain stores, there and here, that the barrier announces.
  begin(kBarrier);
  for (int pe = 0; pe < n; ++pe) {
    store(shmem::ptr(ctx, place(kBarrier, me), pe), to(pe));
    store(place(kGet, pe), to(pe));
  }
  if (!Level::barrier_all(ctx, signal(kBarrier, 0))) return false;
  for (int pe = 0; pe < n; ++pe) {
    copy(result(kBarrier, pe), place(kBarrier, pe));
    Level::get(ctx, result(kGet, pe), place(kGet, me), typed, pe);
    Level::getmem(ctx, result(kGet, pe) + typed, place(kGet, me) + typed, rest, pe);
  }

  const int root = shard % n;
  const int64_t half = n * count / 2, rest_of_all = 4 * (n * count - half);
  int32_t* dest = place(kBroadcast, 0);
  const int32_t* source = to(0);
  pause(me == root);
  if (!Level::broadcast(ctx, dest, source, half, signal(kBroadcast, 0), root)) return false;
  pause(me == root);
  auto* spare = signal(kGet, 0);  // a get has no signal
  if (!Level::broadcastmem(ctx, dest + half, source + half, rest_of_all, spare, root)) return false;
  for (int pe = 0; pe < n; ++pe) copy(result(kBroadcast, pe), place(kBroadcast, pe));
  return true;
}

// Shards go to the scopes of all blocks in turn: to the first of each block before the second.
template <typename Level>
JFLUX_HD bool AllShards(const shmem::Context& ctx, int64_t count, const int32_t* x, int32_t* y) {
  const int scope = shmem::Block::rank() / Level::size();
  const int scopes = shmem::Block::size() / Level::size();
  bool ok = true;
  for (int p = scope * ctx.blocks + ctx.block; ok && p < kShards; p += scopes * ctx.blocks) {
    ok = Shard<Level>(ctx, p, count, x, y);
  }
  return shmem::Block::all(ok);
}

JFLUX_HD bool EveryPrimitive(const shmem::Context& ctx, int64_t count, const int32_t* x,
                             int32_t* y) {
  return AllShards<ThreadLevel>(ctx, count, x, y) && AllShards<WarpLevel>(ctx, count, x, y) &&
         AllShards<BlockLevel>(ctx, count, x, y);
}

// How many numbers a rank sends another in a shard, or an error.
inline ffi::ErrorOr<int64_t> CountOf(const ffi::Buffer<ffi::S32>& x, ffi::Buffer<ffi::S32>& y) {
  const int64_t count = x.dimensions().back();
  if (y.dimensions().back() != count ||
      y.element_count() != static_cast<size_t>(kAreas) * x.element_count()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("every_primitive: x and y do not fit"));
  }
  return count;
}

}  // namespace every_primitive

#endif  // EVERY_PRIMITIVE_H_
