// flash_decode: attention of a few tokens a sequence to ranges of positions of a cache, on one
// device (https://pytorch.org/blog/flash-decoding). What a rank does before the ranks' results are
// merged.
//
//   q           [B, T, H, D], of T consecutive tokens
//   k, v        [B, S, G, D], or in pages [pages, page size, G, D]; head h of q attends to head
//               h / (H / G). Of q's type, or of e4m3 with scales
//   scales      f32, of k and of v: one for each row of D elements, or [G]
//   slopes      f32 [H], or none: token i's score of position t has slopes[h] (t - (own + i - 1))
//               added to it, after the softcap (ALiBi, arXiv 2108.12409)
//   bounds      i32 [B, 4], first, end, origin and own, in positions of the whole sequence: token i
//               attends to those from first + i (or 0) to before own + i, and to none if there are
//               fewer than own + i. The rank's part begins at `origin`, a multiple of S. `end` is
//               the length: one that is not from 0 to `capacity` is a fault, and the sequence's
//               result NaN; nothing of the cache is read for it
//   block_table i32 [B, P]: the page of a sequence's positions p page_size and on. -1: none, and
//               nothing attends to them. Any other number that is no page counts as -1, and is a
//               fault if one of the positions is attended to. S is P page_size
//   out         f32 [B, T, H, D + 1]: the weighted mean of v, and after it the log-sum-exp of the
//               scores. Without a position: zeros, and minus infinity
//   parts       f32 [splits, B, T, H, D + 1], if splits > 1: scratch
//
// On CPUs it is plain lax, and the handler is a check of the lengths before it: bounds -> bounds,
// or the fault as the call's error. Python: jflux/_ops/attention/_flash_decode_primitive.py.
#ifndef JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_
#define JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/platform.h"
#include "core/signal.h"
#include "gpu/device_state.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kFlashDecodeId{37};
inline constexpr OpFormats kFlashDecodeFormats{kHalves};

enum class CacheScales : int32_t { kNone, kOfRows, kOfHeads };

struct DecodeBounds {
  int32_t first, end, origin, own;

  JFLUX_HD bool HasLength(int64_t capacity) const { return 0 <= end && end <= capacity; }
  JFLUX_HD int32_t Rank(int64_t positions) const {
    return static_cast<int32_t>(origin / positions);
  }
};

struct FlashDecodeParams {
  int64_t batch, tokens, heads, groups, width;  // B, T, H, G, D
  int64_t positions;                            // S
  int64_t capacity;                             // positions of all ranks
  int64_t page_size, pages;                     // 0: the cache is whole
  int64_t splits;  // parts of a sequence's range that are attended to apart
  double scale;    // of the scores
  double softcap;  // 0: none
  DType dtype;     // of q, and of a cache without scales
  CacheScales scales = CacheScales::kNone;
  bool portable = false;  // of latent_decode: by the kernel for GPUs other than Hopper
};

struct FlashDecodeArrays {
  const void *q, *k, *v;
  const DecodeBounds* bounds;
  const int32_t* block_table;  // null if the cache is whole
  float *out, *parts;          // parts: null for one split
  const float *k_scale = nullptr, *v_scale = nullptr;
  const float* slopes = nullptr;  // null: none
};

// Enqueues the call on `stream`, on the current device: false and *error if it cannot. `state` is
// the device's, for its fault record; null without a heap.
bool LaunchFlashDecode(const FlashDecodeParams& params, const FlashDecodeArrays& arrays,
                       DeviceState* state, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadFlashDecodeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_H_
