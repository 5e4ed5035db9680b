// all_reduce by exchanges between pairs of ranks: one thread's part of a rank's work.
//
// The pairing is the largest power of two of ranks. A rank of the pairing exchanges only with
// partners, whose number differs from its own in one bit. A rank beyond the pairing (an odd rank)
// sends its data to one rank of the pairing first, and receives the result from it. Partners add
// the same two unrounded sums, so all ranks get the same bits; they differ from those of rank
// order.
//
//   half butterfly  exchanges full sums: after step s, groups of 2^s ranks have the same sums
//   butterfly       exchanges halves of the remaining units until each rank has the sums of its
//                   shard, then doubles what each rank knows
//
// kUnitsPerStep units go through a step together. GPU threads take one each. The CPU's only thread
// takes many: one unit per step would make ranks wait for each other at every unit.
#ifndef JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_

#include <cstdint>
#include <cstring>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T, int kUnitsPerStep>
struct ButterflyBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const bool half = p.algorithm == AllReduceAlgorithm::kHalfButterfly;
    for (int64_t u = thread * kUnitsPerStep; u < p.Work(); u += threads * kUnitsPerStep) {
      const int count =
          kUnitsPerStep == 1 ? 1 : static_cast<int>(Min<int64_t>(kUnitsPerStep, p.Work() - u));
      if (!(half ? HalfButterfly(u, count) : Butterfly(u, count))) return false;
    }
    return true;
  }

 private:
  using Sum = PayloadSum<T>;
  static constexpr int kWords = static_cast<int>(sizeof(Sum) / kPacketPayload);

  JFLUX_HD int Steps() const { return PairingSteps(p.world); }
  JFLUX_HD int Pairing() const { return 1 << Steps(); }
  // This rank's counterpart: the odd rank that it serves, or the rank that serves this odd rank;
  // -1: none.
  JFLUX_HD int Other() const {
    const int rank = call.view.rank, pairing = Pairing();
    return rank >= pairing ? rank - pairing : rank + pairing < p.world ? rank + pairing : -1;
  }
  JFLUX_HD bool Odd() const { return call.view.rank >= Pairing(); }

  // Units [first, first + count).
  JFLUX_HD bool HalfButterfly(int64_t first, int count) const {
    const int64_t units = p.Units(), results = units, sums = 2 * units;
    if (Odd()) {
      for (int i = 0; i < count; ++i) call.Send(Other(), first + i, Load(first + i));
      for (int i = 0; i < count; ++i) {
        if (!AwaitResult(first + i, results)) return false;
      }
      return true;
    }
    Sum total[kUnitsPerStep];
    for (int i = 0; i < count; ++i) {
      if (!Own(first + i, &total[i])) return false;
    }
    for (int step = 0; step < Steps(); ++step) {
      const int partner = call.view.rank ^ (1 << step);
      const auto place = [&](int i) { return sums + (step * units + first + i) * kWords; };
      for (int i = 0; i < count; ++i) SendSum(partner, place(i), total[i]);
      for (int i = 0; i < count; ++i) {
        if (!AddSum(partner, place(i), &total[i])) return false;
      }
    }
    for (int i = 0; i < count; ++i) {
      Deliver(first + i, results, Finished(total[i], first + i));
    }
    return true;
  }

  // Units [first, first + count) of each rank's shard.
  JFLUX_HD bool Butterfly(int64_t first, int count) const {
    constexpr int kMost = kMaxRanks;
    const int rank = call.view.rank, pairing = Pairing();
    const int64_t shard = p.PairUnits(), units = p.Units();
    const int64_t results = pairing * shard, sums = 2 * pairing * shard;
    const auto unit_of = [&](int owner, int i) { return owner * shard + first + i; };
    // Visits the units of every owner for which of(owner). False as soon as a visit is.
    const auto for_each = [&](auto&& of, auto&& visit) {
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (owner >= pairing || !of(owner)) continue;
        for (int i = 0; i < count; ++i) {
          if (unit_of(owner, i) < units && !visit(owner, i)) return false;
        }
      }
      return true;
    };
    const auto all = [](int) { return true; };
    if (Odd()) {
      for_each(all, [&](int owner, int i) {
        call.Send(Other(), unit_of(owner, i), Load(unit_of(owner, i)));
        return true;
      });
      return for_each(all,
                      [&](int owner, int i) { return AwaitResult(unit_of(owner, i), results); });
    }
    Sum total[kMost][kUnitsPerStep];
    const auto add_local = [&](int owner, int i) {
      return Own(unit_of(owner, i), &total[owner][i]);
    };
    if (!for_each(all, add_local)) return false;
    // Remaining: the shards of owners that agree with this rank in the bits from 2 * bit on.
    for (int bit = pairing / 2, step = 0; bit > 0; bit /= 2, ++step) {
      const int partner = rank ^ bit;
      const auto place = [&](int owner, int i) {
        return sums + (step * results + unit_of(owner, i)) * kWords;
      };
      for_each([&](int owner) { return (owner ^ partner) < bit; },
               [&](int owner, int i) {
                 SendSum(partner, place(owner, i), total[owner][i]);
                 return true;
               });
      const bool added = for_each(
          [&](int owner) { return (owner ^ rank) < bit; },
          [&](int owner, int i) { return AddSum(partner, place(owner, i), &total[owner][i]); });
      if (!added) return false;
    }
    uint64_t known[kMost][kUnitsPerStep];
    for_each([&](int owner) { return owner == rank; },
             [&](int owner, int i) {
               known[owner][i] = Finished(total[owner][i], unit_of(owner, i));
               return true;
             });
    for (int bit = 1; bit < pairing; bit *= 2) {
      const int partner = rank ^ bit;
      for_each([&](int owner) { return (owner ^ rank) < bit; },
               [&](int owner, int i) {
                 call.Send(partner, results + unit_of(owner, i), known[owner][i]);
                 return true;
               });
      const bool came =
          for_each([&](int owner) { return (owner ^ partner) < bit; },
                   [&](int owner, int i) {
                     return call.AwaitFrom(partner, results + unit_of(owner, i), &known[owner][i]);
                   });
      if (!came) return false;
    }
    return for_each(all, [&](int owner, int i) {
      Deliver(unit_of(owner, i), results, known[owner][i]);
      return true;
    });
  }

  // Writes to y, and to the odd rank that this one serves.
  JFLUX_HD void Deliver(int64_t u, int64_t results, uint64_t result) const {
    StoreUnit(arrays.y, u, p.Bytes(), result);
    if (Other() >= 0) call.Send(Other(), results + u, result);
  }
  // An odd rank receives its result.
  JFLUX_HD bool AwaitResult(int64_t u, int64_t results) const {
    uint64_t result;
    if (!call.AwaitFrom(Other(), results + u, &result)) return false;
    StoreUnit(arrays.y, u, p.Bytes(), result);
    return true;
  }

  // Unit u of this rank's x, plus that of the odd rank it serves.
  JFLUX_HD bool Own(int64_t u, Sum* total) const {
    *total = Sum::Of(Load(u));
    if (Other() < 0) return true;
    uint64_t payload;
    if (!call.AwaitFrom(Other(), u, &payload)) return false;
    total->Add(Sum::Of(payload));
    return true;
  }
  JFLUX_HD uint64_t Finished(Sum total, int64_t u) const {
    if (p.residual) total.Add(Sum::Of(LoadUnit(arrays.residual, u, p.Bytes())));
    return total.Rounded();
  }

  JFLUX_HD void SendSum(int partner, int64_t index, const Sum& total) const {
    uint64_t words[kWords];
    std::memcpy(words, &total, sizeof(total));
    JFLUX_UNROLL
    for (int w = 0; w < kWords; ++w) call.Send(partner, index + w, words[w]);
  }
  JFLUX_HD bool AddSum(int partner, int64_t index, Sum* total) const {
    uint64_t words[kWords];
    JFLUX_UNROLL
    for (int w = 0; w < kWords; ++w) {
      if (!call.AwaitFrom(partner, index + w, &words[w])) return false;
    }
    Sum theirs;
    std::memcpy(&theirs, words, sizeof(theirs));
    total->Add(theirs);
    return true;
  }

  JFLUX_HD uint64_t Load(int64_t unit) const { return LoadUnit(arrays.x, unit, p.Bytes()); }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_
