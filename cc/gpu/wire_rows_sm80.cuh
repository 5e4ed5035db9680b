// Partial tiles of portable GEMMs that travel in a quantised wire: a tile's rows, each of which is
// a block (core/wire.h), and behind them the rows' scales.
#ifndef JFLUX_GPU_WIRE_ROWS_SM80_CUH_
#define JFLUX_GPU_WIRE_ROWS_SM80_CUH_

#include <cstdint>

#include "core/wire.h"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/ptx.cuh"
#include "gpu/wire.cuh"

namespace jflux {

// The largest magnitudes of a tile's rows, in shared memory that staged rows leave free. Two warps
// have the columns of a row.
template <typename Config>
class RowMagnitudes {
  static_assert(Config::kTileN == kWireBlock && Config::kTileN == 2 * Config::kWarpN);
  static constexpr int kOffset = StagedRows<Config>::kRows * StagedRows<Config>::kRowBytes;
  static_assert(kOffset + Config::kTileM * 4 <= Config::kStagingBytes);

 public:
  // Called by all threads.
  __device__ __forceinline__ RowMagnitudes(const Sums80<Config>& sums, uint32_t smem)
      : smem_(smem) {
    const WarpPlace<Config> place;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * Config::kM16Blocks; ++i) {
      uint32_t most = 0;
#pragma unroll
      for (int j = 0; j < 2 * Config::kN8Blocks; ++j) {
        const float x = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        most = quantize::MaxWord(most, __float_as_uint(x) & 0x7fffffff);
      }
      most = quantize::Team<4>::Max(most);
      if (lane % 4 == 0) {
        ptx::StoreShared4(At(place.column / Config::kWarpN, place.row + 8 * i + lane / 4),
                          static_cast<int32_t>(most));
      }
    }
    __syncthreads();
  }
  // As bits of a float.
  __device__ __forceinline__ uint32_t Of(int row) const {
    return quantize::MaxWord(ptx::LoadShared4(At(0, row)), ptx::LoadShared4(At(1, row)));
  }

 private:
  __device__ uint32_t At(int half, int row) const {
    return smem_ + half * Config::kStagingBytes + kOffset + 4 * row;
  }
  uint32_t smem_;
};

// Where eight columns of a row of a tile lie in its slot. Those of a warp lie together, so that its
// lanes store many bytes in a row; behind all of them are the rows' scales.
template <typename Config>
struct WireColumns {
  using Vector = quantize::WireVector<Columns8::kCount>;
  int row, column;  // of the tile

  __device__ int Offset() const {
    return (column / Config::kWarpN * Config::kTileM + row) * Config::kWarpN +
           column % Config::kWarpN;
  }
  static __device__ int ScaleOffset(int row) {
    return Config::kTileM * Config::kTileN + row * static_cast<int>(sizeof(float));
  }
  // Quantises them. Returns the row's scale.
  __device__ __forceinline__ float Store(const Columns8& x, uint32_t magnitude, DType wire,
                                         char* slot) const {
    Vector v;
    v.scale = quantize::AnyValues::Quantize<false>(x.v, magnitude, wire, v.words);
    v.StoreWords(slot + Offset());
    return v.scale;
  }
  __device__ __forceinline__ Vector Load(const char* slot) const {
    return Vector::Load(slot + Offset(), slot + ScaleOffset(row));
  }
  static __device__ __forceinline__ void Add(const Vector& v, DType wire, Columns8& y) {
    float x[Columns8::kCount];
    v.Dequantize(wire, x);
    y.Each([&](float& sum, int i) { sum += x[i]; });
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_WIRE_ROWS_SM80_CUH_
