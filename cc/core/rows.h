// Rows of an array that is sharded over ranks along an inner dimension.
//
// The array is [outer, world, inner, columns]. Rank r owns the shard [:, r], which is [outer,
// inner, columns] and contiguous in the rank's memory. Kernels number the rows rank by rank
// ("virtual rows"):
//
//   virtual row v = (rank, o, i)      v = (rank * outer + o) * inner + i
//   actual row  a = (o, rank, i)      a = (o * world + rank) * inner + i
//
// With outer == 1, the default, both are the same.
#ifndef JFLUX_CORE_ROWS_H_
#define JFLUX_CORE_ROWS_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

struct Rows {
  int32_t world;
  int64_t outer;
  int64_t inner;

  JFLUX_HD int64_t PerRank() const { return outer * inner; }
  JFLUX_HD int64_t Total() const { return world * outer * inner; }
  JFLUX_HD int OwnerOf(int64_t v) const { return static_cast<int>(Quotient(v, PerRank())); }
  JFLUX_HD int64_t Actual(int64_t v) const {
    if (outer == 1) return v;
    const int64_t i = Remainder(v, inner);
    const int64_t o = Remainder(Quotient(v, inner), outer);
    return (o * world + OwnerOf(v)) * inner + i;
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_ROWS_H_
