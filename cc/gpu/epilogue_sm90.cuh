// Epilogue building blocks: from a consumer's accumulators (layout: gpu/wgmma.cuh) to rows of a
// global array.
#ifndef JFLUX_GPU_EPILOGUE_SM90_CUH_
#define JFLUX_GPU_EPILOGUE_SM90_CUH_

#include <cstdint>

#include "core/activation.h"
#include "core/platform.h"
#include "gpu/ptx.cuh"
#include "gpu/staging.cuh"
#include "gpu/types.cuh"

namespace jflux {

// The layout of a staged m64 block. TMA stores take boxes of 64 columns (32 if tiles are not a
// multiple of 64), whose 16-byte vectors are swizzled by the row.
template <int kTileN>
struct Staged {
  static constexpr int kColumns = kTileN % 64 == 0 ? 64 : 32;
  static constexpr int kBoxBytes = 64 * kColumns * 2;
  static __device__ __forceinline__ uint32_t Box(const StagedM64& staged, int box) {
    constexpr int kBoxes = 64 / kColumns;  // per strip
    return staged.Strip(box / kBoxes) + box % kBoxes * kBoxBytes;
  }
  static __device__ __forceinline__ uint32_t At(const StagedM64& staged, int row, int vector) {
    constexpr int kVectors = kColumns / 8;
    const int swizzle = kColumns == 64 ? row & 7 : row >> 1 & 3;
    return Box(staged, vector / kVectors) + row * kColumns * 2 +
           ((vector % kVectors ^ swizzle) * 16);
  }
};

// Stages kColumns columns of an m64 block, from column kFirst on, in the layout of Staged.
template <typename T, int kColumns, int kFirst = 0, int kCount>
__device__ __forceinline__ void StageM64(const float (&acc)[kCount], const StagedM64& staged) {
  static_assert(kFirst + kColumns <= 2 * kCount);
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kColumns / 16; ++pair) {
    const float* a = &acc[kFirst / 2 + 8 * pair];  // columns 16 pair .. 16 pair + 15
    ptx::StoreMatrix4(Staged<kColumns>::At(staged, row, 2 * pair + lane / 16), Pack<T>(a[0], a[1]),
                      Pack<T>(a[2], a[3]), Pack<T>(a[4], a[5]), Pack<T>(a[6], a[7]));
  }
}

// One thread stores a staged m64 block to y at (row, n0). TMA drops what lies outside y.
template <int kTileN>
__device__ __forceinline__ void StoreStagedM64(const StagedM64& staged, const CUtensorMap* y,
                                               int64_t row, int64_t n0, int64_t n) {
  using S = Staged<kTileN>;
#pragma unroll
  for (int box = 0; box < kTileN / S::kColumns; ++box) {
    if (n0 + box * S::kColumns < n) {
      ptx::TmaStore2d(y, S::Box(staged, box), static_cast<int32_t>(n0 + box * S::kColumns),
                      static_cast<int32_t>(row));
    }
  }
}

// Stores a staged m64 block row by row, for rows that are not consecutive in y. Called by the whole
// consumer. row_of(r) is the element index in y of row r (0..63), or -1 to skip it.
template <typename T, int kTileN, typename RowOf>
__device__ __forceinline__ void ScatterStagedRows(const StagedM64& staged, int barrier, void* y,
                                                  int64_t n0, int64_t n, RowOf&& row_of) {
  constexpr int kVectors = kTileN / 8;
  const int thread = threadIdx.x % 128;
  ptx::BarrierSync(barrier, 128);  // all rows are staged
  for (int i = thread; i < 64 * kVectors; i += 128) {
    const int r = i / kVectors, vector = i % kVectors;
    const int64_t col = n0 + vector * 8, at = row_of(r);
    if (at >= 0 && col < n) {
      ptx::StoreGlobal16(static_cast<T*>(y) + at + col,
                         ptx::LoadShared16(Staged<kTileN>::At(staged, r, vector)));
    }
  }
  ptx::BarrierSync(barrier, 128);  // all rows have been read
  ptx::FenceProxyAsyncShared();    // bulk copies may read later results there
}

// Stores kColumns columns of an m64 block, from column kFirst on, in float32, straight from the
// registers: four lanes write one 32-byte sector.
template <int kColumns, int kFirst = 0, int kCount, typename RowOf>
__device__ __forceinline__ void StoreM64F32(const float (&acc)[kCount], void* y, int64_t n0,
                                            int64_t n, RowOf&& row_of) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row_of(16 * warp + 8 * half + lane / 4);
    if (row < 0) continue;
    auto* out = static_cast<float*>(y) + row;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int64_t col = n0 + 8 * j + 2 * (lane % 4);
      if (col < n) {
        const float* a = &acc[kFirst / 2 + 4 * j + 2 * half];
        *reinterpret_cast<float2*>(out + col) = make_float2(a[0], a[1]);
      }
    }
  }
}

// Multiplies a thread's two rows of kColumns columns of kBlocks m64 blocks, from kFirst on, by
// low[i] and high[i], of block i, and the columns, which are y's from n0 on, by columns[n]. Of
// blocks that are scaled one after the other the compiler may keep the scales of all columns in
// registers, and spill others.
template <int kColumns, int kFirst = 0, int kBlocks, int kCount>
__device__ __forceinline__ void ScaleM64s(float (*acc)[kCount], const float (&low)[kBlocks],
                                          const float (&high)[kBlocks], const float* columns,
                                          int64_t n0, int64_t n) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int64_t col = n0 + 8 * j + 2 * (threadIdx.x % 4);
    // n is a multiple of 8.
    const float2 c =
        col < n ? *reinterpret_cast<const float2*>(columns + col) : make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      float* a = &acc[i][kFirst / 2 + 4 * j];
      a[0] = a[0] * low[i] * c.x;
      a[1] = a[1] * low[i] * c.y;
      a[2] = a[2] * high[i] * c.x;
      a[3] = a[3] * high[i] * c.y;
    }
  }
}

// The same; row r of block i is multiplied by rows[row_of(i, r)]. Rows with row_of(i, r) < 0 become
// zero.
template <int kColumns, int kBlocks = 1, int kFirst = 0, int kCount, typename RowOf>
__device__ __forceinline__ void ScaleM64s(float (*acc)[kCount], const float* rows,
                                          const float* columns, int64_t n0, int64_t n,
                                          RowOf&& row_of) {
  const int thread = threadIdx.x % 128, row = 16 * (thread / 32) + thread % 32 / 4;
  float low[kBlocks], high[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int64_t of_low = row_of(i, row), of_high = row_of(i, row + 8);
    low[i] = of_low < 0 ? 0.0f : __ldg(rows + of_low);
    high[i] = of_high < 0 ? 0.0f : __ldg(rows + of_high);
  }
  ScaleM64s<kColumns, kFirst>(acc, low, high, columns, n0, n);
}

// Adds a bias [n] to kColumns columns of an m64 block, from kFirst on; these are y's columns from
// n0 on.
template <int kColumns, int kFirst = 0, int kCount>
__device__ __forceinline__ void AddBias(float (&acc)[kCount], const float* bias, int64_t n0,
                                        int64_t n) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int64_t col = n0 + 8 * j + 2 * (threadIdx.x % 4);
    // n is a multiple of 8.
    const float2 b =
        col < n ? *reinterpret_cast<const float2*>(bias + col) : make_float2(0.0f, 0.0f);
    float* a = &acc[kFirst / 2 + 4 * j];
    a[0] += b.x;
    a[1] += b.y;
    a[2] += b.x;
    a[3] += b.y;
  }
}

__device__ __forceinline__ float2 LoadPair(const float* p) {
  const uint2 v = ptx::LoadGlobal8(p);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
template <typename T>
__device__ __forceinline__ float2 LoadPair(const T* p) {
  return Unpack<T>(ptx::LoadGlobal4(p));
}

// Adds kColumns columns, from n0 on, of the rows of an array of `E`. row_of is that of StoreM64F32.
// Elements outside the array get arbitrary values; the store skips them.
template <typename E, int kColumns, int kCount, typename RowOf>
__device__ __forceinline__ void AddRows(float (&acc)[kCount], const void* rows, int64_t n0,
                                        int64_t n, RowOf&& row_of) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const auto* array = static_cast<const E*>(rows);
  const int64_t first = n0 + 2 * (lane % 4);
  const E* from[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    from[half] = array + Max<int64_t>(row_of(16 * warp + 8 * half + lane / 4), 0);
  }
  constexpr int kGroup = 4;  // of 8 columns; loads of a group are in flight together
  static_assert(kColumns % (8 * kGroup) == 0);
#pragma unroll
  for (int j0 = 0; j0 < kColumns / 8; j0 += kGroup) {
    float2 v[kGroup][2];
#pragma unroll
    for (int i = 0; i < 2 * kGroup; ++i) {
      const int64_t col = first + 8 * (j0 + i / 2);
      v[i / 2][i % 2] = LoadPair(from[i % 2] + (col < n ? col : 0));
    }
#pragma unroll
    for (int i = 0; i < 2 * kGroup; ++i) {
      float* a = &acc[4 * (j0 + i / 2) + 2 * (i % 2)];
      a[0] += v[i / 2][i % 2].x;
      a[1] += v[i / 2][i % 2].y;
    }
  }
}

// The activations of jflux/_ops/_epilogue.py.
__device__ __forceinline__ float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
// (1 + erf would cancel where x is far below 0.)
__device__ __forceinline__ float Gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }
// x / 2 (1 + tanh(u)) = x sigmoid(2 u)
__device__ __forceinline__ float GeluTanh(float x) {
  const float u = 0.79788456f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

// Applies the activation to kColumns columns of an m64 block, from kFirst on.
template <int kColumns, int kFirst = 0, int kCount>
__device__ __forceinline__ void Activate(float (&acc)[kCount], Activation activation) {
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int i = kFirst / 2; i < (kFirst + kColumns) / 2; ++i) acc[i] = f(acc[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kGelu:
      return each([](float x) { return Gelu(x); });
    case Activation::kGeluTanh:
      return each([](float x) { return GeluTanh(x); });
    case Activation::kRelu:
      return each([](float x) { return x < 0.0f ? 0.0f : x; });  // NaN stays
    case Activation::kSilu:
      return each([](float x) { return Silu(x); });
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_EPILOGUE_SM90_CUH_
