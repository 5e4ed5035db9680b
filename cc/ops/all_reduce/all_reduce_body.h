// all_reduce, one-shot and two-shot: one thread's part of a rank's work. A kernel has many threads;
// the CPU back end has one.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_

#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T>
struct AllReduceBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(thread, threads)
                                                       : TwoShot(thread, threads);
  }

 private:
  JFLUX_HD bool OneShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units();
    const int rank = call.view.rank;
    for (int64_t u = thread; u < units; u += threads) {
      const uint64_t own = Load(u);
      for (int d = 1; d < p.world; ++d) call.Send((rank + d) % p.world, rank * units + u, own);
    }
    for (int64_t u = thread; u < units; u += threads) {
      uint64_t sum;
      if (!Sum(u, [&](int src) { return src * units + u; }, &sum)) return false;
      Store(u, sum);
    }
    return true;
  }

  JFLUX_HD bool TwoShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units(), shard = p.ShardUnits(), sums = p.world * shard;
    const int rank = call.view.rank;
    const auto size_of = [&](int owner) { return Min(shard, units - owner * shard); };
    for (int64_t u = thread; u < shard; u += threads) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (rank + d) % p.world;
        if (u < size_of(owner)) call.Send(owner, rank * shard + u, Load(owner * shard + u));
      }
    }
    for (int64_t u = thread; u < size_of(rank); u += threads) {
      uint64_t sum;
      if (!Sum(rank * shard + u, [&](int src) { return src * shard + u; }, &sum)) {
        return false;
      }
      for (int d = 1; d < p.world; ++d) {
        call.Send((rank + d) % p.world, sums + rank * shard + u, sum);
      }
      Store(rank * shard + u, sum);
    }
    for (int64_t u = thread; u < shard; u += threads) {
      uint64_t payload[kMaxRanks];
      const auto has = [&](int src) { return u < size_of(src); };
      if (!call.Await(payload, has, [&](int src) { return sums + src * shard + u; })) return false;
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src < p.world && src != rank && has(src)) Store(src * shard + u, payload[src]);
      }
    }
    return true;
  }

  // Sums unit u of x over all ranks, and the residual's.
  template <typename IndexOf>
  JFLUX_HD bool Sum(int64_t u, IndexOf&& index_of, uint64_t* sum) const {
    const uint64_t own = Load(u);
    const uint64_t residual = p.residual ? LoadUnit(arrays.residual, u, p.Bytes()) : 0;
    PayloadSum<T> total;
    if (!SumOverRanks(call, own, index_of, &total)) return false;
    if (p.residual) total.Add(PayloadSum<T>::Of(residual));
    *sum = total.Rounded();
    return true;
  }

  JFLUX_HD uint64_t Load(int64_t unit) const { return LoadUnit(arrays.x, unit, p.Bytes()); }
  JFLUX_HD void Store(int64_t unit, uint64_t payload) const {
    StoreUnit(arrays.y, unit, p.Bytes(), payload);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
