// flash_attention: attention of queries to keys and values, forward and backward, on one device
// (arXiv 2307.08691, 2407.08608). Queries and keys are any parts of a sequence, in any order: which
// pairs have a score is decided from positions and segments.
//
//   q, do        [B, s, H, D]
//   k, v         [B, t, G, D]; head h of q attends to head h / (H / G)
//   positions    i32 [1 or B, s or t, padded]: of queries and of keys
//   segments     i32, likewise; optional
//   blocks       i8 [1 or B, blocks of queries, blocks of keys]: which pairs have scores (a
//                BlockKind each)
//   order        i32 [1 or B times the rows of `blocks`]: these rows, numbered through, those with
//                the most blocks first
//   out          [B, s, H, D], of q's type or f32: the weighted mean of v. Without a key: zeros
//   lse          f32 [B, s, H]: the log-sum-exp of the scores. Without a key: minus infinity
//
// The backward pass, flash_attention_backward, is two kernels, one for dk and dv, one for dq, so
// that each sum has one owner and one order. Both compute the scores again.
//
//   base         f32 [B, H, s padded]: log2(e) times the log-sum-exp over all keys of the sequence,
//                +infinity for queries without any and for padding
//   delta        f32 [B, H, s padded]: rowsum(do o), less the cotangent of the log-sum-exp
//   dq, dk, dv   f32
//
// A pair has a score if low <= key's position - query's position <= low + span and their segments
// are equal. Padding has the position kNowhere.
//
// On CPUs all of this is plain lax. Python: jflux/_ops/attention/flash_attention.py.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_H_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/platform.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kFlashAttentionId{40}, kFlashAttentionBackwardId{41};
inline constexpr OpFormats kFlashAttentionFormats{kHalves, SetOf(DType::kF32)};

// Which results a kernel computes: out, dk and dv, or dq.
enum class AttentionPass : int32_t { kForward, kDkv, kDq };

// Which pairs of a query and a key have a score in a block of queries and a block of keys.
enum class BlockKind : int8_t {
  kNone = 0,  // no pair
  kSome = 1,  // some pairs, or it is not known: the kernel tests each pair
  kAll = 2,   // all pairs
  kEnd = -1,  // inside the kernels: there are no more blocks
};

// kNowhere is the position of padding. Real positions are between 0 and kFurthest, and low and
// low + span between -kFurthest and kFurthest, so padding is too far from every real position to
// have a score.
inline constexpr int32_t kNowhere = INT32_MAX, kFurthest = (1 << 30) - 1;

// Queries and keys of a block.
struct AttentionBlocks {
  int32_t queries, keys;
};

// Positions, segments, base and delta are padded to a multiple of this, so that no block reads past
// them.
inline constexpr int64_t kAttentionPadding = 128;
JFLUX_HD constexpr int64_t Padded(int64_t rows) {
  return (rows + kAttentionPadding - 1) / kAttentionPadding * kAttentionPadding;
}

// The block sizes of the kernels for a width of 64, 128 or 256.
JFLUX_HD constexpr AttentionBlocks BlocksOf(AttentionPass pass, int width) {
  switch (pass) {
    case AttentionPass::kForward:
      return {128, width <= 128 ? 128 : 64};
    case AttentionPass::kDkv:
      return {64, width <= 128 ? 128 : 64};
    case AttentionPass::kDq:
      return {128, 64};
  }
  return {0, 0};
}

// The width of the kernels that take heads of `elements`; 0: none do.
JFLUX_HD constexpr int WidthFor(int64_t elements) {
  if (elements < 1 || elements % 8 != 0) return 0;  // TMA's strides are multiples of 16 bytes
  if (elements <= 64) return 64;
  if (elements <= 128) return 128;
  return elements <= 256 ? 256 : 0;
}

struct FlashAttentionParams {
  int64_t batch, heads, groups, width;  // B, H, G, D
  int64_t queries, keys;                // s, t
  int64_t position_batches;             // 1 or B: of positions
  int64_t block_batches;                // 1 or B: of blocks
  double scale;                         // of the scores, positive
  double softcap;                       // 0: none
  int32_t low;
  uint32_t span;
  bool wide_out;  // out is float32
  bool portable;  // by the kernels that other GPUs than Hopper have too
  DType dtype;    // of q, k, v and do
};

struct FlashAttentionArrays {
  const void *q, *k, *v, *d_out;             // d_out: null in the forward pass
  const float *base, *delta;                 // null in the forward pass
  const int32_t *q_positions, *k_positions;  // padded
  const int32_t *q_segments, *k_segments;    // null: all positions are of one segment
  const int8_t* blocks;                      // of kForward or kDq
  const int8_t* blocks_by_keys;              // of kDkv: [., blocks of keys, blocks of queries]
  const int32_t *order, *order_by_keys;      // of the rows of each
  void* out;
  float *lse, *dq, *dk, *dv;
};

// Enqueue a call on `stream`, on the current device: false and *error if they cannot.
bool LaunchFlashAttention(const FlashAttentionParams& params, const FlashAttentionArrays& arrays,
                          cudaStream_t stream, std::string* error);
bool LaunchFlashAttentionBackward(const FlashAttentionParams& params,
                                  const FlashAttentionArrays& arrays, cudaStream_t stream,
                                  std::string* error);

// The same by portable kernels.
bool LaunchFlashAttention80(const FlashAttentionParams& params, const FlashAttentionArrays& arrays,
                            cudaStream_t stream, std::string* error);
bool LaunchFlashAttentionBackward80(const FlashAttentionParams& params,
                                    const FlashAttentionArrays& arrays, cudaStream_t stream,
                                    std::string* error);

// Loads the kernels of both on the current device; the portable ones alone.
bool LoadFlashAttentionKernels(std::string* error);
bool LoadFlashAttentionKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_H_
