// What the portable kernels of attention share (attention.cuh has the rest): copies by cp.async,
// fragments by ldmatrix, products by mma.sync. There are no roles: all warps of a CTA copy a block,
// and each multiplies rows of the item's own block, in slabs of 16.
//
// Tiles [rows][width] lie in shared memory as columns of 64 elements, [width / 64][rows][64]. Rows
// of 64 are 8 vectors of 16 bytes, and vector v of row r is at v ^ r % 8, as wgmma has it. So
// ldmatrix meets no bank twice, and the same tile is an operand of products over its columns
// (scores) and of products over its rows (sums of rows). Tiles begin at multiples of 128 bytes.
#ifndef JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM80_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM80_CUH_

#include <cstdint>

#include "core/numbers.h"
#include "gpu/ptx.cuh"
#include "ops/flash_attention/attention.cuh"

namespace jflux::attention {

// Bytes of 64 elements of a row, and of a slab's in shared memory.
inline constexpr int kRowBytes80 = 128, kSlabBytes80 = 16 * kRowBytes80;

// ---- Blocks -------------------------------------------------------------------------------------

// The blocks of a row of `blocks` with scores, one after the other. All lanes of a warp.
class BlockWalk80 {
 public:
  __device__ BlockWalk80(const int8_t* row, int32_t count)
      : row_(row), count_(count), next_(0), kind_(0), left_(0) {}

  // The next block's kind and number, or kEnd.
  __device__ __forceinline__ BlockKind Next(int32_t* block) {
    while (left_ == 0) {
      if (next_ >= count_) return BlockKind::kEnd;
      const int32_t at = next_ + static_cast<int32_t>(threadIdx.x) % 32;
      kind_ = at < count_ ? row_[at] : 0;
      left_ = __ballot_sync(0xffffffff, kind_ != 0);
      next_ += 32;
    }
    const int i = __ffs(left_) - 1;
    left_ &= left_ - 1;
    *block = next_ - 32 + i;
    return static_cast<BlockKind>(__shfl_sync(0xffffffff, kind_, i));
  }

 private:
  const int8_t* row_;
  int32_t count_, next_;
  int kind_;  // of block next_ - 32 + lane
  uint32_t left_;
};

// ---- Copies -------------------------------------------------------------------------------------

// Rows of a head, of an array [B, rows, heads, D] of 16 bits.
struct HeadRows80 {
  const char* data;  // of row 0
  int64_t row_bytes;
  int32_t rows;

  static __device__ HeadRows80 Of(const void* array, int32_t batch, int32_t rows, int32_t heads,
                                  int32_t head, int32_t width) {
    const int64_t row_bytes = static_cast<int64_t>(heads) * width * 2;
    return HeadRows80{static_cast<const char*>(array) +
                          static_cast<int64_t>(batch) * rows * row_bytes +
                          static_cast<int64_t>(head) * width * 2,
                      row_bytes, rows};
  }
};

// Copies rows `first` and on to a tile, by all threads: zeros past the end of the array, and past
// `width` elements.
template <int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void CopyRows80(uint32_t tile, const HeadRows80& from, int32_t first,
                                           int32_t width) {
  constexpr int kVectors = kWidth / 8, kApart = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0 && kRows % kApart == 0);
  const int vector = static_cast<int>(threadIdx.x) % kVectors;
  const int row0 = static_cast<int>(threadIdx.x) / kVectors;
  const bool is_inside = vector * 8 < width;
  const uint32_t column = tile + vector / 8 * (kRows * kRowBytes80);
  const char* at = from.data + (first + row0) * from.row_bytes + vector * 16;
#pragma unroll
  for (int i = 0; i < kRows / kApart; ++i) {
    const int row = row0 + i * kApart;
    const bool reads = is_inside && first + row < from.rows;
    ptx::CopyAsync16(column + row * kRowBytes80 + ((vector % 8 ^ row % 8) << 4),
                     reads ? at : from.data, reads ? 16 : 0);
    at += kApart * from.row_bytes;
  }
}

// Copies kRows numbers of 4 bytes, by kRows / 4 threads. `thread`: this one's number among them;
// others have another, or a negative one.
template <int kRows>
__device__ __forceinline__ void CopyNumbers80(uint32_t smem, const void* from, int thread) {
  if (0 <= thread && thread < kRows / 4) {
    ptx::CopyAsync16(smem + 16 * thread, static_cast<const char*>(from) + 16 * thread, 16);
  }
}

// Copies positions of kRows rows, then their segments, by the first kRows / 2 threads.
template <int kRows>
__device__ __forceinline__ void CopyPositions80(const Args& args, uint32_t smem,
                                                const int32_t* positions, const int32_t* segments,
                                                int32_t padded, int32_t batch, int32_t first) {
  const int thread = static_cast<int>(threadIdx.x);
  CopyNumbers80<kRows>(smem, positions + NumbersAt(args, batch, padded, first), thread);
  if (segments != nullptr) {
    CopyNumbers80<kRows>(smem + kRows * 4, segments + SegmentsAt(batch, padded, first),
                         thread - kRows / 4);
  }
}

// ---- Products -----------------------------------------------------------------------------------

// Where a lane reads vector 0 or 1 of 16 rows (LoadMatrix4): as an operand A over columns, and,
// transposed, as an operand B over rows.
__device__ __forceinline__ uint32_t LanePlace80() {
  const uint32_t lane = threadIdx.x % 32;
  return lane % 16 * kRowBytes80 + ((lane / 16 ^ lane % 8) << 4);
}
// The same as an operand B over columns.
__device__ __forceinline__ uint32_t LanePlaceOfB80() {
  const uint32_t lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * kRowBytes80 + ((lane / 8 % 2 ^ lane % 8) << 4);
}
// The place of vectors 2 k and 2 k + 1, in a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ uint32_t VectorsAt80(uint32_t place, int k) {
  return (place ^ (k % 4 << 5)) + k / 4 * (kRows * kRowBytes80);
}

// Columns 16 k to 16 k + 15 of 16 rows of a tile of kRows, as an operand A. `rows`: the address of
// the first row.
template <int kRows>
__device__ __forceinline__ void LoadA80(uint32_t (&a)[4], uint32_t rows, int k) {
  ptx::LoadMatrix4(a, VectorsAt80<kRows>(rows + LanePlace80(), k));
}

// d = A @ B^T of slabs: load_a(a, slab, k) gives columns 16 k and on of a slab of A, and `b` is a
// tile. The sum is over columns.
template <typename T, int kWidth, int kSlabs, int kCount, typename LoadA>
__device__ __forceinline__ void MultiplyColumnsOf80(float (&d)[kSlabs][kCount], uint32_t b,
                                                    LoadA&& load_a) {
  constexpr int kRowsB = 2 * kCount;
  const uint32_t place = b + LanePlaceOfB80();
#pragma unroll
  for (auto& slab : d) {
#pragma unroll
    for (float& sum : slab) sum = 0;
  }
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    uint32_t a[kSlabs][4];
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) load_a(a[slab], slab, k);
#pragma unroll
    for (int pair = 0; pair < kRowsB / 16; ++pair) {
      uint32_t four[4];
      ptx::LoadMatrix4(four, VectorsAt80<kRowsB>(place, k) + pair * kSlabBytes80);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        auto* eight = reinterpret_cast<float (*)[4]>(&d[slab][8 * pair]);
        ptx::Multiply16x8<T>(eight[0], a[slab], four[0], four[1]);
        ptx::Multiply16x8<T>(eight[1], a[slab], four[2], four[3]);
      }
    }
  }
}

// The same of rows of a tile of kRowsA. `a`: the address of the warp's first row.
template <typename T, int kWidth, int kRowsA, int kSlabs, int kCount>
__device__ __forceinline__ void MultiplyColumns80(float (&d)[kSlabs][kCount], uint32_t a,
                                                  uint32_t b) {
  MultiplyColumnsOf80<T, kWidth>(d, b, [&](uint32_t (&of_slab)[4], int slab, int k) {
    LoadA80<kRowsA>(of_slab, a + slab * kSlabBytes80, k);
  });
}

// d += A @ B of slabs: A [16, kRows] is packed accumulators (PackA), and `b` a tile of kRows rows.
// The sum is over its rows.
template <typename T, int kSlabs, int kSteps, int kCount>
__device__ __forceinline__ void MultiplyRows80(float (&d)[kSlabs][kCount],
                                               const uint32_t (&a)[kSlabs][kSteps][4], uint32_t b) {
  constexpr int kRows = 16 * kSteps;
  const uint32_t place = b + LanePlace80();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int pair = 0; pair < kCount / 8; ++pair) {
      uint32_t four[4];
      ptx::LoadMatrix4Transposed(four, VectorsAt80<kRows>(place, pair) + k * kSlabBytes80);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        auto* eight = reinterpret_cast<float (*)[4]>(&d[slab][8 * pair]);
        ptx::Multiply16x8<T>(eight[0], a[slab][k], four[0], four[1]);
        ptx::Multiply16x8<T>(eight[1], a[slab][k], four[2], four[3]);
      }
    }
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_ATTENTION_SM80_CUH_
