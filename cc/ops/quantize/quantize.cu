// quantize on GPUs. It is limited by memory: x is read once, or twice where no CTA sees a whole
// block (QuantizeParams::HasMaxima).
//
//   rows    a team of threads, a power of two up to a CTA, has a row, which it keeps in registers
//   if
//           it fits. Blocks are whole rows, or 128 elements of one.
//   tiles   a CTA has a tile of 128 x 128, and keeps it in registers. It finds the maxima of its
//           rows and columns, or of all, makes scales of them, and rounds: once for x, once for the
//           transpose, which takes a turn through shared memory. What is quantised again is read as
//           float32. What is computed is rounded to x's type first. Gradients of two arrays are two
//           tiles: the CTA has read its tile of dy before it writes the copies there, which are as
//           many bytes of the same rows, and no other CTA reads or writes these. With groups a
//           tile has rows of one group; each warp finds out which.
//
// A block of many tiles takes two launches of the second kernel. Between them lie the blocks'
// maxima:
//
//   Pass::kMaxima   each tile adds its own
//   Pass::kRound    rounds, beginning with the tiles that were read last, which the L2 cache has
//
// Or, with scales that are given, the first one rounds too, and the second one has work only where
// a block holds a NaN or an infinity:
//
//   Pass::kGiven    each tile adds its maxima, and rounds
//   Pass::kRepair   rounds again where the scale is not the given one
//
// Portable code has what is given alone (QuantizeSource::kGiven and kPair), and nothing again: the
// others are steps of recipes whose products are Hopper's. To be compiled in less time it takes
// every scale for an unusual one.
#include <cuda_fp8.h>

#include "gpu/activation.cuh"
#include "gpu/group_blocks.cuh"
#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/quantize.cuh"
#include "gpu/types.cuh"
#include "ops/quantize/quantize.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

using namespace quantize;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kIsPortable = true;
#else
constexpr bool kIsPortable = false;
#endif

constexpr int kThreads = 256, kWarps = kThreads / 32, kTile = kQuantizeTile;
// Elements of a row that a thread has together.
constexpr int kChunk = 8, kChunksOfTile = kTile / kChunk;
// Chunks that each thread of a team keeps of its row.
constexpr int kKept = 8;
// Of a team within a warp: enough to have several loads in flight, and few enough that the lanes of
// a load read near each other.
constexpr int kKeptInWarp = 4;

enum class Pass : int32_t { kWhole, kMaxima, kRound, kGiven, kRepair };

// x, or its transpose: what the place of a scale depends on.
struct Side {
  int64_t scales;  // of a matrix
  int64_t down;    // from a scale to that of the next row, or block of rows
  int64_t across;  // and to that of the next tile in a row
  int32_t tiles;   // copies that are in turns
};

struct QuantizeArgs {
  QuantizeParams params;
  QuantizeArrays arrays;
  int32_t team = 1;  // of rows
  // Of tiles:
  int64_t copy_columns;        // of the array of copies
  int64_t transposed_columns;  // and of that of transposes
  Pass pass = Pass::kWhole;
  int32_t tiles_down, tiles_across;  // of a matrix
  Side sides[2];
};

// ---- Elements ----------------------------------------------------------------------------------

// kChunk elements.
template <typename T>
struct Chunk {
  static constexpr int kWords = kChunk * sizeof(T) / 4;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kCorrections = kWide ? 2 : 1;  // of Ratio
  uint32_t words[kWords];

  static __device__ __forceinline__ Chunk Load(const T* from) {
    Chunk out;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + i);
      out.words[4 * i] = v.x;
      out.words[4 * i + 1] = v.y;
      out.words[4 * i + 2] = v.z;
      out.words[4 * i + 3] = v.w;
    }
    return out;
  }
  __device__ __forceinline__ float At(int i) const {
    if constexpr (kWide) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // Unpack would hold halves of words in registers of their own.
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000);
    } else {
      const float2 pair = Unpack<T>(words[i / 2]);
      return i % 2 == 0 ? pair.x : pair.y;
    }
  }
  // Magnitudes are bits without the sign, whose order is the numbers'; those of two elements of 16
  // bits are one word.
  __device__ __forceinline__ uint32_t MagnitudesOfWord(int i) const {
    return words[i] & (kWide ? 0x7fffffff : 0x7fff7fff);
  }
  static __device__ __forceinline__ uint32_t MaxMagnitudes(uint32_t a, uint32_t b) {
    if constexpr (kWide) return MaxWord(a, b);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return __vmaxu2(a, b);
#else
    return ptx::MaxHalves(a, b);
#endif
  }
  // The largest magnitude of all elements.
  __device__ __forceinline__ uint32_t Largest() const {
    uint32_t most = MagnitudesOfWord(0);
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = MaxMagnitudes(most, MagnitudesOfWord(i));
    return kWide ? most : MaxWord(most & 0xffff, most >> 16);
  }
  // The same magnitude as bits of a float.
  static __device__ __forceinline__ uint32_t Wide(uint32_t magnitude) {
    if constexpr (kWide) {
      return magnitude;
    } else {
      return __float_as_uint(Unpack<T>(magnitude).x);
    }
  }
};

// What a chunk of x is kept as.
template <typename T>
using Kept = std::conditional_t<sizeof(T) == 1, float, T>;

// A chunk of values of 8 bits, with their scale.
__device__ __forceinline__ Chunk<float> LoadScaled(const __nv_fp8_e4m3* from, float scale) {
  const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
  Chunk<float> out;
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    const uint32_t pair = (i < 4 ? words.x : words.y) >> (i % 4 * 8);
    const float2 values = __half22float2(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xffff), __NV_E4M3));
    out.words[i] = __float_as_uint(values.x * scale);
    out.words[i + 1] = __float_as_uint(values.y * scale);
  }
  return out;
}

// The values of a chunk. Adds to *lost, if that is counted.
template <bool kUsual, DType kValues, typename T>
__device__ __forceinline__ uint2 RoundedChunk(const Chunk<T>& x, const Scale& scale, bool counts,
                                              QuantizeLosses* lost) {
  float ratios[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    ratios[i] = Ratio<kUsual, Chunk<T>::kCorrections>(x.At(i), scale);
  }
  const auto word = [&](int i) {
    return Rounded<kValues>(ratios[i], ratios[i + 1]) |
           Rounded<kValues>(ratios[i + 2], ratios[i + 3]) << 16;
  };
  const uint2 values = make_uint2(word(0), word(4));
  if (counts) {
    constexpr uint32_t kMagnitude = kValues == DType::kS8 ? 0xff : 0x7f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t value = (i < 4 ? values.x : values.y) >> (i % 4 * 8);
      lost->flushed += (value & kMagnitude) == 0 && x.At(i) != 0;
      lost->saturated += fabsf(ratios[i]) > LargestOf(kValues);
    }
  }
  return values;
}

// Adds what the threads of a CTA have lost. `of_cta`: in shared memory, zeros before the last
// barrier.
__device__ void AddLosses(QuantizeLosses lost, QuantizeLosses* of_cta, QuantizeLosses* sum) {
  lost.flushed = __reduce_add_sync(0xffffffff, lost.flushed);
  lost.saturated = __reduce_add_sync(0xffffffff, lost.saturated);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&of_cta->flushed, lost.flushed);
    atomicAdd(&of_cta->saturated, lost.saturated);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (of_cta->flushed != 0) atomicAdd(&sum->flushed, of_cta->flushed);
  if (of_cta->saturated != 0) atomicAdd(&sum->saturated, of_cta->saturated);
}

// ---- Rows --------------------------------------------------------------------------------------

struct RowStorage {
  uint32_t maxima[kWarps];
  QuantizeLosses lost;
};

template <typename T, DType kValues>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3)
    QuantizeRowsKernel(const __grid_constant__ QuantizeArgs args) {
  JFLUX_SHARED(RowStorage, shared);
  const QuantizeParams& p = args.params;
  const Quantized& result = args.arrays.results[0];
  const int thread = threadIdx.x, team = args.team, member = thread % team;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / team) + thread / team;
  const bool is_there = row < p.rows;
  const int chunks = is_there ? static_cast<int>(p.columns / kChunk) : 0;
  const T* x = static_cast<const T*>(args.arrays.x) + row * p.columns;

  // Chunks of a strip, of which all but the last are read again.
  Chunk<T> kept[kKept];
  const int strips = CeilDiv(chunks, kKept * team);
  const auto number = [&](int strip, int i) { return (strip * kKept + i) * team + member; };
  const auto load = [&](int strip) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int c = number(strip, i);
      kept[i] = c < chunks ? Chunk<T>::Load(x + static_cast<int64_t>(c) * kChunk) : Chunk<T>{};
    }
  };
  uint32_t most = 0;
  for (int strip = 0; strip < strips; ++strip) {
    load(strip);
#pragma unroll
    for (int i = 0; i < kKept; ++i) most = MaxWord(most, kept[i].Largest());
  }
  for (int step = 1; step < Min(team, 32); step *= 2) {
    most = MaxWord(most, __shfl_xor_sync(0xffffffff, most, step));
  }
  if (thread == 0) shared.lost = {};
  if (team > 32) {
    const int warps = team / 32, warp = thread / 32;
    if (thread % 32 == 0) shared.maxima[warp] = most;
    __syncthreads();
    for (int i = 0; i < warps; ++i) most = MaxWord(most, shared.maxima[warp / warps * warps + i]);
  }
  most = Chunk<T>::Wide(most);

  const float* given =
      args.arrays.scale == nullptr || !is_there ? nullptr : args.arrays.scale + row;
  const Scale scale = ScaleOf<kValues>(most, p.power_of_two, given);
  if (member == 0 && is_there) result.scale[row] = scale.scale;
  const bool counts = args.arrays.losses != nullptr;
  QuantizeLosses lost{};
  uint2* values = reinterpret_cast<uint2*>(result.values + row * p.columns);
  const auto round = [&](auto usual) {
    for (int strip = strips - 1; strip >= 0; --strip) {
      if (strip != strips - 1) load(strip);
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int c = number(strip, i);
        if (c < chunks) values[c] = RoundedChunk<usual, kValues>(kept[i], scale, counts, &lost);
      }
    }
  };
  if (!kIsPortable && scale.IsUsual(most)) {
    round(std::true_type{});
  } else {
    round(std::false_type{});
  }
  if (counts) {
    __syncthreads();  // shared.lost is zero
    AddLosses(lost, &shared.lost, args.arrays.losses);
  }
}

// ---- Tiles -------------------------------------------------------------------------------------

// A thread has chunk `thread % 16` of rows Row(i, j), so that the elements of a column and of one i
// are a word of the transpose.
constexpr int kQuads = 2, kRowsOfQuad = 4;
constexpr int kThreadsOfColumn = kThreads / kChunksOfTile;
__device__ __forceinline__ int Quad(int i) {
  return static_cast<int>(threadIdx.x / kChunksOfTile) + kThreadsOfColumn * i;
}
__device__ __forceinline__ int Row(int i, int j) { return kRowsOfQuad * Quad(i) + j; }
__device__ __forceinline__ int Column() {
  return static_cast<int>(threadIdx.x % kChunksOfTile) * kChunk;
}
static_assert(kQuads * kRowsOfQuad * kThreadsOfColumn == kTile);

// Calls visit(i, j, element) for this thread's chunks. `element` is that of row 0 and this thread's
// column, and then that of each chunk.
template <typename T, typename Visit>
__device__ __forceinline__ void ForEachChunk(T* element, int64_t stride, Visit&& visit) {
  element += Row(0, 0) * stride;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int j = 0; j < kRowsOfQuad; ++j) {
      visit(i, j, element);
      element += stride;
    }
    element += kRowsOfQuad * (kThreadsOfColumn - 1) * stride;
  }
}

template <typename T>
using ChunksOfThread = Chunk<T>[kQuads][kRowsOfQuad];

struct TileStorage {
  // Values of the transpose, [column][row / 4]; each row's words lie where Turned() says.
  alignas(16) uint32_t turned[kTile][kTile / 4];
  // Scales of rows, and of columns.
  alignas(16) float shifted[2][kTile], reciprocals[2][kTile], shifts[2][kTile];
  uint32_t row_maxima[kTile];
  alignas(16) uint32_t column_maxima[kWarps][kTile];  // of each warp's rows
  uint32_t tile_maxima[kWarps];                       // likewise
  QuantizeLosses lost;

  __device__ __forceinline__ void SetScale(int side, int at, const Scale& scale) {
    shifted[side][at] = scale.shifted;
    reciprocals[side][at] = scale.reciprocal;
    shifts[side][at] = scale.shift;
  }
  __device__ __forceinline__ Scale ScaleOf(int side, int at) const {
    return {0, shifted[side][at], reciprocals[side][at], shifts[side][at]};
  }
};
// Eight columns are those of a thread. The lanes of a warp write words of 16 threads' columns and
// of two quads: all to different banks.
__device__ __forceinline__ int Turned(int column, int quad) { return quad ^ (column / kChunk * 2); }

struct Tile {
  int32_t matrix, down, across;  // its number in each dimension
  int32_t row;                   // its first one in x and in the copy
  int32_t rows, columns;         // that it has of the matrix, counted on past the tile

  // Rows of this thread's chunks, counted so.
  __device__ __forceinline__ int RowsOfThread() const { return Column() < columns ? rows : 0; }

  // Its first element in x, in the copy, and in the transpose.
  __device__ __forceinline__ int64_t At(const QuantizeParams& p) const {
    return (matrix * p.rows + row) * p.columns + across * kTile;
  }
  __device__ __forceinline__ int64_t CopyAt(const QuantizeArgs& args, int part) const {
    return (matrix * args.params.rows + row) * args.copy_columns +
           (across * args.sides[0].tiles + part) * kTile;
  }
  __device__ __forceinline__ int64_t TransposedAt(const QuantizeArgs& args) const {
    return (matrix * args.params.columns + across * kTile) * args.transposed_columns + down * kTile;
  }
};

// The scale of row `at` of a tile, of x or of its transpose.
struct ScalePlace {
  bool is_there;     // whether the row is one of the matrix
  bool is_of_tile;   // and is the first one of the tile that has the scale
  bool is_of_block;  // and the tile is the first one that has it
  int64_t index;     // if the row is there

  __device__ __forceinline__ ScalePlace(const QuantizeArgs& args, const Tile& tile, bool transposed,
                                        int at, int part = 0) {
    const Side& side = args.sides[transposed];
    const QuantizeBlock block = args.params.BlockOf(transposed);
    const int down = transposed ? tile.across : tile.down;
    const int across = transposed ? tile.down : tile.across;
    is_there = at < (transposed ? tile.columns : tile.rows);
    is_of_tile = is_there && (block.rows == 1 || at == 0);
    is_of_block =
        is_of_tile && (block.rows != -1 || down == 0) && (block.columns != -1 || across == 0);
    const int row = (transposed ? tile.across * kTile : tile.row) + at;
    const int64_t first = block.rows == 1 ? row : block.rows == -1 ? 0 : down;
    index = tile.matrix * side.scales + first * side.down +
            (block.columns == -1 ? 0 : across * side.across + (transposed ? 0 : part));
  }
};

// The largest magnitudes of a tile's rows, of its columns, or of all of it, as far as the scales of
// the copy and of the transpose need them, into shared memory.
template <typename T>
__device__ __forceinline__ void FindMaxima(const QuantizeParams& p, const ChunksOfThread<T>& x,
                                           TileStorage& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool of_rows = p.copy && p.BlockOf(false).rows == 1;
  const bool of_tile = (p.copy && p.BlockOf(false).rows != 1) || (p.transpose && p.block.rows != 1);
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int j = 0; j < kRowsOfQuad; ++j) {
      uint32_t most = x[i][j].Largest();
      if (of_tile) all = MaxWord(all, most);
      if (!of_rows) continue;
#pragma unroll
      for (int step = 1; step < kChunksOfTile; step *= 2) {
        most = MaxWord(most, __shfl_xor_sync(0xffffffff, most, step));
      }
      if (lane % kChunksOfTile == 0) shared.row_maxima[Row(i, j)] = Chunk<T>::Wide(most);
    }
  }
  if (of_tile) {
    all = __reduce_max_sync(0xffffffff, all);
    if (lane == 0) shared.tile_maxima[warp] = Chunk<T>::Wide(all);
  }
  if (p.transpose && p.block.rows == 1) {
    uint32_t maxima[kChunk];
#pragma unroll
    for (int w = 0; w < Chunk<T>::kWords; ++w) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
#pragma unroll
        for (int j = 0; j < kRowsOfQuad; ++j) {
          most = Chunk<T>::MaxMagnitudes(most, x[i][j].MagnitudesOfWord(w));
        }
      }
      most = Chunk<T>::MaxMagnitudes(most, __shfl_xor_sync(0xffffffff, most, kChunksOfTile));
      if constexpr (Chunk<T>::kWide) {
        maxima[w] = most;
      } else {
        maxima[2 * w] = Chunk<T>::Wide(most & 0xffff);
        maxima[2 * w + 1] = Chunk<T>::Wide(most >> 16);
      }
    }
    if (lane < kChunksOfTile) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) shared.column_maxima[warp][lane * kChunk + k] = maxima[k];
    }
  }
}

// The values of x's tile.
template <bool kUsual, DType kValues, typename T>
__device__ __forceinline__ void RoundTile(const QuantizeArgs& args, const Tile& tile, int part,
                                          const ChunksOfThread<T>& x, TileStorage& shared) {
  const int rows = tile.RowsOfThread();
  const bool counts = args.arrays.losses != nullptr;
  QuantizeLosses lost{};
  ForEachChunk(args.arrays.results[0].values + tile.CopyAt(args, part) + Column(),
               args.copy_columns, [&](int i, int j, uint8_t* to) {
                 const int row = Row(i, j);
                 const uint2 values =
                     RoundedChunk<kUsual, kValues>(x[i][j], shared.ScaleOf(0, row), counts, &lost);
                 if (row < rows) *reinterpret_cast<uint2*>(to) = values;
               });
  if (counts) AddLosses(lost, &shared.lost, args.arrays.losses);
}

// The values of the transpose.
template <bool kUsual, DType kValues, typename T>
__device__ __forceinline__ void RoundTransposed(const QuantizeArgs& args, const Tile& tile,
                                                int part, const ChunksOfThread<T>& x,
                                                TileStorage& shared) {
  const int first = Column();
  Scale scales[kChunk];  // read together, in vectors
#pragma unroll
  for (int k = 0; k < kChunk; ++k) scales[k] = shared.ScaleOf(1, first + k);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const auto ratio = [&](int j) {
        return Ratio<kUsual, Chunk<T>::kCorrections>(x[i][j].At(k), scales[k]);
      };
      shared.turned[first + k][Turned(first + k, Quad(i))] =
          Rounded<kValues>(ratio(0), ratio(1)) | Rounded<kValues>(ratio(2), ratio(3)) << 16;
    }
  }
  __syncthreads();
  // A thread has 16 rows of a column, eight threads have a column.
  constexpr uint32_t kThreadsOfIt = kTile / kVectorBytes, kColumns = kThreads / kThreadsOfIt;
  const int row = static_cast<int>(threadIdx.x % kThreadsOfIt) * kVectorBytes;
  const int column = static_cast<int>(threadIdx.x / kThreadsOfIt);
  const bool fills = args.params.groups != 0;  // rows that the group does not have are zeros
  const int columns = fills || row < tile.rows ? tile.columns : 0;
  const int64_t stride = args.transposed_columns;
  uint8_t* to =
      args.arrays.results[1 + part].values + tile.TransposedAt(args) + column * stride + row;
#pragma unroll
  for (int step = 0; step < kTile; step += kColumns) {
    const int at = Turned(column + step, row / kRowsOfQuad);
    uint4 values = *reinterpret_cast<const uint4*>(&shared.turned[column + step][at & ~3]);
    if (at % 4 != 0) values = make_uint4(values.z, values.w, values.x, values.y);
    if (column + step < columns) *reinterpret_cast<uint4*>(to) = values;
    to += kColumns * stride;
  }
}

// A tile of x: its maxima, scales, and values. `part`: which of the arrays in turns it is of.
template <DType kValues, typename T>
__device__ __forceinline__ void QuantizeTile(const QuantizeArgs& args, const Tile& tile, int part,
                                             const ChunksOfThread<T>& x, uint32_t magnitude,
                                             TileStorage& shared) {
  const QuantizeParams& p = args.params;
  const int at = static_cast<int>(threadIdx.x % kTile);
  const int transposed = static_cast<int>(threadIdx.x / kTile);
  const Quantized& result = args.arrays.results[transposed == 0 ? 0 : 1 + part];
  const ScalePlace place(args, tile, transposed, at, part);
  const bool has_scale = place.is_there && (transposed == 0 ? p.copy : p.transpose);
  if (args.pass != Pass::kRound && args.pass != Pass::kRepair) {
    FindMaxima<T>(p, x, shared);
    __syncthreads();
    const bool is_of_one = p.BlockOf(transposed).rows == 1;
    if (has_scale && is_of_one && transposed == 0) {
      magnitude = shared.row_maxima[at];
    } else if (has_scale) {
      for (int w = 0; w < kWarps; ++w) {
        magnitude =
            MaxWord(magnitude, is_of_one ? shared.column_maxima[w][at] : shared.tile_maxima[w]);
      }
    }
  }
  if (args.pass == Pass::kMaxima || args.pass == Pass::kGiven) {
    if (has_scale && place.is_of_tile) atomicMax(result.maxima + place.index, magnitude);
    if (args.pass == Pass::kMaxima) return;
  }

  const float* given = nullptr;
  if (args.arrays.scale != nullptr) {
    // Blocks of x and of the transpose are the same ones, if there is a transpose.
    const ScalePlace of_x(args, tile, false, p.transpose ? 0 : at);
    if (of_x.is_there) given = args.arrays.scale + of_x.index;
  }
  const Scale scale = ScaleOf<kValues>(magnitude, p.power_of_two, given);
  if (has_scale && place.is_of_block) result.scale[place.index] = scale.scale;
  shared.SetScale(transposed, at, scale);
  if (__syncthreads_and(!kIsPortable && scale.IsUsual(magnitude)) && !kIsPortable) {
    if (p.copy) RoundTile<true, kValues, T>(args, tile, part, x, shared);
    if (p.transpose) RoundTransposed<true, kValues, T>(args, tile, part, x, shared);
  } else {
    if (p.copy) RoundTile<false, kValues, T>(args, tile, part, x, shared);
    if (p.transpose) RoundTransposed<false, kValues, T>(args, tile, part, x, shared);
  }
}

__device__ __forceinline__ Tile TileOf(const QuantizeArgs& args, uint32_t number) {
  const QuantizeParams& p = args.params;
  const uint32_t row_of_tiles = number / static_cast<uint32_t>(args.tiles_across);
  Tile tile{};
  tile.across = static_cast<int>(number - row_of_tiles * args.tiles_across);
  if (p.stack > 1) tile.matrix = row_of_tiles / static_cast<uint32_t>(args.tiles_down);
  tile.down = static_cast<int>(row_of_tiles - tile.matrix * args.tiles_down);
  tile.row = tile.down * kTile;
  tile.rows = static_cast<int>(p.rows) - tile.row;
  tile.columns = static_cast<int>(p.columns) - tile.across * kTile;
  return tile;
}
// With groups: moves to the rows of the tile's group. Whether the tile is needed.
__device__ __forceinline__ bool MoveToGroup(const QuantizeArgs& args, Tile* tile) {
  const QuantizeParams& p = args.params;
  const GroupBlock block = FindGroupBlock<kTile>(
      args.arrays.group_sizes, static_cast<int32_t>(p.groups), p.rows, tile->down);
  tile->row = block.row;
  tile->rows = block.rows;
  return block.rows > 0 || p.fill;
}

template <typename T, DType kValues>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    QuantizeTilesKernel(const __grid_constant__ QuantizeArgs args) {
  if constexpr (kIsPortable && sizeof(T) == 1) return Trap();  // LaunchQuantize refuses the call
  JFLUX_DYNAMIC_SHARED(TileStorage, alignof(TileStorage), storage);
  TileStorage& shared = *storage;
  const QuantizeParams& p = args.params;
  const int thread = threadIdx.x;
  const bool after_maxima = args.pass == Pass::kRound || args.pass == Pass::kRepair;
  Tile tile = TileOf(args, after_maxima ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  if (p.groups != 0 && !MoveToGroup(args, &tile)) return;
  uint32_t magnitude = 0;
  if (after_maxima) {
    // A thread makes the scale of a row of x, or of the transpose.
    const int transposed = thread / kTile;
    static_assert(kThreads == 2 * kTile);
    const ScalePlace place(args, tile, transposed, thread % kTile);
    const bool has_scale = place.is_there && (transposed == 0 ? p.copy : p.transpose);
    if (has_scale) magnitude = __ldg(args.arrays.results[transposed].maxima + place.index);
  }
  if (args.pass == Pass::kRepair && !__syncthreads_or(magnitude >= kInfinity)) return;

  using K = Kept<T>;
  ChunksOfThread<K> x;
  const int rows = tile.RowsOfThread();
  const ScaleOfX& of_x = args.arrays.x_scale;
  ForEachChunk(static_cast<const T*>(args.arrays.x) + tile.At(p) + Column(), p.columns,
               [&](int i, int j, const T* from) {
                 x[i][j] = Chunk<K>{};
                 if (Row(i, j) >= rows) return;
                 if constexpr (sizeof(T) == 1) {
                   const int64_t row = tile.row + Row(i, j);
                   const float* scale = of_x.scale + row * of_x.down;
                   x[i][j] = LoadScaled(from, __ldg(scale + tile.across * of_x.across));
                 } else {
                   x[i][j] = Chunk<K>::Load(from);
                 }
               });
  if (thread == 0) shared.lost = {};
  QuantizeTile<kValues, K>(args, tile, 0, x, magnitude, shared);
}

// ---- What is computed --------------------------------------------------------------------------

// This thread's chunks of what is computed: of one array, or, with `dy`, of two.
template <typename T, int kParts>
__device__ __forceinline__ void Compute(const QuantizeArgs& args, const Tile& tile,
                                        ChunksOfThread<T> (&out)[kParts]) {
  const QuantizeParams& p = args.params;
  const QuantizeArrays& arrays = args.arrays;
  const int rows = tile.RowsOfThread();
  const int64_t first = tile.At(p) + Column() + Row(0, 0) * p.columns;
  const bool is_gradient = p.source == QuantizeSource::kGradient;
  const uint32_t one = Pack<T>(1.0f, 1.0f);
  const Chunk<T> ones{{one, one, one, one}};
  WithActivation(p.activation, [&](auto activation) {
    using Of = ActivationAt<decltype(activation)::value>;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      // All with ld.relaxed: the kernel writes where dy is, so that __ldg may not read it.
      [[maybe_unused]] Chunk<T> x[kRowsOfQuad], factor[kRowsOfQuad], dy[kRowsOfQuad];
#pragma unroll
      for (int j = 0; j < kRowsOfQuad; ++j) {
        const int64_t at = first + (Row(i, j) - Row(0, 0)) * p.columns;
        const auto load = [&](const void* from) {
          if (Row(i, j) >= rows) return Chunk<T>{};
          const uint4 v = ptx::LoadGlobal16(static_cast<const T*>(from) + at);
          return Chunk<T>{{v.x, v.y, v.z, v.w}};
        };
        x[j] = load(arrays.x);
        factor[j] = kParts == 1 && arrays.factor == nullptr ? ones : load(arrays.factor);
        if constexpr (kParts == 2) dy[j] = load(arrays.dy);
      }
#pragma unroll
      for (int j = 0; j < kRowsOfQuad; ++j) {
#pragma unroll
        for (int w = 0; w < Chunk<T>::kWords; ++w) {
          float results[kParts][2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int e = 2 * w + k;
            const Of of(x[j].At(e));
            if constexpr (kParts == 2) {
              results[0][k] = of.Gradient(dy[j].At(e) * factor[j].At(e));
              results[1][k] = of.value * dy[j].At(e);
            } else {
              const float by = factor[j].At(e);
              results[0][k] = is_gradient ? of.Gradient(by) : of.value * by;
            }
          }
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            out[part][i][j].words[w] = Pack<T>(results[part][0], results[part][1]);
          }
        }
      }
    }
  });
}

template <typename T, DType kValues, int kParts>
__global__ void __launch_bounds__(kThreads, 2)
    QuantizeComputedKernel(const __grid_constant__ QuantizeArgs args) {
  if constexpr (kIsPortable) return Trap();  // LaunchQuantize refuses the call
  JFLUX_DYNAMIC_SHARED(TileStorage, alignof(TileStorage), storage);
  const Tile tile = TileOf(args, blockIdx.x);
  ChunksOfThread<T> x[kParts];
  Compute<T, kParts>(args, tile, x);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part != 0) __syncthreads();  // the first one's values have been read from shared memory
    QuantizeTile<kValues, T>(args, tile, part, x[part], 0, *storage);
  }
}

// ---- Launches ----------------------------------------------------------------------------------

struct Kernels {
  const void *rows, *tiles;  // null: there is none
  const void* computed[2] = {nullptr, nullptr};
};
Kernels KernelsOf(DType dtype, DType values) {
  if (dtype == kQuantizedAgain) {
    return WithFormat<kQuantizeFormats.results>(values, [](auto v) {
      using T = CudaType<kQuantizedAgain>;
      return Kernels{nullptr, reinterpret_cast<const void*>(&QuantizeTilesKernel<T, v>)};
    });
  }
  return WithFormat<kQuantizeFormats.operands>(dtype, [&](auto x) {
    return WithFormat<kQuantizeFormats.results>(values, [](auto v) {
      using T = CudaType<decltype(x)::value>;
      Kernels kernels{reinterpret_cast<const void*>(&QuantizeRowsKernel<T, v>),
                      reinterpret_cast<const void*>(&QuantizeTilesKernel<T, v>)};
      if constexpr (sizeof(T) == 2) {
        kernels.computed[0] = reinterpret_cast<const void*>(&QuantizeComputedKernel<T, v, 1>);
        kernels.computed[1] = reinterpret_cast<const void*>(&QuantizeComputedKernel<T, v, 2>);
      }
      return kernels;
    });
  });
}

}  // namespace

bool LoadQuantizeKernels(std::string* error) {
  const auto load = [&](DType dtype) {
    return ForFormats(kQuantizeFormats.results, [&](DType values) {
      const Kernels kernels = KernelsOf(dtype, values);
      const auto load_tiles = [&](const void* kernel) {
        return kernel == nullptr || LoadKernel(kernel, sizeof(TileStorage), error);
      };
      return (kernels.rows == nullptr || LoadKernel(kernels.rows, 0, error)) &&
             load_tiles(kernels.tiles) && load_tiles(kernels.computed[0]) &&
             load_tiles(kernels.computed[1]);
    });
  };
  return ForFormats(kQuantizeFormats.operands, load) && load(kQuantizedAgain);
}

bool LaunchQuantize(const QuantizeParams& p, const QuantizeArrays& arrays, cudaStream_t stream,
                    std::string* error) {
  const bool is_given = p.source == QuantizeSource::kGiven;
  const bool is_plain = p.stack == 1 && arrays.losses == nullptr && !p.HasMaxima();
  const bool is_pair = p.source == QuantizeSource::kPair;
  const bool takes =
      (p.again ? p.dtype == kQuantizedAgain && is_given && is_plain
               : Has(kQuantizeFormats.operands, p.dtype)) &&
      (is_given || is_pair || SizeOf(p.dtype) == 2) &&
      (is_given || (is_plain && p.block.columns == kTile && arrays.scale == nullptr)) &&
      (!p.IsPair() || p.columns % kTile == 0) && (p.copy || arrays.losses == nullptr) &&
      (p.transpose ? !is_pair : p.copy) &&
      (p.groups == 0 || (is_given && is_plain && p.transpose && arrays.scale == nullptr &&
                         (p.block.rows == 1 || p.block.rows == kTile) && p.block.columns == kTile));
  if (!takes || !Has(kQuantizeFormats.results, p.values_dtype) ||
      p.columns % kQuantizeMultiple != 0 ||
      (p.transpose && p.TransposedColumns() % kQuantizeMultiple != 0) || p.block.columns == 1 ||
      p.rows > INT32_MAX || p.columns > INT32_MAX || p.groups > kMostGroups) {
    *error = "the kernels do not take such a call";
    return false;
  }
  int arch = 0;
  if (!LoadedArch(&arch, error)) return false;
  if (arch < kHopperArch && (p.again || (!is_given && !is_pair))) {
    *error = "only Hopper's kernels take such a call";
    return false;
  }
  if (!LoadOnce(LoadQuantizeKernels, error)) return false;
  const auto clear = [&](void* p, int64_t bytes) {
    const cudaError_t status = cudaMemsetAsync(p, 0, bytes, stream);
    if (status != cudaSuccess) *error = cudaGetErrorString(status);
    return status == cudaSuccess;
  };
  if (arrays.losses != nullptr && !clear(arrays.losses, sizeof(QuantizeLosses))) return false;
  const Kernels kernels = KernelsOf(p.dtype, p.values_dtype);
  QuantizeArgs args{};
  args.params = p;
  args.arrays = arrays;
  const auto launch = [&](const void* kernel, int64_t ctas, int smem_bytes) {
    if (ctas > INT32_MAX) {
      *error = "the kernels take fewer rows";
      return false;
    }
    return LaunchKernel(kernel, &args, static_cast<int>(ctas), 1, kThreads, smem_bytes, stream,
                        error);
  };

  const bool is_split = p.block.columns == kTile;
  if (is_given && !p.transpose && p.block.rows == 1 && (!is_split || p.columns % kTile == 0)) {
    const int64_t of_row = is_split ? p.columns / kTile : 1;
    args.params.rows = p.stack * p.rows * of_row;
    args.params.columns = p.columns / of_row;
    const int64_t chunks = args.params.columns / kChunk;
    while (args.team < kThreads && args.team * (args.team < 32 ? kKeptInWarp : kKept) < chunks) {
      args.team *= 2;
    }
    return launch(kernels.rows, CeilDiv<int64_t>(args.params.rows, kThreads / args.team), 0);
  }
  const auto side = [&](bool transposed, int64_t rows, int64_t columns, int32_t tiles) {
    const QuantizeBlock block = p.BlockOf(transposed);
    return Side{block.Scales(rows, columns), QuantizeBlock::Count(columns, block.columns) * tiles,
                tiles, tiles};
  };
  args.sides[0] = side(false, p.rows, p.columns, p.IsPair() ? 2 : 1);
  args.sides[1] = side(true, p.columns, p.TransposedColumns(), 1);
  if (p.groups != 0 && p.block.rows == 1) {
    args.sides[1].down = 1;
    args.sides[1].across = p.columns;
  }
  args.copy_columns = p.columns * args.sides[0].tiles;
  args.transposed_columns = p.TransposedColumns();
  args.tiles_down = static_cast<int32_t>(CeilDiv<int64_t>(args.transposed_columns, kTile));
  args.tiles_across = static_cast<int32_t>(CeilDiv<int64_t>(p.columns, kTile));
  const int64_t tiles = p.stack * args.tiles_down * args.tiles_across;
  const auto pass = [&](Pass pass) {
    args.pass = pass;
    return launch(kernels.tiles, tiles, sizeof(TileStorage));
  };
  if (is_pair) {
    if (!pass(Pass::kWhole)) return false;
    args.arrays.x = arrays.factor;
    args.arrays.results[0].values += kTile;
    args.arrays.results[0].scale += 1;
    return pass(Pass::kWhole);
  }
  if (!is_given) {
    const bool is_two = p.source == QuantizeSource::kGradients;
    return launch(kernels.computed[is_two], tiles, sizeof(TileStorage));
  }
  if (!p.HasMaxima()) return pass(Pass::kWhole);
  if (!clear(arrays.results[0].maxima, p.Maxima() * 4)) return false;
  // Losses of a block that is rounded twice would be counted twice.
  const bool at_once = arrays.scale != nullptr && arrays.losses == nullptr;
  return at_once ? pass(Pass::kGiven) && pass(Pass::kRepair)
                 : pass(Pass::kMaxima) && pass(Pass::kRound);
}

}  // namespace jflux
