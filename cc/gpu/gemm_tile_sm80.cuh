// A tile of the portable GEMM (gpu/gemm_sm80.cuh): its shared memory, copies of k-blocks into it,
// and the products of a k-block by mma.sync.
//
// A k-block is kRowBytes of a row of A, and of a row or of kTileK rows of B. Rows in shared memory
// are vectors of 16 bytes in an order of their own, so that no bank is met twice:
//
//   A, and B stored [n, k]    two rows in 128 bytes: vector v of row r is at v ^ (r / 2 % 4)
//   B stored [k, n]           of 16 bits: v ^ (r % 8). Of 32 bits: v ^ (2 * (r % 4))
//
// Four warps have 64 x 64 of the tile each. Fragments of the next step are loaded while the tensor
// cores multiply those of this one.
#ifndef JFLUX_GPU_GEMM_TILE_SM80_CUH_
#define JFLUX_GPU_GEMM_TILE_SM80_CUH_

#include <cstdint>
#include <type_traits>

#include "core/format.h"
#include "core/platform.h"
#include "gpu/gemm_config.h"
#include "gpu/ptx.cuh"

namespace jflux {

template <typename T_, bool kTransposeRhs_>
struct GemmConfig80 {
  using T = T_;
  // The type in which 16-bit results are written.
  using Result = T;
  static constexpr bool kTransposeRhs = kTransposeRhs_;  // w is stored [n, k]
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
struct Rhs80 {
  const void* w;
  const void* second;
  int64_t n0, n;

  // The weight of column `c` of the tile, and its column there. Columns past the last repeat it.
  __device__ const char* WeightOf(int c) const {
    return static_cast<const char*>(second != nullptr && c / 32 % 2 == 1 ? second : w);
  }
  __device__ int64_t ColumnOf(int c) const {
    return n0 + (second == nullptr ? c : c / 64 * 32 + c % 32);
  }
};

// A thread's copies of a tile's k-blocks, of one term, in turn.
template <typename Config>
class KBlockCopies {
 public:
  // `k_bytes`: of a row of A. What is copied past its end is zeros, of A and of B.
  __device__ void Begin(const RowsToCopy<Config>& rows, const Rhs80& rhs, int k_bytes) {
    k_bytes_ = k_bytes;
    at_ = Vector() * kVectorBytes;
    skip_ = rows.skip;
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) a_[i] = rows.row[i] + at_;
    if constexpr (Config::kTransposeRhs) {
#pragma unroll
      for (int i = 0; i < kRowsOfB; ++i) {
        const int c = Rows::RowOf(i);
        b_[i] = rhs.WeightOf(c) + Min(rhs.ColumnOf(c), rhs.n - 1) * k_bytes + at_;
      }
    } else {
      const int c = VectorOfB() * (kVectorBytes / kSize);
      b_[0] = rhs.WeightOf(c) +
              (FirstRowOfB() * rhs.n + Min(rhs.ColumnOf(c), rhs.n - kVectorBytes / kSize)) * kSize;
      stride_ = rhs.n * kSize * kApartOfB;
    }
    block_ = 0;
  }
  __device__ bool IsDone() const { return block_ * Config::kRowBytes >= k_bytes_; }

  // The next k-block, to a stage: A's vectors and then B's.
  __device__ __forceinline__ void Next(uint32_t stage) {
    const int bytes = at_ < k_bytes_ ? kVectorBytes : 0;
    const uint32_t to =
        stage + Rows::RowOf(0) * Config::kRowBytes + ((Vector() ^ (Rows::RowOf(0) >> 1 & 3)) << 4);
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) {
      ptx::CopyAsync16(to + i * Rows::kApart * Config::kRowBytes, a_[i], bytes);
      a_[i] += Config::kRowBytes + (block_ % 2 == 1 ? skip_ : 0);
    }
    if constexpr (Config::kTransposeRhs) {
#pragma unroll
      for (int i = 0; i < kRowsOfB; ++i) {
        ptx::CopyAsync16(to + Config::kABytes + i * Rows::kApart * Config::kRowBytes, b_[i], bytes);
        b_[i] += Config::kRowBytes;
      }
    } else {
      const int left = k_bytes_ / kSize - block_ * Config::kTileK;
      const int r0 = FirstRowOfB();
      const uint32_t to_b = stage + Config::kABytes + r0 * kBytesOfB +
                            ((VectorOfB() ^ (kSize == 2 ? r0 % 8 : r0 % 4 * 2)) << 4);
#pragma unroll
      for (int i = 0; i < kRowsOfB; ++i) {
        const bool reads = r0 + i * kApartOfB < left;
        ptx::CopyAsync16(to_b + i * kApartOfB * kBytesOfB, reads ? b_[0] : a_[0],
                         reads ? kVectorBytes : 0);
        b_[0] += stride_;
      }
    }
    at_ += Config::kRowBytes;
    ++block_;
  }

 private:
  using Rows = RowsToCopy<Config>;
  static constexpr int kSize = sizeof(typename Config::T);
  // Of B stored [k, n]: bytes of a row in shared memory, and rows that a thread copies.
  static constexpr int kBytesOfB = Config::kTileN * kSize;
  static constexpr int kVectorsOfB = kBytesOfB / kVectorBytes;
  static constexpr int kApartOfB = Config::kThreads / kVectorsOfB;
  static constexpr int kRowsOfB =
      Config::kTransposeRhs ? Config::kTileN / Rows::kApart : Config::kTileK / kApartOfB;
  // The swizzle is the same for all rows that a thread copies.
  static_assert(Rows::kApart % 8 == 0 && (kSize == 2 ? kApartOfB % 8 == 0 : kApartOfB % 4 == 0));

  static __device__ int Vector() { return static_cast<int>(threadIdx.x) % Rows::kVectors; }
  static __device__ int VectorOfB() { return static_cast<int>(threadIdx.x) % kVectorsOfB; }
  static __device__ int FirstRowOfB() { return static_cast<int>(threadIdx.x) / kVectorsOfB; }

  const char* a_[Rows::kRows];
  const char* b_[Config::kTransposeRhs ? kRowsOfB : 1];
  int64_t stride_;
  int32_t skip_, k_bytes_, at_, block_;
};

// ---- Products ----------------------------------------------------------------------------------

// Where a thread reads fragments of a stage, for the first step of a k-block. For the second it is
// that with kNextStep flipped, or, of B stored [k, n], kTileK / 2 rows on.
template <typename Config>
struct FragmentPlaces {
  static constexpr int kSize = sizeof(typename Config::T);
  static constexpr uint32_t kNextStep = kMultiplyBytes;
  uint32_t a, b;

  __device__ FragmentPlaces() {
    const WarpPlace<Config> place;
    const int lane = threadIdx.x % 32;
    const int r = place.row + lane % 16;
    a = r * Config::kRowBytes + ((lane / 16 ^ (r >> 1 & 3)) << 4);
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
    const uint32_t at_a = stage + (places.a ^ kStep * Places::kNextStep);
#pragma unroll
    for (int i = 0; i < Config::kM16Blocks; ++i) {
      ptx::LoadMatrix4(a[i], at_a + 16 * i * Config::kRowBytes);
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
        ptx::Multiply16x8<T>(sums[i][jj], a[i], b[jj][0], b[jj][1]);
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_TILE_SM80_CUH_
