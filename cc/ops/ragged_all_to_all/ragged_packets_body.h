// ragged_all_to_all in LL packets: one thread's part of a rank's work. A kernel has many threads;
// the CPU back end has one.
//
//   packets  of a rank: the headers of all slices, by source; then the image of y, in which each
//            row begins with a packet of its own
//   writer   each source writes its headers and its slices' rows, at once
//   reader   waits for a slice's header, which says where its rows lie, and then for these
//   faults   A rank that was given a bad value sends refusals in place of all headers, and nothing
//            else. Sizes that differ are reported at the end: until then the rank serves others.
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_PACKETS_BODY_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_PACKETS_BODY_H_

#include <cstdint>

#include "core/units.h"
#include "ops/ragged_all_to_all/ragged_all_to_all.h"

namespace jflux {

struct RaggedPacketsBody {
  const RaggedParams& p;
  const RaggedArrays& arrays;
  const PacketCall& call;

  // Runs the part of thread `thread` of `threads`. False if the call failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const RaggedSlices slices{p, arrays};
    const int rank = call.view.rank;
    const BadValue bad = slices.FirstBad();
    for (int d = 1; d < p.world; ++d) {
      SendHeaders((rank + d) % p.world, bad, thread, threads);
    }
    if (bad.Found()) {
      slices.Report(bad, call.wait);
      return false;
    }
    for (int d = 1; d < p.world; ++d) {
      const int peer = (rank + d) % p.world;
      for (int32_t t = 0; t < p.PerRank(); ++t) SendRows(peer, t, thread, threads);
    }
    Misfit misfit;
    for (int d = 0; d < p.world; ++d) {
      const int src = (rank + d) % p.world;
      for (int32_t t = 0; t < p.PerRank(); ++t) {
        if (!Receive(src, t, thread, threads, &misfit)) return false;
      }
    }
    if (misfit.src >= 0) slices.Report(misfit.header, misfit.src, misfit.t, call.wait);
    return misfit.src < 0;
  }

 private:
  struct Misfit {
    SliceHeader header{};
    int src = -1;
    int32_t t = 0;
  };

  JFLUX_HD int64_t HeaderIndex(int src, int32_t t) const { return src * p.PerRank() + t; }
  JFLUX_HD int64_t RowIndex(int64_t row) const { return p.Slices() + row * p.RowUnits(); }

  JFLUX_HD void SendHeaders(int peer, const BadValue& bad, int64_t thread, int64_t threads) const {
    const RaggedSlices slices{p, arrays};
    for (int64_t i = thread; i < p.PerRank(); i += threads) {
      const auto t = static_cast<int32_t>(i);
      const SliceHeader header = bad.Found()
                                     ? SliceHeader::Refusal(bad.argument, bad.index, bad.value)
                                     : slices.Header(peer, t);
      call.Send(peer, HeaderIndex(call.view.rank, t), header.Word());
    }
  }

  // Calls visit(row, unit) for this thread's units of so many rows, until it returns false.
  template <typename Visit>
  JFLUX_HD bool ForUnits(int64_t rows, int64_t thread, int64_t threads, Visit&& visit) const {
    const int64_t per_row = p.RowUnits();
    for (int64_t u = thread; u < rows * per_row; u += threads) {
      const int64_t row = Quotient(u, per_row);
      if (!visit(row, u - row * per_row)) return false;
    }
    return true;
  }

  JFLUX_HD void SendRows(int peer, int32_t t, int64_t thread, int64_t threads) const {
    const RaggedSlices slices{p, arrays};
    const int64_t from = slices.From(peer, t), to = slices.Header(peer, t).to;
    ForUnits(slices.SendRows(peer, t), thread, threads, [&](int64_t row, int64_t unit) {
      call.Send(peer, RowIndex(to + row) + unit, Load(from + row, unit));
      return true;
    });
  }

  // False if a wait failed.
  JFLUX_HD bool Receive(int src, int32_t t, int64_t thread, int64_t threads, Misfit* misfit) const {
    const RaggedSlices slices{p, arrays};
    const bool own = src == call.view.rank;
    SliceHeader header{};
    if (own) {
      header = slices.Header(src, t);
    } else {
      uint64_t word;
      if (!call.AwaitFrom(src, HeaderIndex(src, t), &word)) return false;
      header = SliceHeader::Of(word);
    }
    if (!slices.Fits(header, src, t)) {
      if (misfit->src < 0) *misfit = Misfit{header, src, t};
      return true;
    }
    const int64_t from = own ? slices.From(src, t) : 0;
    return ForUnits(header.rows, thread, threads, [&](int64_t row, int64_t unit) {
      uint64_t payload;
      if (own) {
        payload = Load(from + row, unit);
      } else if (!call.AwaitFrom(src, RowIndex(header.to + row) + unit, &payload)) {
        return false;
      }
      Store(header.to + row, unit, payload);
      return true;
    });
  }

  // Unit `unit` of a row. Rows of whole units are aligned to them; others are moved byte by byte.
  JFLUX_HD uint64_t Load(int64_t row, int64_t unit) const {
    const char* from = static_cast<const char*>(arrays.operand) + row * p.row_bytes;
    if (p.row_bytes % kPacketPayload == 0) return LoadUnit(from, unit, p.row_bytes);
    uint64_t payload = 0;
    ForBytes(unit, [&](int64_t at, int i) {
      payload |= static_cast<uint64_t>(static_cast<uint8_t>(from[at])) << (8 * i);
    });
    return payload;
  }
  JFLUX_HD void Store(int64_t row, int64_t unit, uint64_t payload) const {
    char* to = static_cast<char*>(arrays.y) + row * p.row_bytes;
    if (p.row_bytes % kPacketPayload == 0) return StoreUnit(to, unit, p.row_bytes, payload);
    ForBytes(unit, [&](int64_t at, int i) { to[at] = static_cast<char>(payload >> (8 * i)); });
  }
  template <typename Visit>
  JFLUX_HD void ForBytes(int64_t unit, Visit&& visit) const {
    const int64_t first = unit * kPacketPayload;
    const auto count = static_cast<int>(Min(kPacketPayload, p.row_bytes - first));
    for (int i = 0; i < count; ++i) visit(first + i, i);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_PACKETS_BODY_H_
