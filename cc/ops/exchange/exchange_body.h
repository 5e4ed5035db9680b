// The exchanges in LL packets: one thread's part of a rank's work. A kernel has many threads; the
// CPU back end has one.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_

#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/exchange/exchange.h"

namespace jflux {

// T: the type that reduce_scatter sums.
template <typename T>
struct ExchangeBody {
  const ExchangeParams& p;
  const ExchangeArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units();
    const int rank = call.view.rank;
    for (int64_t u = thread; u < units; u += threads) {
      uint64_t shard = ShardFor(rank, u);
      for (int d = 1; d < p.world; ++d) {
        const int peer = (rank + d) % p.world;
        if (p.op != kAllGatherId) shard = ShardFor(peer, u);
        call.Send(peer, rank * units + u, shard);
      }
    }
    for (int64_t u = thread; u < units; u += threads) {
      const uint64_t own = ShardFor(rank, u);
      const auto index_of = [&](int src) { return src * units + u; };
      if (p.Sums()) {
        PayloadSum<T> total;
        if (!SumOverRanks(call, own, index_of, &total)) return false;
        p.y.Store(arrays.y, 0, u, total.Rounded());
        continue;
      }
      p.y.Store(arrays.y, rank, u, own);
      uint64_t payload[kMaxRanks];
      if (!call.Await(payload, [](int) { return true; }, index_of)) return false;
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src < p.world && src != rank) p.y.Store(arrays.y, src, u, payload[src]);
      }
    }
    return true;
  }

 private:
  // Unit u of the shard for `rank`.
  JFLUX_HD uint64_t ShardFor(int rank, int64_t u) const {
    return p.x.Load(arrays.x, p.op == kAllGatherId ? 0 : rank, u);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_BODY_H_
