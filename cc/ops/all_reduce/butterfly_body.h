// all_reduce between pairs of ranks, for one of the threads that share a rank's part. A rank only
// ever sends to its partners, whose number differs from its own in one bit; a rank beyond the
// largest power of two (an odd one) gives its data to a rank of the pairing first, and is given
// the result. Sums travel unrounded, and both of a pair add the same two: the same bits on all
// ranks, but not those of rank order.
//
// Half a butterfly exchanges whole sums, so each step halves the number of different ones. A
// butterfly first exchanges halves of what is left, until each rank has the sums of its own part,
// and then doubles what is known.
//
// kAtOnce units go through each step together. A GPU's threads take one each; where one thread does
// a rank's part, as on CPUs, ranks would take turns for each unit.
#ifndef JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_

#include <cstdint>
#include <cstring>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T, int kAtOnce>
struct ButterflyBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // The part of thread `thread` of so many. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const bool half = p.algorithm == AllReduceAlgorithm::kHalfButterfly;
    for (int64_t u = thread * kAtOnce; u < p.Work(); u += threads * kAtOnce) {
      const int count = kAtOnce == 1 ? 1 : static_cast<int>(Min<int64_t>(kAtOnce, p.Work() - u));
      if (!(half ? Half(u, count) : Whole(u, count))) return false;
    }
    return true;
  }

 private:
  using Sum = PayloadSum<T>;
  static constexpr int kWords = static_cast<int>(sizeof(Sum) / kPacketPayload);

  JFLUX_HD int Steps() const { return PairingSteps(p.world); }
  JFLUX_HD int Pairing() const { return 1 << Steps(); }
  // Of this rank: the odd rank that it serves, or that serves it; -1: none.
  JFLUX_HD int Other() const {
    const int rank = call.view.rank, pairing = Pairing();
    return rank >= pairing ? rank - pairing : rank + pairing < p.world ? rank + pairing : -1;
  }
  JFLUX_HD bool Odd() const { return call.view.rank >= Pairing(); }

  // Units first, first + 1, ..., so many.
  JFLUX_HD bool Half(int64_t first, int count) const {
    const int64_t units = p.Units(), results = units, sums = 2 * units;
    if (Odd()) {
      for (int i = 0; i < count; ++i) call.Send(Other(), first + i, Load(first + i));
      for (int i = 0; i < count; ++i) {
        if (!AwaitResult(first + i, results)) return false;
      }
      return true;
    }
    Sum total[kAtOnce];
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

  // The same units of each rank's part.
  JFLUX_HD bool Whole(int64_t first, int count) const {
    constexpr int kMost = kMaxRanks;
    const int rank = call.view.rank, pairing = Pairing();
    const int64_t part = p.PairUnits(), units = p.Units();
    const int64_t results = pairing * part, sums = 2 * pairing * part;
    const auto unit_of = [&](int owner, int i) { return owner * part + first + i; };
    // Visits those units of owners that `of` says; false if one of the visits is.
    const auto each = [&](auto&& of, auto&& visit) {
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (owner >= pairing || !of(owner)) continue;
        for (int i = 0; i < count; ++i) {
          if (unit_of(owner, i) < units && !visit(owner, i)) return false;
        }
      }
      return true;
    };
    const auto everyone = [](int) { return true; };
    if (Odd()) {
      each(everyone, [&](int owner, int i) {
        call.Send(Other(), unit_of(owner, i), Load(unit_of(owner, i)));
        return true;
      });
      return each(everyone,
                  [&](int owner, int i) { return AwaitResult(unit_of(owner, i), results); });
    }
    Sum total[kMost][kAtOnce];
    const auto own = [&](int owner, int i) { return Own(unit_of(owner, i), &total[owner][i]); };
    if (!each(everyone, own)) return false;
    // What is left: the parts of owners that agree with this rank in the bits from 2 * bit on.
    for (int bit = pairing / 2, step = 0; bit > 0; bit /= 2, ++step) {
      const int partner = rank ^ bit;
      const auto place = [&](int owner, int i) {
        return sums + (step * results + unit_of(owner, i)) * kWords;
      };
      each([&](int owner) { return (owner ^ partner) < bit; },
           [&](int owner, int i) {
             SendSum(partner, place(owner, i), total[owner][i]);
             return true;
           });
      const bool added = each(
          [&](int owner) { return (owner ^ rank) < bit; },
          [&](int owner, int i) { return AddSum(partner, place(owner, i), &total[owner][i]); });
      if (!added) return false;
    }
    uint64_t known[kMost][kAtOnce];
    each([&](int owner) { return owner == rank; },
         [&](int owner, int i) {
           known[owner][i] = Finished(total[owner][i], unit_of(owner, i));
           return true;
         });
    for (int bit = 1; bit < pairing; bit *= 2) {
      const int partner = rank ^ bit;
      each([&](int owner) { return (owner ^ rank) < bit; },
           [&](int owner, int i) {
             call.Send(partner, results + unit_of(owner, i), known[owner][i]);
             return true;
           });
      const bool came =
          each([&](int owner) { return (owner ^ partner) < bit; },
               [&](int owner, int i) {
                 return call.AwaitFrom(partner, results + unit_of(owner, i), &known[owner][i]);
               });
      if (!came) return false;
    }
    return each(everyone, [&](int owner, int i) {
      Deliver(unit_of(owner, i), results, known[owner][i]);
      return true;
    });
  }

  // To y, and to the odd rank that this one serves, behind its own data.
  JFLUX_HD void Deliver(int64_t u, int64_t results, uint64_t result) const {
    StoreUnit(arrays.y, u, p.Bytes(), result);
    if (Other() >= 0) call.Send(Other(), results + u, result);
  }
  // An odd rank's.
  JFLUX_HD bool AwaitResult(int64_t u, int64_t results) const {
    uint64_t result;
    if (!call.AwaitFrom(Other(), results + u, &result)) return false;
    StoreUnit(arrays.y, u, p.Bytes(), result);
    return true;
  }

  // Unit u of this rank's x, and of the odd rank's that it serves.
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
