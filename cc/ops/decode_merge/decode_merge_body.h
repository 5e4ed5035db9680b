// decode_merge: one thread's part of a rank's work. A kernel has many threads; the CPU back end has
// one. A unit is a pair of a row's outputs: its thread sends the pair to all ranks, waits for
// theirs and for the row's log-sum-exps, and merges. Several threads wait for the same
// log-sum-exps.
//
// Deadlock: all threads send before they wait. A thread waits for pairs that the thread with its
// number has sent, and for log-sum-exps that this one or one before it has: whole rows go round.
#ifndef JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_
#define JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_

#include <cmath>
#include <cstdint>

#include "core/numbers.h"
#include "ops/decode_merge/decode_merge.h"

namespace jflux {

struct DecodeMergeBody {
  const DecodeMergeParams& p;
  const DecodeMergeArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const Walk walk = Walk::Of(p, threads);
    if (thread >= walk.step) return true;
    for (int64_t u = thread; u < walk.end; u += walk.step) {
      const Unit unit = walk.At(u);
      if (unit.pair >= p.Pairs()) continue;
      const uint64_t pair = PairAt(unit);
      for (int d = 1; d < p.world; ++d) {
        const int peer = (Rank() + d) % p.world;
        if (unit.pair == 0) call.Send(peer, p.PacketOf(Rank(), unit.row), BitsOfFloat(Own(unit)));
        call.Send(peer, p.PacketOf(Rank(), unit.row) + 1 + unit.pair, pair);
      }
    }
    for (int64_t u = thread; u < walk.end; u += walk.step) {
      const Unit unit = walk.At(u);
      if (unit.pair < p.Pairs() && !Merge(unit)) return false;
    }
    return true;
  }

 private:
  struct Unit {
    int64_t row, pair;
  };
  // A thread takes every `step`-th number from its own on, so that the first pair of a row has no
  // later thread than its others. If all have a thread of their own, each unit is a number. Else
  // the step is whole rows, or, where a row has more pairs than there are threads, a row's numbers
  // are whole steps: those beyond its pairs are no units.
  struct Walk {
    int64_t row, step, end;
    static JFLUX_HD Walk Of(const DecodeMergeParams& p, int64_t threads) {
      const int64_t pairs = p.Pairs();
      if (p.Units() <= threads) return {pairs, threads, p.Units()};
      if (pairs <= threads) return {pairs, threads - Remainder(threads, pairs), p.Units()};
      const int64_t row = Quotient(pairs + threads - 1, threads) * threads;
      return {row, threads, p.rows * row};
    }
    JFLUX_HD Unit At(int64_t u) const { return {Quotient(u, row), Remainder(u, row)}; }
  };
  JFLUX_HD int Rank() const { return call.view.rank; }
  JFLUX_HD const float* RowAt(const Unit& unit) const {
    return arrays.x + unit.row * (p.width + 1);
  }
  JFLUX_HD float Own(const Unit& unit) const { return RowAt(unit)[p.width]; }
  // The last pair of an odd width has one output.
  JFLUX_HD bool HasSecond(const Unit& unit) const { return 2 * unit.pair + 1 < p.width; }
  JFLUX_HD uint64_t PairAt(const Unit& unit) const {
    const float* pair = RowAt(unit) + 2 * unit.pair;
    const uint64_t second = HasSecond(unit) ? BitsOfFloat(pair[1]) : 0;
    return BitsOfFloat(pair[0]) | second << 32;
  }

  JFLUX_HD bool Merge(const Unit& unit) const {
    uint64_t log_sums[kMaxRanks], pairs[kMaxRanks];
    const auto all = [](int) { return true; };
    const auto at = [&](int64_t packet) {
      return [this, &unit, packet](int src) { return p.PacketOf(src, unit.row) + packet; };
    };
    if (!call.Await(log_sums, all, at(0)) || !call.Await(pairs, all, at(1 + unit.pair))) {
      return false;
    }
    float highest = -INFINITY;
    JFLUX_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) {
      if (src >= p.world) continue;
      if (src == Rank()) {
        log_sums[src] = BitsOfFloat(Own(unit));
        pairs[src] = PairAt(unit);
      }
      highest = fmaxf(highest, Low(log_sums[src]));  // of a NaN and a number the number
    }
    const float base = std::isfinite(highest) ? highest : 0.0f;
    float total = 0, sums[2] = {0, 0};
    JFLUX_UNROLL
    for (int src = 0; src < kMaxRanks; ++src) {
      if (src >= p.world || Low(log_sums[src]) == -INFINITY) continue;
      const float weight = expf(Low(log_sums[src]) - base);
      total += weight;
      sums[0] += weight * Low(pairs[src]);
      sums[1] += weight * Low(pairs[src] >> 32);
    }
    const bool any = total != 0;  // NaN counts
    float* y = arrays.y + unit.row * (p.width + 1);
    y[2 * unit.pair] = any ? sums[0] / total : 0.0f;
    if (HasSecond(unit)) y[2 * unit.pair + 1] = any ? sums[1] / total : 0.0f;
    if (unit.pair == 0) y[p.width] = any ? logf(total) + base : -INFINITY;
    return true;
  }
  static JFLUX_HD float Low(uint64_t payload) {
    return FloatOfBits(static_cast<uint32_t>(payload));
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_
