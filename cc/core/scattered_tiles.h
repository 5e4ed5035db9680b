// The order of the tiles of a grouped product whose rows are summed by token, and whose sums go to
// the rank that has the token; and the sums, as work items.
//
// In a group, rows are sorted by token, and each rank's tokens are `parts` segments, as in
// core/gathered_tiles.h. The segments of the next rank come first, then those of the one after it,
// and the own ones last. A class is a segment in this order:
//
//   class c   tiles whose first segment, in this order, is the c-th
//
// A row of segment c is in a tile of class c or of an earlier one. So all rows of segment c are
// there when all tiles of classes up to c have been stored. With 2 ranks, 1 part, and 2 groups of 5
// tile rows, rank 0 computes:
//
//   group            0 0 0 0 0 | 1 1 1 1 1
//   ranks of rows    0 0 * 1 1 | 0 * 1 1 1      *: rows of both
//   class            1 1 0 0 0 | 1 0 0 0 0
//
// Class follows class, and in a class group follows group, each in raster groups.
#ifndef JFLUX_CORE_SCATTERED_TILES_H_
#define JFLUX_CORE_SCATTERED_TILES_H_

#include <cstdint>

#include "gathered_tiles.h"
#include "platform.h"

namespace jflux {

struct ScatteredTiles : SegmentedTiles {
  JFLUX_HD constexpr int32_t Classes() const { return Segments(); }

  // The tile rows of class `c` of a group. before(s): how many rows of the group are of segments
  // before s; before(Segments()): all.
  template <typename Before>
  JFLUX_HD constexpr TileRows RowsOfClass(int32_t c, Before&& before) const {
    const int32_t rows = before(Segments()), all = CeilDiv(rows, tiles.tile_rows);
    if (parts == 0) return TileRows{0, all};
    // The order begins at segment `cut`, with row `split` of the group.
    const int32_t cut = (rank + 1) % world * parts, split = before(cut);
    const int32_t segment = (cut + c) % Segments();
    // Tile rows from this one on have a row that is not before `split`.
    const int32_t straddling = split == rows ? all : split / tiles.tile_rows;
    const bool is_late = segment < cut;  // its rows come before `split`
    const auto from = [&](int32_t row) {
      const int32_t first = CeilDiv(row, tiles.tile_rows);
      return is_late ? Min(first, straddling) : row <= split ? straddling : first;
    };
    const int32_t begin = from(before(segment));
    return TileRows{begin, Max(begin, from(before(segment + 1)))};
  }

  // m64 blocks of these tile rows of a group of `rows` rows, over all columns.
  JFLUX_HD constexpr int32_t BlocksOf(TileRows r, int32_t rows) const {
    if (r.end <= r.begin) return 0;
    const int32_t end = Min(rows, r.end * tiles.tile_rows);
    return CeilDiv(end - r.begin * tiles.tile_rows, 64) * tiles.tiles_n;
  }
};

// The sums of tokens, as work items: up to `item_tokens` tokens of one segment, in the order of
// classes. Each segment has the same number of items, of which the last may have no tokens.
struct SumItems {
  int32_t world, rank;
  int32_t parts;        // SegmentedTiles::parts
  int32_t tokens;       // of each rank
  int32_t item_tokens;  // most tokens of an item

  struct Item {
    int32_t owner;         // the rank that has the tokens
    int32_t first, count;  // among the owner's tokens; count may be 0
    int32_t place;         // among the owner's items: 0 .. OfOwner() - 1
    int32_t cls;           // the tiles of classes up to this one have its rows
  };

  JFLUX_HD constexpr int32_t Parts() const { return Max(parts, 1); }
  JFLUX_HD constexpr int32_t OfPart() const {
    return CeilDiv(CeilDiv(tokens, Parts()), item_tokens);
  }
  JFLUX_HD constexpr int32_t OfOwner() const { return Parts() * OfPart(); }
  JFLUX_HD constexpr int32_t Count() const { return world * OfOwner(); }
  // Own items follow those of all peers, whose owners follow the rank.
  JFLUX_HD constexpr Item At(int32_t i) const {
    const int32_t step = i / OfOwner(), place = i - step * OfOwner();
    const int32_t part = place / OfPart(), in_part = place - part * OfPart();
    const auto first_of = [&](int32_t p) {
      return static_cast<int32_t>(Quotient(int64_t{p} * tokens, Parts()));
    };
    const int32_t end = first_of(part + 1);
    const int32_t first = Min(end, first_of(part) + in_part * item_tokens);
    return Item{(rank + 1 + step) % world, first, Min(item_tokens, end - first), place,
                parts == 0 ? 0 : step * parts + part};
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_SCATTERED_TILES_H_
