// The epilogue of a GEMM kernel (gpu/gemm_sm90.cuh): what becomes of a tile's sums, from a
// consumer's accumulators to staging or memory.
//
// Op::Epilogue provides
//
//   Finish(args, call, staging, acc, row_block, tile, await_partials)
//                               a consumer: stages the m64 blocks in order; acc[i] is m64 block
//                               staging.M64At(i). await_partials() before it adds what peers sent
//   Store(args, call, staging, row_block, tile)
//                               one lane of the store warp: writes out the staged m64 blocks, in
//                               the same order
//   HasRows(args, row_block, m64)
//                               whether the m64 block has any rows; if kClusterK > 1
//   Needs(args, row_block, tile, m64)
//                               whether anybody needs the products of an m64 block. A consumer that
//                               shares tiles leaves the others out; not with a lent stage.
//                               EveryM64: always
//
// With a lent stage (kLendsStage), Finish and Store must not wait for peers.
//
// What happens to an m64 block is a list of steps: Apply(block, step, step, ...). A step is a
// functor of a block. Those of namespace `step` refer to the kernel's arguments, which are read
// when the step runs: all at once would take registers. A null operand means that there is none.
// The columns of a step: kColumns of the accumulators, from kFirst on. They are y's columns from
// block.place.n0 on.
#ifndef JFLUX_GPU_GEMM_EPILOGUE_SM90_CUH_
#define JFLUX_GPU_GEMM_EPILOGUE_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "core/activation.h"
#include "core/tile_order.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/quantize_epilogue_sm90.cuh"
#include "gpu/staging.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

struct EveryM64 {
  template <typename Args>
  static __device__ bool Needs(const Args&, int32_t, Tile, int) {
    return true;
  }
};

// An m64 block of sums, and its place in results [.., n]:
//
//   n0               first column
//   Columns()        n
//   RowAt(r, n)      the element at which row r (0..63) begins; -1: nowhere
//   Path()           how the block is written: from registers in float32 (IsFloat32), by the store
//                    warp (IsStoredByTma), else by the consumer, row by row
//   IsFloat16()      defined if results of operands of 8 bits may be float16: whether they are
template <typename Config_, typename Place>
struct M64Block {
  using Config = Config_;
  StagingWriter<Config>& staging;
  float (&acc)[Config::kSliceAccumulators];
  const Place& place;
};

template <typename Block, typename... Steps>
__device__ __forceinline__ void Apply(const Block& block, const Steps&... steps) {
  (steps(block), ...);
}

// Whether results of 16 bits are not of Config::Result.
template <typename Config, typename Place>
__device__ __forceinline__ auto IsFloat16(const Place& place) -> decltype(place.IsFloat16()) {
  return Config::kNarrow && place.IsFloat16();
}
template <typename Config, typename... Place>
__device__ __forceinline__ bool IsFloat16(const Place&...) {
  return false;
}

// StageM64 of results.
template <typename Config, int kColumns, int kFirst = 0, int kCount, typename Place>
__device__ __forceinline__ void StageResults(const float (&acc)[kCount], const StagedM64& staged,
                                             const Place& place) {
  if constexpr (Config::kNarrow) {
    if (IsFloat16<Config>(place)) return StageM64<__half, kColumns, kFirst>(acc, staged);
  }
  StageM64<typename Config::Result, kColumns, kFirst>(acc, staged);
}

namespace step {

template <int kColumns, int kFirst = 0>
struct Bias {
  const float* const& bias;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if (bias != nullptr)
      AddBias<kColumns, kFirst>(block.acc, bias, block.place.n0, block.place.Columns());
  }
};

// Of operands of 8 bits: their scales, of y's rows and columns, if they have any.
template <int kColumns, int kFirst = 0>
struct Scale {
  const float* const& rows;
  const float* const& columns;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if constexpr (Block::Config::kScaled) {
      if (columns == nullptr) return;
      ScaleM64s<kColumns, 1, kFirst>(&block.acc, rows, columns, block.place.n0,
                                     block.place.Columns(),
                                     [&](int, int r) { return block.place.RowAt(r, 1); });
    }
  }
};

template <int kColumns>
struct Residual {
  const void* const& residual;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if (residual == nullptr) return;
    const auto& n = block.place.Columns();
    const auto row_of = [&](int r) { return block.place.RowAt(r, n); };
    if (block.place.Path().IsFloat32()) {
      AddRows<float, kColumns>(block.acc, residual, block.place.n0, n, row_of);
    } else if (IsFloat16<typename Block::Config>(block.place)) {
      AddRows<__half, kColumns>(block.acc, residual, block.place.n0, n, row_of);
    } else {
      using T = typename Block::Config::Result;
      AddRows<T, kColumns>(block.acc, residual, block.place.n0, n, row_of);
    }
  }
};

template <int kColumns>
struct Activate {
  const Activation& activation;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if constexpr (Block::Config::kQuantizes && kColumns > kScaleBlock) {
      // All together spill registers.
      jflux::Activate<kScaleBlock>(block.acc, activation);
      wgmma::Pin(block.acc);
      jflux::Activate<kColumns - kScaleBlock, kScaleBlock>(block.acc, activation);
    } else {
      jflux::Activate<kColumns>(block.acc, activation);
    }
  }
};

// The first half of the columns is the gate. A thread holds the same elements of both halves.
template <int kHalf>
struct Gate {
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) block.acc[i] *= block.acc[kHalf / 2 + i];
  }
};

// Row r times scale[row0 + r], for `rows` rows.
template <int kColumns>
struct ScaleRows {
  const float* const& scale;
  int32_t row0, rows;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if (scale == nullptr) return;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // and row + 8
    const float low = row < rows ? __ldg(scale + row0 + row) : 0.0f;
    const float high = row + 8 < rows ? __ldg(scale + row0 + row + 8) : 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) block.acc[i] *= i % 4 < 2 ? low : high;
  }
};

// Writes the block to `data` [.., n]: through staging, or from registers in float32.
template <int kColumns, int kFirst = 0>
struct Write {
  void* const& data;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    void* const to = data;
    const auto& n = block.place.Columns();
    const auto row_of = [&](int r) { return block.place.RowAt(r, n); };
    const auto& path = block.place.Path();
    if (path.IsFloat32()) {
      StoreM64F32<kColumns, kFirst>(block.acc, to, block.place.n0, n, row_of);
      return;
    }
    using T = typename Block::Config::Result;
    const StagedM64 staged = block.staging.Acquire();
    StageResults<typename Block::Config, kColumns, kFirst>(block.acc, staged, block.place);
    if (path.IsStoredByTma()) {
      block.staging.Publish();
    } else {
      ScatterStagedRows<T, kColumns>(staged, 1 + block.staging.consumer, to, block.place.n0, n,
                                     row_of);
    }
  }
};

// Writes results: as Write does, or quantised, with their scales (kQuantizes).
template <int kColumns>
struct WriteResults {
  void* const& data;
  float* const& scale;
  const bool& power_of_two;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if constexpr (Block::Config::kQuantizes) {
      const auto quantize = [&](auto first) {
        QuantizeM64<first>(block.acc, static_cast<uint8_t*>(data), scale, power_of_two,
                           block.place.n0 + first, block.place.Columns(),
                           [&](int r, int64_t n) { return block.place.RowAt(r, n); });
      };
      quantize(std::integral_constant<int, 0>{});
      if constexpr (kColumns > kScaleBlock) quantize(std::integral_constant<int, kScaleBlock>{});
    } else {
      Write<kColumns>{data}(block);
    }
  }
};

// Writes the sums that the gradient of an activation needs, if there is an array for them; with a
// gate, those of both halves. What is quantised has no gradient.
template <int kColumns>
struct Save {
  void* const& data;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if (!Block::Config::kQuantizes && data != nullptr) Write<kColumns>{data}(block);
  }
};
template <int kHalf>
struct SaveHalves {
  void *const &first, *const &second;
  template <typename Block>
  __device__ __forceinline__ void operator()(const Block& block) const {
    if (Block::Config::kQuantizes || first == nullptr) return;
    Write<kHalf>{first}(block);
    Write<kHalf, kHalf>{second}(block);
  }
};

}  // namespace step

// Stages the m64 blocks of a tile as they are, for the store warp. has_rows(m64): which. `place` is
// asked for IsFloat16.
template <typename Config, typename Place, typename HasRows>
__device__ __forceinline__ void StageTile(
    StagingWriter<Config>& staging,
    const float (&acc)[Config::kConsumerM64Blocks][Config::kSliceAccumulators], const Place& place,
    HasRows&& has_rows) {
#pragma unroll
  for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
    if (!has_rows(staging.M64At(i))) continue;
    StageResults<Config, Config::kSliceN>(acc[i], staging.Acquire(), place);
    staging.Publish();
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_EPILOGUE_SM90_CUH_
