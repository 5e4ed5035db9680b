// all_reduce whose sums' rows are normalised, for the threads of one of the blocks that share a
// rank's part: a kernel's CTA, or the CPU back end's only thread. A block does whole rows: what its
// threads need of each other are sums over a row.
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

// Memory of a block, of RowUnits() each; each thread only uses its own units' places.
template <typename T>
struct NormScratch {
  PayloadSum<T>* scale;
  PayloadSum<T>* bias;  // not used without one
  uint64_t* row;

  static JFLUX_HD int64_t Bytes(int64_t row_units) {
    return row_units * static_cast<int64_t>(2 * sizeof(PayloadSum<T>) + sizeof(uint64_t));
  }
  static JFLUX_HD NormScratch In(void* memory, int64_t row_units) {
    auto* scale = static_cast<PayloadSum<T>*>(memory);
    return NormScratch{scale, scale + row_units,
                       reinterpret_cast<uint64_t*>(scale + 2 * row_units)};
  }
};

// Team: thread(), threads(), and Sum(v): over its threads, which all call it; the same for all.
template <typename T, typename Team>
struct AllReduceNormBody {
  using Wide = typename PayloadSum<T>::Wide;
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;
  const Team& team;
  NormScratch<T> scratch;

  // The part of block `block` of so many. False if a wait of this thread failed; it still takes
  // part in the team's sums.
  JFLUX_HD bool Run(int64_t block, int64_t blocks) const {
    for (int64_t u = team.thread(); u < p.RowUnits(); u += team.threads()) {
      scratch.scale[u] = Factors(arrays.scale, u);
      if (arrays.bias != nullptr) scratch.bias[u] = Factors(arrays.bias, u);
    }
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(block, blocks)
                                                       : TwoShot(block, blocks);
  }

 private:
  static constexpr int kAtOnce = 2;  // units that a thread waits for at once

  JFLUX_HD bool OneShot(int64_t block, int64_t blocks) const {
    const int64_t rows = p.RowCount(), units = p.RowUnits(), all = rows * units;
    const int rank = call.view.rank;
    for (int64_t row = block; row < rows; row += blocks) {
      ForUnits([&](int64_t u) {
        const uint64_t own = Word(arrays.x)[row * units + u];
        for (int d = 1; d < p.world; ++d) {
          call.Send((rank + d) % p.world, rank * all + row * units + u, own);
        }
      });
    }
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
        ForUnits([&](int64_t u) {
          call.Send(owner, rank * all + group * units + u, Word(arrays.x)[row * units + u]);
        });
      }
    }
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

  // Sums this thread's units of a row; visit(unit, sum) each.
  template <typename IndexOf, typename Visit>
  JFLUX_HD bool SumRow(int64_t row, IndexOf&& index_of, Visit&& visit) const {
    const int64_t units = p.RowUnits(), first = row * units;
    for (int64_t u = team.thread(); u < units; u += kAtOnce * team.threads()) {
      const auto at = [&](int k) { return u + k * team.threads(); };
      uint64_t own[kAtOnce], residual[kAtOnce];
      bool wanted[kAtOnce];
      JFLUX_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        wanted[k] = at(k) < units;
        own[k] = wanted[k] ? Word(arrays.x)[first + at(k)] : 0;
        residual[k] = wanted[k] && p.residual ? Word(arrays.residual)[first + at(k)] : 0;
      }
      PayloadSum<T> total[kAtOnce];
      const auto place = [&](int k, int src) { return index_of(src, at(k)); };
      if (!SumOverRanks<T, kAtOnce>(call, own, wanted, place, total)) return false;
      JFLUX_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (!wanted[k]) continue;
        if (p.residual) total[k].Add(PayloadSum<T>::Of(residual[k]));
        const uint64_t sum = total[k].Rounded();
        visit(at(k), sum);
        Keep(first, at(k), sum);
      }
    }
    return true;
  }

  // The sums of a row that `owner` sends.
  JFLUX_HD bool ReceiveRow(int64_t row, int owner, int64_t sums) const {
    const int64_t units = p.RowUnits(), first = row * units;
    for (int64_t u = team.thread(); u < units; u += team.threads()) {
      uint64_t sum;
      if (!call.AwaitFrom(owner, sums + first + u, &sum)) return false;
      Keep(first, u, sum);
    }
    return true;
  }

  JFLUX_HD void Keep(int64_t first, int64_t u, uint64_t sum) const {
    static_cast<UnitWord*>(arrays.y)[first + u] = sum;
    scratch.row[u] = sum;
  }

  // The row in scratch.row. All threads of the team.
  JFLUX_HD void Normalise(int64_t row) const {
    const int64_t first = row * p.RowUnits();
    const Wide width = static_cast<Wide>(p.width);
    Wide mean = 0;
    if (p.norm == Norm::kLayer) mean = team.Sum(RowSum([](Wide v) { return v; })) / width;
    const Wide squares = team.Sum(RowSum([&](Wide v) { return (v - mean) * (v - mean); }));
    const Wide factor = 1 / std::sqrt(squares / width + static_cast<Wide>(p.epsilon));
    ForUnits([&](int64_t u) {
      PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[u]);
      for (int i = 0; i < PayloadSum<T>::kCount; ++i) {
        v.value[i] = (v.value[i] - mean) * factor * scratch.scale[u].value[i];
      }
      if (arrays.bias != nullptr) v.Add(scratch.bias[u]);
      static_cast<UnitWord*>(arrays.normalised)[first + u] = v.Rounded();
    });
  }
  // Of f(v) over this thread's numbers of the row.
  template <typename F>
  JFLUX_HD Wide RowSum(F&& f) const {
    Wide sum = 0;
    ForUnits([&](int64_t u) {
      const PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[u]);
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

  template <typename Visit>
  JFLUX_HD void ForUnits(Visit&& visit) const {
    for (int64_t u = team.thread(); u < p.RowUnits(); u += team.threads()) visit(u);
  }
  static JFLUX_HD const UnitWord* Word(const void* array) {
    return static_cast<const UnitWord*>(array);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_
