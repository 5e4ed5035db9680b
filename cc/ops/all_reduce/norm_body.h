// all_reduce whose sums' rows are normalised, for one of the teams of threads that share a rank's
// part: a cluster of a kernel's, or the CPU back end's only thread. A team does whole rows: what
// its threads need of each other are sums over a row.
//
// One-shot, each rank sums and normalises all rows. Two-shot, one rank of each group of rows sums
// it and sends the sums; everybody normalises them.
#ifndef JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_

#include <cmath>
#include <cstdint>

#include "core/packet_sum.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

// Memory that a thread keeps to itself: a place for each of its units of a row.
template <typename T>
struct NormScratch {
  PayloadSum<T>* scale;
  PayloadSum<T>* bias;  // the last: not there without one
  uint64_t* row;

  // For `places` places of all threads that share `memory`, which is p.NormBytes(places, ...) long.
  static JFLUX_HD NormScratch In(void* memory, int64_t places) {
    auto* scale = static_cast<PayloadSum<T>*>(memory);
    auto* row = reinterpret_cast<uint64_t*>(scale + places);
    return NormScratch{scale, reinterpret_cast<PayloadSum<T>*>(row + places), row};
  }
};

// Team: thread(), threads(), and Sum(v): over its threads, which all call it; the same for all.
// A thread's places are scratch_first and every scratch_step-th after it.
template <typename T, typename Team>
struct AllReduceNormBody {
  using Wide = typename PayloadSum<T>::Wide;
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;
  const Team& team;
  NormScratch<T> scratch;
  int64_t scratch_first, scratch_step;

  // The part of team `block` of so many. False if a wait of this thread failed; it still takes
  // part in the team's sums.
  JFLUX_HD bool Run(int64_t block, int64_t blocks) const {
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(block, blocks)
                                                       : TwoShot(block, blocks);
  }

 private:
  JFLUX_HD bool OneShot(int64_t block, int64_t blocks) const {
    const int64_t rows = p.RowCount(), units = p.RowUnits(), all = rows * units;
    const int rank = call.view.rank;
    for (int64_t row = block; row < rows; row += blocks) {
      ForUnits([&](int64_t u, int64_t) {
        const uint64_t own = Word(arrays.x)[row * units + u];
        for (int d = 1; d < p.world; ++d) {
          call.Send((rank + d) % p.world, rank * all + row * units + u, own);
        }
      });
    }
    KeepFactors();
    bool ok = true;
    for (int64_t row = block; row < rows; row += blocks) {
      const auto index_of = [&](int src, int64_t u) { return src * all + row * units + u; };
      ok = ok && SumRow(row, index_of, [](int64_t, uint64_t) {});
      Normalise(row);
    }
    return ok;
  }

  JFLUX_HD bool TwoShot(int64_t block, int64_t blocks) const {
    const int64_t groups = p.RowGroups(), units = p.RowUnits(), all = groups * units;
    const int64_t rows = p.RowCount(), sums = p.world * all;
    const int rank = call.view.rank;
    for (int64_t group = block; group < groups; group += blocks) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (rank + d) % p.world;
        const int64_t row = group * p.world + owner;
        if (row >= rows) continue;
        ForUnits([&](int64_t u, int64_t) {
          call.Send(owner, rank * all + group * units + u, Word(arrays.x)[row * units + u]);
        });
      }
    }
    KeepFactors();
    bool ok = true;
    for (int64_t group = block; group < groups; group += blocks) {
      const int64_t row = group * p.world + rank;
      if (row >= rows) continue;
      const auto index_of = [&](int src, int64_t u) { return src * all + group * units + u; };
      ok = ok && SumRow(row, index_of, [&](int64_t u, uint64_t sum) {
             for (int d = 1; d < p.world; ++d) {
               call.Send((rank + d) % p.world, sums + row * units + u, sum);
             }
           });
      Normalise(row);
    }
    for (int64_t group = block; group < groups; group += blocks) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (rank + d) % p.world;
        const int64_t row = group * p.world + owner;
        if (row >= rows) continue;
        ok = ok && ReceiveRow(row, owner, sums);
        Normalise(row);
      }
    }
    return ok;
  }

  // While the packets are on their way.
  JFLUX_HD void KeepFactors() const {
    ForUnits([&](int64_t u, int64_t place) {
      scratch.scale[place] = Factors(arrays.scale, u);
      if (arrays.bias != nullptr) scratch.bias[place] = Factors(arrays.bias, u);
    });
  }

  // Sums this thread's units of a row; visit(unit, sum) each.
  template <typename IndexOf, typename Visit>
  JFLUX_HD bool SumRow(int64_t row, IndexOf&& index_of, Visit&& visit) const {
    const int64_t first = row * p.RowUnits();
    bool ok = true;
    ForUnits([&](int64_t u, int64_t place) {
      const uint64_t own = Word(arrays.x)[first + u];
      const uint64_t residual = p.residual ? Word(arrays.residual)[first + u] : 0;
      PayloadSum<T> total;
      ok = ok && SumOverRanks(call, own, [&](int src) { return index_of(src, u); }, &total);
      if (!ok) return;
      if (p.residual) total.Add(PayloadSum<T>::Of(residual));
      const uint64_t sum = total.Rounded();
      visit(u, sum);
      Keep(first + u, place, sum);
    });
    return ok;
  }

  // The sums of a row that `owner` sends.
  JFLUX_HD bool ReceiveRow(int64_t row, int owner, int64_t sums) const {
    const int64_t first = row * p.RowUnits();
    bool ok = true;
    ForUnits([&](int64_t u, int64_t place) {
      uint64_t sum;
      ok = ok && call.AwaitFrom(owner, sums + first + u, &sum);
      if (ok) Keep(first + u, place, sum);
    });
    return ok;
  }

  JFLUX_HD void Keep(int64_t unit, int64_t place, uint64_t sum) const {
    static_cast<UnitWord*>(arrays.y)[unit] = sum;
    scratch.row[place] = sum;
  }

  // The row in scratch.row. All threads of the team.
  JFLUX_HD void Normalise(int64_t row) const {
    const int64_t first = row * p.RowUnits();
    const Wide width = static_cast<Wide>(p.width);
    Wide mean = 0;
    if (p.norm == Norm::kLayer) mean = team.Sum(RowSum([](Wide v) { return v; })) / width;
    const Wide squares = team.Sum(RowSum([&](Wide v) { return (v - mean) * (v - mean); }));
    const Wide factor = 1 / std::sqrt(squares / width + static_cast<Wide>(p.epsilon));
    ForUnits([&](int64_t u, int64_t place) {
      PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[place]);
      for (int i = 0; i < PayloadSum<T>::kCount; ++i) {
        v.value[i] = (v.value[i] - mean) * factor * scratch.scale[place].value[i];
      }
      if (arrays.bias != nullptr) v.Add(scratch.bias[place]);
      static_cast<UnitWord*>(arrays.normalised)[first + u] = v.Rounded();
    });
  }
  // Of f(v) over this thread's numbers of the row.
  template <typename F>
  JFLUX_HD Wide RowSum(F&& f) const {
    Wide sum = 0;
    ForUnits([&](int64_t, int64_t place) {
      const PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[place]);
      for (int i = 0; i < PayloadSum<T>::kCount; ++i) sum += f(v.value[i]);
    });
    return sum;
  }

  // Unit u of scale or bias.
  JFLUX_HD PayloadSum<T> Factors(const void* array, int64_t u) const {
    if (!arrays.wide_scale) return PayloadSum<T>::Of(Word(array)[u]);
    constexpr int kCount = PayloadSum<T>::kCount;
    PayloadSum<T> v;
    for (int i = 0; i < kCount; ++i) {
      v.value[i] = static_cast<const float*>(array)[u * kCount + i];
    }
    return v;
  }

  // visit(unit, place) of this thread's units of a row.
  template <typename Visit>
  JFLUX_HD void ForUnits(Visit&& visit) const {
    int64_t place = scratch_first;
    for (int64_t u = team.thread(); u < p.RowUnits(); u += team.threads()) {
      visit(u, place);
      place += scratch_step;
    }
  }
  static JFLUX_HD const UnitWord* Word(const void* array) {
    return static_cast<const UnitWord*>(array);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_
