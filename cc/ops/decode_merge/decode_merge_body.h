// decode_merge: one thread's part of a rank's work. A kernel has many threads; the CPU back end has
// one. A unit is a quad of a row's outputs. Its thread sends it to all ranks, or to the row's
// owner. Then those that merge wait for the ranks' quads, and for the row's log-sum-exps, for which
// all threads of the row wait. By owner the others wait for the result.
//
// Deadlock: all threads send their quads before they wait. A thread waits for packets that the
// thread with its number has sent, and for log-sum-exps that this one or one before it has: whole
// rows go round. What an owner's thread sends after it has waited, only threads with its number and
// later ones wait for.
#ifndef JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_
#define JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_

#include <cmath>
#include <cstdint>

#include "core/numbers.h"
#include "ops/decode_merge/decode_merge.h"

namespace jflux {

struct DecodeMergeBody {
  static constexpr int kOutputs = DecodeMergeParams::kOutputs;
  const DecodeMergeParams& p;
  const DecodeMergeArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const Walk walk = Walk::Of(p, threads);
    if (thread >= walk.step) return true;
    for (int64_t u = thread; u < walk.end; u += walk.step) {
      const Unit unit = walk.At(u);
      if (unit.quad >= p.Quads()) continue;
      const Quad own = OwnQuad(unit);
      JFLUX_NO_UNROLL
      for (int d = 1; d < p.world; ++d) {
        const int peer = (Rank() + d) % p.world;
        if (!p.by_owner || peer == p.Owner(unit.row)) SendQuad(peer, unit, own);
      }
    }
    for (int64_t u = thread; u < walk.end; u += walk.step) {
      const Unit unit = walk.At(u);
      if (unit.quad >= p.Quads() || (p.by_owner && p.Owner(unit.row) != Rank())) continue;
      Quad merged{};
      if (!Merge(unit, &merged)) return false;
      StoreAndSend(unit, merged);
    }
    if (!p.by_owner) return true;
    for (int64_t u = thread; u < walk.end; u += walk.step) {
      const Unit unit = walk.At(u);
      if (unit.quad >= p.Quads() || p.Owner(unit.row) == Rank()) continue;
      if (!StoreResult(unit)) return false;
    }
    return true;
  }

 private:
  struct Unit {
    int64_t row, quad;
  };
  // A thread takes every `step`-th number from its own on, so that the first quad of a row has no
  // later thread than its others. If all have a thread of their own, each unit is a number. Else
  // the step is whole rows, or, where a row has more quads than there are threads, a row's numbers
  // are whole steps: those beyond its quads are no units.
  struct Walk {
    int64_t row, step, end;
    static JFLUX_HD Walk Of(const DecodeMergeParams& p, int64_t threads) {
      const int64_t quads = p.Quads();
      if (p.Units() <= threads) return {quads, threads, p.Units()};
      if (quads <= threads) return {quads, threads - Remainder(threads, quads), p.Units()};
      const int64_t row = Quotient(quads + threads - 1, threads) * threads;
      return {row, threads, p.rows * row};
    }
    JFLUX_HD Unit At(int64_t u) const { return {Quotient(u, row), Remainder(u, row)}; }
  };

  // Outputs of a row over some keys, and the log-sum-exp of these.
  struct Quad {
    float log_sum, out[kOutputs];
  };
  // The merge of quads of one unit, one after the other.
  struct Merger {
    float highest = -INFINITY, total = 0, sums[kOutputs] = {};

    JFLUX_HD void Add(const Quad& quad) {
      if (quad.log_sum == -INFINITY) return;
      // Of a NaN and a number the number.
      if (quad.log_sum > highest && quad.log_sum != INFINITY) {
        Scale(highest == -INFINITY ? 0.0f : expf(highest - quad.log_sum));
        highest = quad.log_sum;
      }
      const float weight = expf(quad.log_sum - Base());
      total += weight;
      JFLUX_UNROLL
      for (int i = 0; i < kOutputs; ++i) sums[i] += weight * quad.out[i];
    }
    JFLUX_HD void Scale(float share) {
      total *= share;
      JFLUX_UNROLL
      for (float& sum : sums) sum *= share;
    }
    JFLUX_HD Quad Merged() const {
      const bool any = total != 0;  // NaN counts
      Quad merged{any ? logf(total) + Base() : -INFINITY, {}};
      JFLUX_UNROLL
      for (int i = 0; i < kOutputs; ++i) merged.out[i] = any ? sums[i] / total : 0.0f;
      return merged;
    }
    JFLUX_HD float Base() const { return highest == -INFINITY ? 0.0f : highest; }
  };

  JFLUX_HD int Rank() const { return call.view.rank; }
  // Of this rank. Outputs beyond the row's end are 0.
  JFLUX_HD Quad OwnQuad(const Unit& unit) const {
    const float* row = arrays.x + unit.row * (p.width + 1);
    Quad quad{row[p.width], {}};
    JFLUX_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      const int64_t column = p.ColumnOf(unit.quad, i);
      if (column < p.width) quad.out[i] = row[column];
    }
    return quad;
  }

  JFLUX_HD void SendQuad(int peer, const Unit& unit, const Quad& quad) const {
    const int64_t row = p.PacketOf(Rank(), unit.row), at = row + 1 + unit.quad;
    if (unit.quad == 0) call.Send(peer, row, BitsOfFloat(quad.log_sum));
    call.Send(peer, at, Both(quad.out[0], quad.out[1]));
    call.Send(peer, at + p.Quads(), Both(quad.out[2], quad.out[3]));
  }
  // The merge of all ranks' quads, in their order. A loop, so that the code is short: a call runs
  // it once, and its instructions are fetched from memory.
  JFLUX_HD bool Merge(const Unit& unit, Quad* merged) const {
    const Quad own = OwnQuad(unit);
    Merger merger;
    JFLUX_NO_UNROLL
    for (int src = 0; src < p.world; ++src) {
      Quad quad = own;
      if (src != Rank()) {
        const int64_t row = p.PacketOf(src, unit.row), at = row + 1 + unit.quad;
        uint64_t packets[3];
        if (!call.AwaitFrom(src, {row, at, at + p.Quads()}, &packets)) return false;
        quad = {Low(packets[0]),
                {Low(packets[1]), Low(packets[1] >> 32), Low(packets[2]), Low(packets[2] >> 32)}};
      }
      merger.Add(quad);
    }
    *merged = merger.Merged();
    return true;
  }

  // A quad of y: what its packets hold.
  struct Result {
    uint64_t packets[2];
  };
  JFLUX_HD void StoreAndSend(const Unit& unit, const Quad& quad) const {
    const Result result = ResultOf(quad);
    Store(unit, result);
    if (unit.quad == 0) arrays.l[unit.row] = quad.log_sum;
    if (!p.by_owner) return;
    const int64_t row = p.ResultOf(unit.row), at = row + 1 + unit.quad;
    JFLUX_NO_UNROLL
    for (int d = 1; d < p.world; ++d) {
      const int peer = (Rank() + d) % p.world;
      if (unit.quad == 0) call.Send(peer, row, BitsOfFloat(quad.log_sum));
      call.Send(peer, at, result.packets[0]);
      if (p.QuadPackets() == 2) call.Send(peer, at + p.Quads(), result.packets[1]);
    }
  }
  JFLUX_HD bool StoreResult(const Unit& unit) const {
    const int64_t row = p.ResultOf(unit.row), at = row + 1 + unit.quad;
    const int64_t second = p.QuadPackets() == 2 ? at + p.Quads() : at;
    uint64_t packets[3];
    if (!call.AwaitFrom(p.Owner(unit.row), {row, at, second}, &packets)) return false;
    Store(unit, {{packets[1], packets[2]}});
    if (unit.quad == 0) arrays.l[unit.row] = Low(packets[0]);
    return true;
  }
  JFLUX_HD Result ResultOf(const Quad& quad) const {
    if (p.dtype == DType::kF32) {
      return {{Both(quad.out[0], quad.out[1]), Both(quad.out[2], quad.out[3])}};
    }
    uint64_t halves = 0;
    JFLUX_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      const uint64_t bits =
          p.dtype == DType::kBF16 ? BF16::From(quad.out[i]).bits : F16::From(quad.out[i]).bits;
      halves |= bits << (16 * i);
    }
    return {{halves, 0}};
  }
  JFLUX_HD void Store(const Unit& unit, const Result& result) const {
    JFLUX_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      const int64_t column = p.ColumnOf(unit.quad, i), at = unit.row * p.width + column;
      if (column >= p.width) continue;
      if (p.dtype == DType::kF32) {
        static_cast<float*>(arrays.y)[at] = Low(result.packets[i / 2] >> (32 * (i % 2)));
      } else {
        static_cast<uint16_t*>(arrays.y)[at] = static_cast<uint16_t>(result.packets[0] >> (16 * i));
      }
    }
  }

  static JFLUX_HD uint64_t Both(float low, float high) {
    return BitsOfFloat(low) | static_cast<uint64_t>(BitsOfFloat(high)) << 32;
  }
  static JFLUX_HD float Low(uint64_t payload) {
    return FloatOfBits(static_cast<uint32_t>(payload));
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_BODY_H_
