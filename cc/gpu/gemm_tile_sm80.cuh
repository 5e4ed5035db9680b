// A tile of the portable GEMM (gpu/gemm_sm80.cuh): its shared memory, copies of k-blocks into it,
// and the products of a k-block by mma.sync.
//
// A k-block is kRowBytes of a row of A, and of a row or of kTileK rows of B. Rows in shared memory
// are vectors of 16 bytes in an order of their own, so that no bank is met twice:
//
//   A, and B stored [n, k]      two rows in 128 bytes: vector v of row r is at v ^ (r / 2 % 4)
//   B stored [k, n], A [k, m]   of 16 bits: v ^ (r % 8). Of 32 bits: v ^ (2 * (r % 4))
//
// Four warps have 64 x 64 of the tile each. Fragments of the next step are loaded while the tensor
// cores multiply those of this one.
#ifndef JFLUX_GPU_GEMM_TILE_SM80_CUH_
#define JFLUX_GPU_GEMM_TILE_SM80_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "core/format.h"
#include "core/platform.h"
#include "gpu/gemm_config.h"
#include "gpu/multiply_8_bits.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// kTransposeRhs: w is stored [n, k]. kTransposeLhs: x is stored [k, m].
template <typename T_, bool kTransposeRhs_, bool kTransposeLhs_ = false>
struct GemmConfig80 {
  using T = T_;
  // Of 8 bits, and so with operands whose k is contiguous, results of three types, and scales.
  static constexpr bool kNarrow = sizeof(T) == 1;
  static_assert(!kNarrow || (kTransposeRhs_ && !kTransposeLhs_));
  // The type in which 16-bit results are written, unless it is float16.
  using Result = std::conditional_t<kNarrow, __nv_bfloat16, T>;
  static constexpr bool kTransposeRhs = kTransposeRhs_, kTransposeLhs = kTransposeLhs_;
  static constexpr int kTileM = kGemmTileM, kTileN = 128;
  static constexpr int kRowBytes = kBlockBytes / 2;
  static constexpr int kTileK = kRowBytes / sizeof(T);
  static constexpr int kThreads = 128, kCtasPerSm = 2;
  // Two CTAs fit into the 100 KiB of an SM of compute capability 8.6 and 8.9.
  static constexpr int kStages = 3;
  static constexpr int kABytes = kTileM * kRowBytes, kBBytes = kTileN * kRowBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kSmemBytes = kStages * kStageBytes;
  // Of a warp: blocks of 16 rows, and of 8 columns.
  static constexpr int kWarpM = 64, kWarpN = 64;
  static constexpr int kM16Blocks = kWarpM / 16, kN8Blocks = kWarpN / 8;
  // Shared memory in which a warp brings its results in order.
  static constexpr int kStagingBytes = kSmemBytes / 4;
};

// A thread's sums: of rows lane / 4 and lane / 4 + 8 of each block of 16, and of columns
// 2 * (lane % 4) and the next one of each block of 8.
template <typename Config>
using Sums80 = float[Config::kM16Blocks][Config::kN8Blocks][4];

// Where a warp's part of the tile begins.
template <typename Config>
struct WarpPlace {
  int row, column;
  __device__ WarpPlace()
      : row(static_cast<int>(threadIdx.x) / 32 % 2 * Config::kWarpM),
        column(static_cast<int>(threadIdx.x) / 64 * Config::kWarpN) {}
};

// ---- Copies ------------------------------------------------------------------------------------

// The rows of A that this thread copies a vector of: kRows of them, kApart rows apart. `row[i]` is
// where row RowOf(i) of the tile begins. A tile's rows past the last repeat another: nobody stores
// what they are multiplied by. From one k-block to the next kRowBytes follow, and from every second
// one `skip` bytes more: rows of a workspace lie in k-panels (core/k_panel_layout.h).
template <typename Config>
struct RowsToCopy {
  static constexpr int kVectors = Config::kRowBytes / kVectorBytes;  // of a row
  static constexpr int kApart = Config::kThreads / kVectors;
  static constexpr int kRows = Config::kTileM / kApart;
  const char* row[kRows];
  int32_t skip;

  static __device__ int RowOf(int i) {
    return static_cast<int>(threadIdx.x) / kVectors + i * kApart;
  }
};

// The columns of a tile: kTileN from n0 on, of `w` with `n` columns. `second` has half of them if
// it is not null: in every 64 columns of the tile the first 32 are w's and the others the second's.
// `row_bytes`: from one column to the next of a w stored [n, k], if not those of the term's k.
struct Rhs80 {
  const void* w;
  const void* second;
  int64_t n0, n;
  int64_t row_bytes = 0;

  // The weight of column `c` of the tile, and its column there. Columns past the last repeat it.
  __device__ const char* WeightOf(int c) const {
    return static_cast<const char*>(second != nullptr && c / 32 % 2 == 1 ? second : w);
  }
  __device__ int64_t ColumnOf(int c) const {
    return n0 + (second == nullptr ? c : c / 64 * 32 + c % 32);
  }
};

// A thread's copies of an operand whose k is contiguous: kRows vectors of a k-block, kApart rows
// apart.
template <typename Config>
struct CopiesOfRows {
  using Rows = RowsToCopy<Config>;
  const char* from[Rows::kRows];

  static __device__ int Vector() { return static_cast<int>(threadIdx.x) % Rows::kVectors; }
  // `more`: bytes that are left out after this k-block. `bytes`: 0 past the end of k.
  __device__ __forceinline__ void Next(uint32_t operand, int bytes, int64_t more) {
    const int r = Rows::RowOf(0);
    const uint32_t to = operand + r * Config::kRowBytes + ((Vector() ^ (r >> 1 & 3)) << 4);
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) {
      ptx::CopyAsync16(to + i * Rows::kApart * Config::kRowBytes, from[i], bytes);
      from[i] += Config::kRowBytes + more;
    }
  }
};

// The same of an operand whose columns are contiguous.
template <typename Config>
struct CopiesOfColumns {
  static constexpr int kSize = sizeof(typename Config::T), kPerVector = kVectorBytes / kSize;
  static constexpr int kBytes = Config::kTileN * kSize;  // of a row in shared memory
  static constexpr int kVectors = kBytes / kVectorBytes, kApart = Config::kThreads / kVectors;
  static constexpr int kRows = Config::kTileK / kApart;
  static_assert(Config::kTileM == Config::kTileN);
  // The swizzle is the same for all rows that a thread copies.
  static_assert(kSize == 2 ? kApart % 8 == 0 : kApart % 4 == 0);
  const char* from;
  int64_t stride;  // of kApart rows

  static __device__ int Vector() { return static_cast<int>(threadIdx.x) % kVectors; }
  static __device__ int First() { return static_cast<int>(threadIdx.x) / kVectors; }
  __device__ void Begin(const Rhs80& rhs) {
    const int c = Vector() * kPerVector;
    from = rhs.WeightOf(c) + (First() * rhs.n + Min(rhs.ColumnOf(c), rhs.n - kPerVector)) * kSize;
    stride = rhs.n * kSize * kApart;
  }
  // `left`: rows of k from this k-block on. `any`: an address that may be read.
  __device__ __forceinline__ void Next(uint32_t operand, int left, const void* any) {
    const int r = First();
    const uint32_t to = operand + r * kBytes + ((Vector() ^ (kSize == 2 ? r % 8 : r % 4 * 2)) << 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool reads = r + i * kApart < left;
      ptx::CopyAsync16(to + i * kApart * kBytes, reads ? from : any, reads ? kVectorBytes : 0);
      from += stride;
    }
  }
};

// A thread's copies of a tile's k-blocks, of one term, in turn.
template <typename Config>
class KBlockCopies {
 public:
  // A's rows, or, stored [k, m], its columns.
  using Lhs = std::conditional_t<Config::kTransposeLhs, Rhs80, RowsToCopy<Config>>;

  // `k_bytes`: of k elements. What is copied past its end is zeros, of A and of B.
  __device__ void Begin(const Lhs& lhs, const Rhs80& rhs, int k_bytes) {
    k_bytes_ = k_bytes;
    block_ = 0;
    const int at = Rows::Vector() * kVectorBytes;
    any_ = rhs.w;
    if constexpr (Config::kTransposeLhs) {
      a_.Begin(lhs);
    } else {
      skip_ = lhs.skip;
#pragma unroll
      for (int i = 0; i < RowsToCopy<Config>::kRows; ++i) a_.from[i] = lhs.row[i] + at;
    }
    if constexpr (Config::kTransposeRhs) {
      const int64_t row_bytes = rhs.row_bytes != 0 ? rhs.row_bytes : k_bytes;
#pragma unroll
      for (int i = 0; i < RowsToCopy<Config>::kRows; ++i) {
        const int c = RowsToCopy<Config>::RowOf(i);
        b_.from[i] = rhs.WeightOf(c) + Min(rhs.ColumnOf(c), rhs.n - 1) * row_bytes + at;
      }
    } else {
      b_.Begin(rhs);
    }
  }
  __device__ bool IsDone() const { return block_ * Config::kRowBytes >= k_bytes_; }

  // The next k-block, to a stage: A's vectors and then B's.
  __device__ __forceinline__ void Next(uint32_t stage) {
    const int before = block_ * Config::kRowBytes;
    const int bytes = before + Rows::Vector() * kVectorBytes < k_bytes_ ? kVectorBytes : 0;
    const int left = (k_bytes_ - before) / static_cast<int>(sizeof(typename Config::T));
    if constexpr (Config::kTransposeLhs) {
      a_.Next(stage, left, any_);
    } else {
      a_.Next(stage, bytes, block_ % 2 == 1 ? skip_ : 0);
    }
    if constexpr (Config::kTransposeRhs) {
      b_.Next(stage + Config::kABytes, bytes, 0);
    } else {
      b_.Next(stage + Config::kABytes, left, any_);
    }
    ++block_;
  }

 private:
  using Rows = CopiesOfRows<Config>;
  using Columns = CopiesOfColumns<Config>;
  std::conditional_t<Config::kTransposeLhs, Columns, Rows> a_;
  std::conditional_t<Config::kTransposeRhs, Rows, Columns> b_;
  const void* any_;
  int32_t skip_, k_bytes_, block_;
};

// ---- Products ----------------------------------------------------------------------------------

// Sums of int8 are int32, in the registers of floats (gpu/multiply_8_bits.cuh).
template <typename Config>
__device__ __forceinline__ void ToFloats(Sums80<Config>& sums) {
  if constexpr (std::is_same_v<typename Config::T, int8_t>) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (auto& four : row) {
#pragma unroll
        for (float& sum : four) sum = static_cast<float>(__float_as_int(sum));
      }
    }
  }
}

// Where a thread reads fragments of a stage, for the first step of a k-block. For the second it is
// that with kNextStep flipped, or, where columns are contiguous, kTileK / 2 rows on.
template <typename Config>
struct FragmentPlaces {
  static constexpr int kSize = sizeof(typename Config::T);
  static constexpr uint32_t kNextStep = kMultiplyBytes;
  uint32_t a, b;

  __device__ FragmentPlaces() {
    const WarpPlace<Config> place;
    const int lane = threadIdx.x % 32;
    const int r = place.row + lane % 16;
    if constexpr (!Config::kTransposeLhs) {
      a = r * Config::kRowBytes + ((lane / 16 ^ (r >> 1 & 3)) << 4);
    } else if constexpr (kSize == 2) {
      a = (lane / 16 * 8 + lane % 8) * (Config::kTileM * 2) +
          (((place.row / 8 + lane / 8 % 2) ^ lane % 8) << 4);
    } else {
      a = lane % 4 * (Config::kTileM * 4) + place.row * 4 + lane / 4 * 4;
    }
    if constexpr (Config::kTransposeRhs) {
      const int c = place.column + lane / 16 * 8 + lane % 8;
      b = c * Config::kRowBytes + ((lane / 8 % 2 ^ (c >> 1 & 3)) << 4);
    } else if constexpr (kSize == 2) {
      b = lane % 16 * (Config::kTileN * 2) + (((place.column / 8 + lane / 16) ^ lane % 8) << 4);
    } else {
      b = lane % 4 * (Config::kTileN * 4) + place.column * 4 + lane / 4 * 4;
    }
    b += Config::kABytes;
  }
};

// What a warp multiplies in a step: kMultiplyBytes of each of its rows of A and columns of B.
template <typename Config>
struct Fragments80 {
  using T = typename Config::T;
  using Places = FragmentPlaces<Config>;
  uint32_t a[Config::kM16Blocks][4];
  uint32_t b[Config::kN8Blocks][2];

  template <int kStep>
  __device__ __forceinline__ void Load(const Places& places, uint32_t stage) {
    if constexpr (!Config::kTransposeLhs) {
      const uint32_t at_a = stage + (places.a ^ kStep * Places::kNextStep);
#pragma unroll
      for (int i = 0; i < Config::kM16Blocks; ++i) {
        ptx::LoadMatrix4(a[i], at_a + 16 * i * Config::kRowBytes);
      }
    } else if constexpr (sizeof(T) == 2) {
      const uint32_t at_a = stage + places.a + kStep * 16 * Config::kTileM * 2;
#pragma unroll
      for (int i = 0; i < Config::kM16Blocks; ++i) {
        ptx::LoadMatrix4Transposed(a[i], at_a ^ i << 5);
      }
    } else {
      const uint32_t at_a = stage + places.a + kStep * 8 * Config::kTileM * 4;
      const uint32_t swizzle = threadIdx.x % 4 << 5;
#pragma unroll
      for (int i = 0; i < Config::kM16Blocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // rows of 8 first, then rows of k
          a[i][e] = ptx::LoadShared4((at_a + e / 2 * 4 * Config::kTileM * 4) ^
                                     ((2 * i + e % 2) << 5 ^ swizzle));
        }
      }
    }
    if constexpr (Config::kTransposeRhs) {
      const uint32_t at_b = stage + (places.b ^ kStep * Places::kNextStep);
#pragma unroll
      for (int j = 0; j < Config::kN8Blocks; j += 2) {
        uint32_t four[4];
        ptx::LoadMatrix4(four, at_b + 8 * j * Config::kRowBytes);
        b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
      }
    } else if constexpr (sizeof(T) == 2) {
      const uint32_t at_b = stage + places.b + kStep * 16 * Config::kTileN * 2;
#pragma unroll
      for (int j = 0; j < Config::kN8Blocks; j += 2) {
        uint32_t four[4];  // the vectors of a warp's columns differ in their last three bits
        ptx::LoadMatrix4Transposed(four, at_b ^ j << 4);
        b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
      }
    } else {
      // Vector v of row r is at v ^ 2 * (r % 4): eight columns are a pair of vectors.
      const uint32_t at_b = stage + places.b + kStep * 8 * Config::kTileN * 4;
      const uint32_t swizzle = threadIdx.x % 4 << 5;
#pragma unroll
      for (int j = 0; j < Config::kN8Blocks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b[j][half] =
              ptx::LoadShared4((at_b + half * 4 * Config::kTileN * 4) ^ (j << 5 ^ swizzle));
        }
      }
    }
    if constexpr (sizeof(T) == 4) {  // the tensor cores would cut the bits that TF32 has not
#pragma unroll
      for (auto& four : a) {
#pragma unroll
        for (uint32_t& v : four) v = ptx::RoundToTf32(v);
      }
#pragma unroll
      for (auto& two : b) {
#pragma unroll
        for (uint32_t& v : two) v = ptx::RoundToTf32(v);
      }
    }
  }

  __device__ __forceinline__ void Multiply(Sums80<Config>& sums) const {
#pragma unroll
    for (int i = 0; i < Config::kM16Blocks; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kN8Blocks; ++j) {
        // There and back, so that a fragment of B is used twice in a row.
        const int jj = i % 2 == 0 ? j : Config::kN8Blocks - 1 - j;
        if constexpr (Config::kNarrow) {
          ptx::Multiply16x8Of8Bits<T>(sums[i][jj], a[i], b[jj][0], b[jj][1]);
        } else {
          ptx::Multiply16x8<T>(sums[i][jj], a[i], b[jj][0], b[jj][1]);
        }
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_TILE_SM80_CUH_
