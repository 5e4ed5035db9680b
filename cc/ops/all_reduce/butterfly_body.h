// all_reduce between pairs of ranks, for one of the threads that share a rank's part. A rank only
// ever sends to its partners, whose number differs from its own in one bit; a rank beyond the
// largest power of two (an odd one) gives its data to a rank of the pairing first, and is given
// the result. Sums travel unrounded, and both of a pair add the same two: the same bits on all
// ranks, but not those of rank order.
//
// Half a butterfly exchanges whole sums, so each step halves the number of different ones. A
// butterfly first exchanges halves of what is left, until each rank has the sums of its own part,
// and then doubles what is known.
#ifndef JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_BUTTERFLY_BODY_H_

#include <cstdint>
#include <cstring>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

template <typename T>
struct ButterflyBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // The part of thread `thread` of so many. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const bool half = p.algorithm == AllReduceAlgorithm::kHalfButterfly;
    for (int64_t u = thread; u < p.Work(); u += threads) {
      if (!(half ? Half(u) : Whole(u))) return false;
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

  JFLUX_HD bool Half(int64_t u) const {
    const int64_t units = p.Units(), results = units, sums = 2 * units;
    if (Odd()) return Served(u, u, results + u);
    Sum total;
    if (!Own(u, u, &total)) return false;
    for (int step = 0; step < Steps(); ++step) {
      if (!Exchange(call.view.rank ^ (1 << step), sums + (step * units + u) * kWords, &total)) {
        return false;
      }
    }
    const uint64_t result = Finished(total, u);
    StoreUnit(arrays.y, u, p.Bytes(), result);
    if (Other() >= 0) call.Send(Other(), results + u, result);
    return true;
  }

  // Unit u of each rank's part.
  JFLUX_HD bool Whole(int64_t u) const {
    constexpr int kMost = kMaxRanks;
    const int rank = call.view.rank, pairing = Pairing();
    const int64_t part = p.PairUnits(), units = p.Units();
    const int64_t results = pairing * part, sums = 2 * pairing * part;
    const auto unit_of = [&](int owner) { return owner * part + u; };
    if (Odd()) {
      for (int owner = 0; owner < pairing && unit_of(owner) < units; ++owner) {
        call.Send(Other(), unit_of(owner), Load(unit_of(owner)));
      }
      for (int owner = 0; owner < pairing && unit_of(owner) < units; ++owner) {
        uint64_t result;
        if (!call.AwaitFrom(Other(), results + unit_of(owner), &result)) return false;
        StoreUnit(arrays.y, unit_of(owner), p.Bytes(), result);
      }
      return true;
    }
    Sum total[kMost];
    JFLUX_UNROLL
    for (int owner = 0; owner < kMost; ++owner) {
      if (owner >= pairing || unit_of(owner) >= units) continue;
      if (!Own(unit_of(owner), unit_of(owner), &total[owner])) return false;
    }
    // What is left: the parts of owners that agree with this rank in the bits from 2 * bit on.
    for (int bit = pairing / 2, step = 0; bit > 0; bit /= 2, ++step) {
      const int partner = rank ^ bit;
      const auto left = [&](int owner, int whose) { return (owner ^ whose) < bit; };
      const auto place = [&](int owner) {
        return sums + (step * results + unit_of(owner)) * kWords;
      };
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (owner < pairing && unit_of(owner) < units && left(owner, partner)) {
          SendSum(partner, place(owner), total[owner]);
        }
      }
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (owner < pairing && unit_of(owner) < units && left(owner, rank)) {
          if (!AddSum(partner, place(owner), &total[owner])) return false;
        }
      }
    }
    uint64_t known[kMost];
    JFLUX_UNROLL
    for (int owner = 0; owner < kMost; ++owner) {
      if (owner == rank && unit_of(owner) < units)
        known[owner] = Finished(total[owner], unit_of(owner));
    }
    for (int bit = 1; bit < pairing; bit *= 2) {
      const int partner = rank ^ bit;
      const auto has = [&](int owner, int whose) {
        return owner < pairing && unit_of(owner) < units && (owner ^ whose) < bit;
      };
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (has(owner, rank)) call.Send(partner, results + unit_of(owner), known[owner]);
      }
      JFLUX_UNROLL
      for (int owner = 0; owner < kMost; ++owner) {
        if (has(owner, partner) &&
            !call.AwaitFrom(partner, results + unit_of(owner), &known[owner])) {
          return false;
        }
      }
    }
    JFLUX_UNROLL
    for (int owner = 0; owner < kMost; ++owner) {
      if (owner >= pairing || unit_of(owner) >= units) continue;
      StoreUnit(arrays.y, unit_of(owner), p.Bytes(), known[owner]);
      if (Other() >= 0) call.Send(Other(), results + unit_of(owner), known[owner]);
    }
    return true;
  }

  // An odd rank's part.
  JFLUX_HD bool Served(int64_t u, int64_t to, int64_t from) const {
    call.Send(Other(), to, Load(u));
    uint64_t result;
    if (!call.AwaitFrom(Other(), from, &result)) return false;
    StoreUnit(arrays.y, u, p.Bytes(), result);
    return true;
  }

  // Unit u of this rank's x, and of the odd rank's that it serves.
  JFLUX_HD bool Own(int64_t u, int64_t from, Sum* total) const {
    *total = Sum::Of(Load(u));
    if (Other() < 0) return true;
    uint64_t payload;
    if (!call.AwaitFrom(Other(), from, &payload)) return false;
    total->Add(Sum::Of(payload));
    return true;
  }
  JFLUX_HD uint64_t Finished(Sum total, int64_t u) const {
    if (p.residual) total.Add(Sum::Of(LoadUnit(arrays.residual, u, p.Bytes())));
    return total.Rounded();
  }

  JFLUX_HD bool Exchange(int partner, int64_t index, Sum* total) const {
    SendSum(partner, index, *total);
    return AddSum(partner, index, total);
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
