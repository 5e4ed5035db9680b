// flash_decode: attention of one query a sequence to a range of positions of a cache, on one
// device (https://pytorch.org/blog/flash-decoding). What a rank does before the ranks' results are
// merged.
//
//   q           [B, H, D]
//   k, v        [B, S, G, D], or in pages [pages, page size, G, D]; head h of q attends to head
//               h / (H / G)
//   bounds      i32 [B, 2]: the positions first <= t < end are attended to
//   block_table i32 [B, P]: the page of a sequence's positions p page_size and on; any number that
//               is no page: nothing attends to them. S is P page_size
//   out         f32 [B, H, D + 1]: the weighted mean of v, and after it the log-sum-exp of the
//               scores. Without a position: zeros, and minus infinity
//   parts       f32 [splits, B, H, D + 1], if splits > 1: scratch
//
// On CPUs it is plain lax. Python: jflux/_attention/part.py.
#ifndef JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_
#define JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_

#include <cstdint>

#include "core/dtype.h"

namespace jflux {

inline constexpr OpId kFlashDecodeId{37};

struct FlashDecodeParams {
  int64_t batch, heads, groups, width;  // B, H, G, D
  int64_t positions;                    // S
  int64_t page_size, pages;             // 0: the cache is whole
  int64_t splits;                       // parts of a sequence's range that are attended to apart
  double scale;                         // of the scores
  double softcap;                       // 0: none
  DType dtype;                          // of q and the cache
};

struct FlashDecodeArrays {
  const void *q, *k, *v;
  const int32_t *bounds, *block_table;  // block_table: null if the cache is whole
  float *out, *parts;                   // parts: null for one split
};

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_
