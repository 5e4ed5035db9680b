// What portable GEMMs (gpu/gemm_sm80.cuh) do with a tile's sums: rows of results, by way of shared
// memory, and partial tiles in fragment order.
#ifndef JFLUX_GPU_GEMM_EPILOGUE_SM80_CUH_
#define JFLUX_GPU_GEMM_EPILOGUE_SM80_CUH_

#include <cstdint>
#include <type_traits>

#include "core/activation.h"
#include "core/platform.h"
#include "gpu/activation.cuh"
#include "gpu/gemm_tile_sm80.cuh"
#include "gpu/ptx.cuh"
#include "gpu/types.cuh"
#include "gpu/vector.cuh"

namespace jflux {

// Eight neighbouring columns of a row of results, in float32.
struct Columns8 {
  static constexpr int kCount = 8;
  float v[kCount];

  template <typename F>
  __device__ __forceinline__ void Each(F&& f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) f(v[i], i);
  }
  // Adds what `from` has at columns c on, of n. Null: nothing. U: its type. n is a multiple of a
  // vector's elements, and so is c.
  template <typename U>
  __device__ __forceinline__ void Add(const U* from, int64_t c, int64_t n) {
    if (from == nullptr) return;
    constexpr int kPerVector = kVectorBytes / sizeof(U);
#pragma unroll
    for (int i = 0; i < kCount; i += kPerVector) {
      if (c + i >= n) return;
      const auto vector = Vector<U>::Of(__ldg(reinterpret_cast<const uint4*>(from + c + i)));
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) v[i + e] += vector.v[e];
    }
  }
  // The same of a bias, which may begin anywhere.
  __device__ __forceinline__ void AddBias(const float* bias, int64_t c, int64_t n) {
    if (bias == nullptr) return;
    Each([&](float& x, int i) { x += c + i < n ? __ldg(bias + c + i) : 0; });
  }
  // Of operands of 8 bits: times the scale of the row, and those of columns c on. n is a multiple
  // of a vector's elements, and c one of kCount.
  __device__ __forceinline__ void Scale(float row, const float* columns, int64_t c) {
    Each([&](float& x, int i) { x = x * row * __ldg(columns + c + i); });
  }
  __device__ __forceinline__ void Activate(Activation activation) {
    if (activation == Activation::kNone) return;
    WithActivation(activation, [&](auto which) {
      constexpr Activation kWhich = decltype(which)::value;
      Each([](float& x, int) { x = ActivationAt<kWhich>(x).value; });
    });
  }
  // Rounds to columns c on, of n, of a row of type U.
  template <typename U>
  __device__ __forceinline__ void Store(U* row, int64_t c, int64_t n) const {
    constexpr int kPerVector = kVectorBytes / sizeof(U);
#pragma unroll
    for (int i = 0; i < kCount; i += kPerVector) {
      if (c + i >= n) return;
      Vector<U> vector;
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) vector.v[e] = v[i + e];
      ptx::StoreGlobal16(row + c + i, vector.Rounded());
    }
  }
};

// Calls f(U()) for the type U of results.
template <typename Config, typename F>
__device__ __forceinline__ void WithResult(bool is_f32, bool is_f16, F&& f) {
  if constexpr (sizeof(typename Config::T) < 4) {
    if (!is_f32) {
      if constexpr (Config::kNarrow) {
        if (is_f16) return f(__half());
      }
      return f(typename Config::Result());
    }
  }
  f(float());
}

// Multiplies a warp's sums by scales: of the row at scale_of(row of the tile), and of columns n0
// on, of n, of the tile.
template <typename Config, typename ScaleOf>
__device__ __forceinline__ void ScaleSums(Sums80<Config>& sums, const float* columns, int64_t n0,
                                          int64_t n, ScaleOf&& scale_of) {
  const WarpPlace<Config> place;
  const int lane = threadIdx.x % 32;
  const int64_t c0 = n0 + place.column + 2 * (lane % 4);
  float of[Config::kN8Blocks][2];  // nobody stores columns past the last
#pragma unroll
  for (int j = 0; j < 2 * Config::kN8Blocks; ++j) {
    const int64_t c = c0 + j / 2 * 8 + j % 2;
    of[j / 2][j % 2] = c < n ? __ldg(columns + c) : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < 2 * Config::kM16Blocks; ++i) {
    const float row = scale_of(place.row + 8 * i + lane / 4);
#pragma unroll
    for (int j = 0; j < Config::kN8Blocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = sums[i / 2][j][i % 2 * 2 + e];
        sum = sum * row * of[j][e];
      }
    }
  }
}

// A warp's sums of kRows rows, in shared memory. The code that finishes them then is a loop, and
// not one piece for each register.
template <typename Config>
struct StagedRows {
  static constexpr int kRows = 32, kGroups = Config::kWarpN / Columns8::kCount;
  static constexpr int kRowBytes = Config::kWarpN * sizeof(float);
  static_assert(kRows * kRowBytes <= Config::kStagingBytes);
  uint32_t at;
  int first_row, first_column;  // of the tile

  // Of 16 bytes. Lanes that write, or read, together meet no bank twice.
  __device__ uint32_t VectorAt(int row, int vector) const {
    return at + row * kRowBytes + ((vector ^ row % 4 * 2 ^ vector / 8) << 4);
  }
  __device__ __forceinline__ Columns8 Get(int row, int group) const {
    Columns8 columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = Vector<float>::Of(ptx::LoadShared16(VectorAt(row, 2 * group + half)));
#pragma unroll
      for (int e = 0; e < 4; ++e) columns.v[4 * half + e] = four.v[e];
    }
    return columns;
  }
  // Calls f(row of the warp's part, group of columns) for this lane's, among the first kEnd groups.
  template <int kEnd, typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kRows * kEnd; i += 32) f(i / kEnd, i % kEnd);
  }
};

// Writes rows [kFirst, kFirst + kRows) of a warp's sums to its staging.
template <int kFirst, typename Config>
__device__ __forceinline__ void StageRows(const Sums80<Config>& sums,
                                          const StagedRows<Config>& rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < StagedRows<Config>::kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kN8Blocks; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* two = &sums[kFirst / 16 + i][j][2 * half];
        const uint32_t to =
            rows.VectorAt(16 * i + 8 * half + lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8;
        ptx::StoreShared8(
            to, static_cast<uint64_t>(__float_as_uint(two[1])) << 32 | __float_as_uint(two[0]));
      }
    }
  }
}

// Calls f(StagedRows) for the rows of a warp's sums, in turn.
template <typename Config, typename F>
__device__ __forceinline__ void ForStagedRows(const Sums80<Config>& sums, uint32_t smem, F&& f) {
  using Rows = StagedRows<Config>;
  static_assert(Config::kWarpM == 2 * Rows::kRows);
  const WarpPlace<Config> place;
  Rows rows{smem + threadIdx.x / 32 * Config::kStagingBytes, place.row, place.column};
  // A loop, so that there is one f; its branches index the sums by constants.
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
    if (half == 0) {
      StageRows<0, Config>(sums, rows);
    } else {
      StageRows<Rows::kRows, Config>(sums, rows);
    }
    __syncwarp();
    f(rows);
    rows.first_row += Rows::kRows;
  }
}

// Partial tiles in fragment order: as threads hold their sums. The reader is the same thread of
// another CTA, so nothing is rearranged. A warp's block of 16 rows, of type U, is kBlockBytes.
template <typename U, typename Config>
struct Fragments80Of {
  static constexpr int kVectors = Config::kN8Blocks * 4 * sizeof(U) / kVectorBytes;  // of a thread
  static constexpr int kBytes = kVectors * 32 * kVectorBytes;

  // In the slot of a tile.
  static __device__ int64_t At(int m16) {
    return (static_cast<int64_t>(threadIdx.x / 32) * Config::kM16Blocks + m16) * kBytes +
           threadIdx.x % 32 * kVectorBytes;
  }
  static __device__ __forceinline__ void Store(const Sums80<Config>& sums, int m16, char* slot) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint4 vector;
      if constexpr (sizeof(U) == 2) {
        const auto& a = sums[m16][2 * v];
        const auto& b = sums[m16][2 * v + 1];
        vector = make_uint4(Pack<U>(a[0], a[1]), Pack<U>(a[2], a[3]), Pack<U>(b[0], b[1]),
                            Pack<U>(b[2], b[3]));
      } else {
        const auto& a = sums[m16][v];
        vector = make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]),
                            __float_as_uint(a[3]));
      }
      ptx::StoreGlobal16(slot + At(m16) + v * 32 * kVectorBytes, vector);
    }
  }
  // Rounds the sums as Store does.
  static __device__ __forceinline__ void Round(Sums80<Config>& sums, int m16) {
    if constexpr (sizeof(U) == 2) {
#pragma unroll
      for (auto& four : sums[m16]) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const float2 two = Unpack<U>(Pack<U>(four[i], four[i + 1]));
          four[i] = two.x, four[i + 1] = two.y;
        }
      }
    }
  }
  static __device__ __forceinline__ void Add(Sums80<Config>& sums, int m16, const char* slot) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 vector = ptx::LoadGlobal16(slot + At(m16) + v * 32 * kVectorBytes);
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(U) == 2) {
          const float2 two = Unpack<U>(words[w]);
          sums[m16][2 * v + w / 2][w % 2 * 2] += two.x;
          sums[m16][2 * v + w / 2][w % 2 * 2 + 1] += two.y;
        } else {
          sums[m16][v][w] += __uint_as_float(words[w]);
        }
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_EPILOGUE_SM80_CUH_
