// A table in a CTA's shared memory: where slices begin among all rows from one rank to another.
// With it a thread finds the slice of a row, and the number of rows, without a walk over all
// slices. A call of few slices makes no table, since the walk takes less time.
//
//   entry    one for every `step`-th slice of each rank: how many rows lie before that slice,
//            counted over all ranks in order. The last entry is the number of all rows
//   made     by all threads of the CTA (shmem::Block; on the CPU the only thread), in Fill
//   numbers  modulo 2^32. Only differences of one rank's entries are used. They are below 2^31,
//            unless a value is out of range (FirstBad) or a header does not fit; such a call fails
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_TABLE_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_TABLE_H_

#include <cstdint>

#include "jflux/shmem.h"
#include "ops/ragged_all_to_all/ragged_all_to_all.h"

namespace jflux {

// The table of one array of sizes: send_sizes by receiver, or recv_sizes by source.
struct SizeTable {
  using Block = shmem::Block;
  const RaggedParams& p;
  const int32_t* sizes;
  uint32_t* before;       // the entries; null: few slices
  int32_t step, entries;  // of a rank

  // Slice t of a rank, and the rows before it.
  struct Place {
    int32_t t = 0;
    int64_t rows = 0;
  };

  JFLUX_HD int64_t RowsOf(int peer, int32_t t) const { return sizes[peer * p.PerRank() + t]; }

  // Rows of all slices.
  JFLUX_HD int64_t Rows(int peer) const {
    if (before != nullptr) return Entry(peer, entries);
    int64_t rows = 0;
    for (int32_t t = 0; t < p.PerRank(); ++t) rows += RowsOf(peer, t);
    return rows;
  }

  // The last slice with an entry that begins at or before `count`. `unit` is 1 if `count` is in
  // rows, and the bytes of a row if it is in bytes.
  JFLUX_HD Place Find(int peer, int64_t count, int64_t unit) const {
    if (before == nullptr) return Place{};
    int32_t low = 0, high = entries;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (Entry(peer, middle) * unit <= count ? low : high) = middle;
    }
    return Place{low * step, Entry(peer, low)};
  }
  // The slice of a row.
  JFLUX_HD Place SliceOf(int peer, int64_t row) const {
    Place place = Find(peer, row, 1);
    for (; place.t + 1 < p.PerRank(); ++place.t) {
      const int64_t next = place.rows + RowsOf(peer, place.t);
      if (row < next) break;
      place.rows = next;
    }
    return place;
  }
  JFLUX_HD int64_t RowsBefore(int peer, int32_t t) const {
    const int32_t entry = t / step;
    int64_t rows = Entry(peer, entry);
    for (int32_t s = entry * step; s < t; ++s) rows += RowsOf(peer, s);
    return rows;
  }

  // scratch: a word for each thread.
  JFLUX_HD void Fill(uint32_t* scratch) const {
    const int32_t each = CeilDiv(p.Slices(), Block::size());
    const int32_t first = Min(p.Slices(), Block::rank() * each);
    const int32_t end = Min(p.Slices(), first + each);
    uint32_t rows = 0;
    for (int32_t i = first; i < end; ++i) rows += static_cast<uint32_t>(sizes[i]);
    rows = SumBefore(scratch, rows);
    int32_t peer = first / p.PerRank(), t = first % p.PerRank();
    for (int32_t i = first; i < end; ++i) {
      if (t % step == 0) before[peer * entries + t / step] = rows;
      rows += static_cast<uint32_t>(sizes[i]);
      if (++t == p.PerRank()) {
        t = 0;
        ++peer;
      }
    }
    if (Block::rank() == Block::size() - 1) before[p.world * entries] = rows;
  }

 private:
  // Rows of a rank before its entry number `entry`.
  JFLUX_HD int64_t Entry(int peer, int32_t entry) const {
    const uint32_t* of_peer = before + peer * entries;
    return of_peer[entry] - of_peer[0];
  }
  // The sum of `mine` over the threads before this one.
  static JFLUX_HD uint32_t SumBefore(uint32_t* scratch, uint32_t mine) {
    const int rank = Block::rank();
    scratch[rank] = mine;
    Block::sync();
    for (int distance = 1; distance < Block::size(); distance *= 2) {
      const uint32_t more = rank >= distance ? scratch[rank - distance] : 0;
      Block::sync();
      scratch[rank] += more;
      Block::sync();
    }
    return scratch[rank] - mine;
  }
};

struct RaggedTables {
  using Block = shmem::Block;
  const RaggedParams& p;
  const RaggedArrays& arrays;
  uint32_t* memory;  // null: few slices
  int32_t step, entries;

  // memory: p.TableWords(Block::size()) words. Null, known when a kernel is compiled, leaves out
  // the code for tables.
  static JFLUX_HD RaggedTables In(uint32_t* memory, const RaggedParams& p,
                                  const RaggedArrays& arrays) {
    if (memory == nullptr || !p.HasTables()) return {p, arrays, nullptr, 0, 0};
    return {p, arrays, memory, p.TableStep(), p.TableEntries()};
  }

  JFLUX_HD bool Exist() const { return memory != nullptr; }
  JFLUX_HD SizeTable Sends() const { return Table(arrays.send_sizes, 0); }
  JFLUX_HD SizeTable Receives() const { return Table(arrays.recv_sizes, 1); }

  // Called first, by all threads of the CTA.
  JFLUX_HD void Fill() const {
    if (!Exist()) return;
    Sends().Fill(Scratch());
    Block::sync();
    Receives().Fill(Scratch());
    Block::sync();
  }

  // The same as RaggedSlices::FirstBad(), on all threads of the CTA.
  JFLUX_HD BadValue FirstBad() const {
    const RaggedSlices slices{p, arrays};
    if (!Exist()) return slices.FirstBad();
    const int32_t none = p.Slices();
    int32_t first = none;
    for (int32_t i = Block::rank(); i < none && first == none; i += Block::size()) {
      if (BadAt(i).Found()) first = i;
    }
    if (Block::all(first == none)) return BadValue{};
    uint32_t* scratch = Scratch();
    scratch[Block::rank()] = static_cast<uint32_t>(first);
    Block::sync();
    for (int i = 0; i < Block::size(); ++i) first = Min(first, static_cast<int32_t>(scratch[i]));
    return BadAt(first);
  }

 private:
  JFLUX_HD SizeTable Table(const int32_t* sizes, int number) const {
    return {p, sizes, Exist() ? memory + number * Words() : nullptr, step, entries};
  }
  JFLUX_HD int32_t Words() const { return p.world * entries + 1; }
  JFLUX_HD uint32_t* Scratch() const { return memory + 2 * Words(); }
  // If no value before is bad.
  JFLUX_HD BadValue BadAt(int32_t i) const {
    const int32_t to = i / p.PerRank();
    const int64_t left = p.ImageRows() - Sends().RowsBefore(to, i % p.PerRank());
    return RaggedSlices{p, arrays}.BadAt(i, left);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_TABLE_H_
