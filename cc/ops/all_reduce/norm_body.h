// all_reduce with normalised rows: one team's part of a rank's work. A team is a cluster of a
// kernel, or the CPU's only thread. It handles full rows, since a norm needs sums over a row.
//
//   one-shot  each rank sums and normalises all rows
//   two-shot  one rank of each row group sums a row and sends the sums; every rank normalises all
//             rows
//
// A row is quantised as it is normalised, of what its type holds.
#ifndef JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_

#include <cmath>
#include <cstdint>

#include "core/packet_sum.h"
#include "core/quantize.h"
#include "core/units.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

// Scratch private to a thread: an entry for each of its units of a row.
template <typename T>
struct NormScratch {
  PayloadSum<T>* scale;
  PayloadSum<T>* bias;  // last in memory; absent without a bias
  uint64_t* row;

  // The `entries` entries of all threads that share `memory`, which has p.NormBytes(entries, ...)
  // bytes.
  static JFLUX_HD NormScratch In(void* memory, int64_t entries) {
    auto* scale = static_cast<PayloadSum<T>*>(memory);
    auto* row = reinterpret_cast<uint64_t*>(scale + entries);
    return NormScratch{scale, reinterpret_cast<PayloadSum<T>*>(row + entries), row};
  }
};

// Team: thread(), threads(), and Sum(v) and Max(v) over its threads: all call them, all get the
// same bits. MaxOfLanes(v) is over kLanes threads with consecutive numbers, of which the first is a
// multiple of kLanes. A thread's entries are scratch_first and every scratch_step-th after it.
template <typename T, typename Team, bool kQuantizes>
struct AllReduceNormBody {
  static_assert(!kQuantizes || sizeof(T) == 2);
  using Wide = typename PayloadSum<T>::Wide;
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;
  const Team& team;
  NormScratch<T> scratch;
  int64_t scratch_first, scratch_step;

  // Runs the part of team `team_id` of `teams`. False if a wait of this thread failed; the
  // thread still takes part in the team's sums.
  JFLUX_HD bool Run(int64_t team_id, int64_t teams) const {
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(team_id, teams)
                                                       : TwoShot(team_id, teams);
  }

 private:
  JFLUX_HD bool OneShot(int64_t team_id, int64_t teams) const {
    const int64_t rows = p.RowCount(), units = p.RowUnits(), all = rows * units;
    const int rank = call.view.rank;
    for (int64_t row = team_id; row < rows; row += teams) {
      ForUnits([&](int64_t u, int64_t) {
        const uint64_t own = Word(arrays.x)[row * units + u];
        for (int d = 1; d < p.world; ++d) {
          call.Send((rank + d) % p.world, rank * all + row * units + u, own);
        }
      });
    }
    KeepFactors();
    bool ok = true;
    for (int64_t row = team_id; row < rows; row += teams) {
      const auto index_of = [&](int src, int64_t u) { return src * all + row * units + u; };
      ok = ok && SumRow(row, index_of, [](int64_t, uint64_t) {});
      Normalise(row);
    }
    return ok;
  }

  JFLUX_HD bool TwoShot(int64_t team_id, int64_t teams) const {
    const int64_t groups = p.RowGroups(), units = p.RowUnits(), all = groups * units;
    const int64_t rows = p.RowCount(), sums = p.world * all;
    const int rank = call.view.rank;
    for (int64_t group = team_id; group < groups; group += teams) {
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
    for (int64_t group = team_id; group < groups; group += teams) {
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
    for (int64_t group = team_id; group < groups; group += teams) {
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

  // Loads scale and bias while the packets are in flight.
  JFLUX_HD void KeepFactors() const {
    ForUnits([&](int64_t u, int64_t entry) {
      scratch.scale[entry] = Factors(arrays.scale, u);
      if (arrays.bias != nullptr) scratch.bias[entry] = Factors(arrays.bias, u);
    });
  }

  // Sums this thread's units of a row over ranks. Calls visit(unit, sum) for each.
  template <typename IndexOf, typename Visit>
  JFLUX_HD bool SumRow(int64_t row, IndexOf&& index_of, Visit&& visit) const {
    const int64_t first = row * p.RowUnits();
    bool ok = true;
    ForUnits([&](int64_t u, int64_t entry) {
      const uint64_t own = Word(arrays.x)[first + u];
      const uint64_t residual = p.residual ? Word(arrays.residual)[first + u] : 0;
      PayloadSum<T> total;
      ok = ok && SumOverRanks(call, own, [&](int src) { return index_of(src, u); }, &total);
      if (!ok) return;
      if (p.residual) total.Add(PayloadSum<T>::Of(residual));
      const uint64_t sum = total.Rounded();
      visit(u, sum);
      Keep(first + u, entry, sum);
    });
    return ok;
  }

  // Receives the sums of a row from `owner`.
  JFLUX_HD bool ReceiveRow(int64_t row, int owner, int64_t sums) const {
    const int64_t first = row * p.RowUnits();
    bool ok = true;
    ForUnits([&](int64_t u, int64_t entry) {
      uint64_t sum;
      ok = ok && call.AwaitFrom(owner, sums + first + u, &sum);
      if (ok) Keep(first + u, entry, sum);
    });
    return ok;
  }

  JFLUX_HD void Keep(int64_t unit, int64_t entry, uint64_t sum) const {
    static_cast<UnitWord*>(arrays.y)[unit] = sum;
    scratch.row[entry] = sum;
  }

  // Normalises the row in scratch.row. Called by all threads of the team.
  JFLUX_HD void Normalise(int64_t row) const {
    const int64_t first = row * p.RowUnits();
    const Wide width = static_cast<Wide>(p.width);
    Wide mean = 0;
    if (p.norm == Norm::kLayer) mean = team.Sum(RowSum([](Wide v) { return v; })) / width;
    const Wide squares = team.Sum(RowSum([&](Wide v) { return (v - mean) * (v - mean); }));
    const Wide factor = 1 / std::sqrt(squares / width + static_cast<Wide>(p.epsilon));
    ForUnits([&](int64_t u, int64_t entry) {
      PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[entry]);
      for (int i = 0; i < PayloadSum<T>::kCount; ++i) {
        v.value[i] = (v.value[i] - mean) * factor * scratch.scale[entry].value[i];
      }
      if (arrays.bias != nullptr) v.Add(scratch.bias[entry]);
      const uint64_t rounded = v.Rounded();
      if constexpr (kQuantizes) {
        scratch.row[entry] = rounded;
      } else {
        static_cast<UnitWord*>(arrays.normalised)[first + u] = rounded;
      }
    });
    if constexpr (kQuantizes) Quantize(row);
  }

  // Quantises the row in scratch.row. Called by all threads of the team.
  JFLUX_HD void Quantize(int64_t row) const {
    const QuantizedRows& q = arrays.quantized;
    const auto units = static_cast<int>(p.RowUnits());
    const int thread = team.thread(), threads = team.threads();
    const bool whole = q.block == -1;
    // kLanes threads have a block of a part of a row: each as many units of it, one entry after the
    // other.
    constexpr int kUnits = kQuantizedBlock / PayloadSum<T>::kCount;
    const int first = thread / Team::kLanes * Team::kLanes;
    const int step = whole ? units : kUnits / Team::kLanes;
    JFLUX_NO_UNROLL
    for (int i = 0; whole ? i == 0 : first + i * threads < units; i += step) {
      const auto for_own = [&](auto&& visit) {
        int u = thread + i * threads;
        for (int j = i; j < i + step && u < units; ++j, u += threads) {
          visit(u, scratch.row[scratch_first + j * scratch_step]);
        }
      };
      uint32_t most = 0;
      for_own([&](int, uint64_t word) { most = Max(most, Largest(word)); });
      most = whole ? team.Max(most) : team.MaxOfLanes(most);
      // The same magnitude as bits of a float.
      most = BitsOfFloat(T{static_cast<uint16_t>(most)});
      const float scale = ScaleOfBlock(most, q.values, q.power_of_two);
      if (thread == (whole ? 0 : first)) {
        q.scale[row * q.Blocks(p.width) + (first + i * threads) / kUnits] = scale;
      }
      const int64_t row_first = row * units;
      for_own([&](int u, uint64_t word) { StoreValues(row_first + u, word, scale); });
    }
  }
  // The largest magnitude of a unit: bits of a T without the sign, whose order is the numbers'.
  static JFLUX_HD uint32_t Largest(uint64_t word) {
    uint32_t most = 0;
    for (int i = 0; i < 4; ++i) {
      most = Max(most, static_cast<uint32_t>(word >> (16 * i)) & 0x7fff);
    }
    return most;
  }
  // `unit`: of all rows.
  JFLUX_HD void StoreValues(int64_t unit, uint64_t word, float scale) const {
    const PayloadSum<T> v = PayloadSum<T>::Of(word);
    uint32_t values = 0;
    for (int i = PayloadSum<T>::kCount - 1; i >= 0; --i) {
      values = values << 8 | QuantizedValue(v.value[i], scale, arrays.quantized.values);
    }
    static_cast<uint32_t __attribute__((may_alias))*>(arrays.normalised)[unit] = values;
  }
  // The sum of f(v) over this thread's elements of the row.
  template <typename F>
  JFLUX_HD Wide RowSum(F&& f) const {
    Wide sum = 0;
    ForUnits([&](int64_t, int64_t entry) {
      const PayloadSum<T> v = PayloadSum<T>::Of(scratch.row[entry]);
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

  // Calls visit(unit, scratch entry) for each of this thread's units of a row.
  template <typename Visit>
  JFLUX_HD void ForUnits(Visit&& visit) const {
    int64_t entry = scratch_first;
    for (int64_t u = team.thread(); u < p.RowUnits(); u += team.threads()) {
      visit(u, entry);
      entry += scratch_step;
    }
  }
  static JFLUX_HD const UnitWord* Word(const void* array) {
    return static_cast<const UnitWord*>(array);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_NORM_BODY_H_
