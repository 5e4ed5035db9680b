// ragged_all_to_all in LL packets: one thread's part of a rank's work. A kernel has many threads,
// which make tables together by CTA (shmem::Block) if there are many slices (ragged_table.h); the
// CPU back end has one.
//
//   packets  of a rank: the headers of all slices, by source; then the image of y, in which each
//            row begins with a packet of its own
//   writer   each source writes its headers, by the CTA that starts first, and its slices' rows, at
//            once
//   reader   waits for a slice's header, which says where its rows lie, and then for these
//   faults   A rank that was given a bad value sends refusals in place of all headers, and nothing
//            else. Sizes that differ are reported at the end: until then the rank serves others.
//
// Deadlock: all threads send before they wait. A thread waits for headers, and for rows that the
// thread with its number has sent: units of rows are numbered alike on both sides, by slice or,
// with tables, over all slices from one rank to another.
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_PACKETS_BODY_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_PACKETS_BODY_H_

#include <cstdint>

#include "core/units.h"
#include "jflux/shmem.h"
#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "ops/ragged_all_to_all/ragged_table.h"

namespace jflux {

struct RaggedPacketsBody {
  using Block = shmem::Block;
  const RaggedParams& p;
  const RaggedArrays& arrays;
  const PacketCall& call;
  const RaggedTables tables;

  // Runs the part of thread `thread` of `threads`. False if the call failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    const RaggedSlices slices{p, arrays};
    const int rank = call.view.rank;
    tables.Fill();
    const BadValue bad = tables.FirstBad();
    if (thread < Block::size()) SendHeaders(bad);
    if (bad.Found()) {
      slices.Report(bad, call.wait);
      return false;
    }
    if (tables.Exist()) return RunWithTables(thread, threads);
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

  // Sends the headers of all slices. Called by all threads of one CTA.
  JFLUX_HD void SendHeaders(const BadValue& bad) const {
    const RaggedSlices slices{p, arrays};
    for (int d = 1; d < p.world; ++d) {
      const int peer = (call.view.rank + d) % p.world;
      for (int32_t t = Block::rank(); t < p.PerRank(); t += Block::size()) {
        const SliceHeader header = bad.Found()
                                       ? SliceHeader::Refusal(bad.argument, bad.index, bad.value)
                                       : slices.Header(peer, t);
        call.Send(peer, HeaderIndex(call.view.rank, t), header.Word());
      }
    }
  }

  // Sends and receives by units of all slices of a rank at once.
  JFLUX_HD bool RunWithTables(int64_t thread, int64_t threads) const {
    const RaggedSlices slices{p, arrays};
    const int rank = call.view.rank;
    for (int d = 1; d < p.world; ++d) {
      const int peer = (rank + d) % p.world;
      ForUnitsOf(tables.Sends(), peer, thread, threads, [&](int32_t t, int64_t row, int64_t unit) {
        const int64_t from = slices.From(peer, t) + row, to = slices.Header(peer, t).to + row;
        call.Send(peer, RowIndex(to) + unit, Load(from, unit));
        return true;
      });
    }
    uint32_t fits = 0;  // a bit for each rank
    for (int d = 0; d < p.world; ++d) {
      const int src = (rank + d) % p.world;
      bool came = true, fit = true;
      for (int32_t t = Block::rank(); t < p.PerRank() && came; t += Block::size()) {
        SliceHeader header{};
        came = AwaitHeader(src, t, &header);
        fit &= came && slices.Fits(header, src, t);
      }
      if (!Block::all(came)) return false;
      if (Block::all(fit) && tables.Receives().Rows(src) <= p.ImageRows()) fits |= 1u << src;
    }
    bool ok = true;
    for (int d = 0; d < p.world && ok; ++d) {
      const int src = (rank + d) % p.world;
      if ((fits >> src & 1) == 0) continue;
      const auto receive = [&](int32_t t, int64_t row, int64_t unit) {
        SliceHeader header{};
        uint64_t payload;
        if (!AwaitHeader(src, t, &header)) return false;  // it has come
        if (src == rank) {
          payload = Load(slices.From(src, t) + row, unit);
        } else if (!call.AwaitFrom(src, RowIndex(header.to + row) + unit, &payload)) {
          return false;
        }
        Store(header.to + row, unit, payload);
        return true;
      };
      ok = ForUnitsOf(tables.Receives(), src, thread, threads, receive);
    }
    return ok && ReportMisfits(fits);
  }

  // False, after a report, if there are any.
  JFLUX_HD bool ReportMisfits(uint32_t fits) const {
    const RaggedSlices slices{p, arrays};
    bool ok = true;
    for (int src = 0; src < p.world; ++src) {
      if ((fits >> src & 1) != 0) continue;
      ok = false;
      for (int32_t t = 0; t < p.PerRank(); ++t) {
        SliceHeader header{};
        if (!AwaitHeader(src, t, &header)) return false;
        if (!slices.Fits(header, src, t)) slices.Report(header, src, t, call.wait);
      }
    }
    return ok;
  }

  // False if the wait failed.
  JFLUX_HD bool AwaitHeader(int src, int32_t t, SliceHeader* header) const {
    if (src == call.view.rank) {
      *header = RaggedSlices{p, arrays}.Header(src, t);
      return true;
    }
    uint64_t word;
    if (!call.AwaitFrom(src, HeaderIndex(src, t), &word)) return false;
    *header = SliceHeader::Of(word);
    return true;
  }

  // Calls visit(slice, row of it, unit) for this thread's units of a peer's slices, until it
  // returns false.
  template <typename Visit>
  JFLUX_HD bool ForUnitsOf(const SizeTable& sizes, int peer, int64_t thread, int64_t threads,
                           Visit&& visit) const {
    return ForUnits(sizes.Rows(peer), thread, threads, [&](int64_t row, int64_t unit) {
      const SizeTable::Place slice = sizes.SliceOf(peer, row);
      return visit(slice.t, row - slice.rows, unit);
    });
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
    if (!AwaitHeader(src, t, &header)) return false;
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
