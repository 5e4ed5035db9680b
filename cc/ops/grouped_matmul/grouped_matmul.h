// grouped_matmul: y[r] = x[r] @ w[e] for the rows r of each group e, on one device.
// grouped_matmul_dw: dw[e] = x_e^T @ dy_e, its gradient with respect to w.
//
// Rows lie group after group. Group e has group_sizes[e] rows, from the sum of the sizes before it:
//
//   rows      0 .. s0 | s0 .. s0 + s1 | ... | sum .. M
//   weight    w[0]    | w[1]          | ... | none: y is 0, or not written (GroupedMatmulParams::
//                                             fill), and dw takes nothing from them
//
// group_sizes is read on the device, by the kernel. Sizes below 0, and sizes that sum to more than
// M, are an error that names the op and the number (SizesAreWrong says it in words); no memory
// outside of the arrays is touched.
//
// The calls (Params), their arrays, the CPU back end's bodies, the choice of a kernel, and the CUDA
// launchers. Python: jflux/_ops/products/grouped_matmul.py.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_

#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>

#include "core/activation.h"
#include "core/format.h"
#include "core/signal.h"
#include "gpu/gemm_choice.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulId{32}, kGroupedMatmulDwId{33};
inline constexpr OpFormats kGroupedFormats{kHalves, SetOf(DType::kF32)};

// The compiled GPU kernel to run; all 0: the kernel that the heuristic takes.
struct TileChoice {
  int32_t columns = 0;
  int32_t cluster_m = 0;  // CTAs one below the other
};

// One weight w0, or two of the same shape if `gated`. In the accumulation type, rounded once:
//
//   p_i = x[r] @ w_i[e]
//   y[r] = scale[r] * activation(p_0)          without a gate
//   y[r] = scale[r] * activation(p_0) * p_1    gated
//   sums_i[r] = p_i                            if `sums`: what backward needs of an activation
//
// With two terms each has an x and a weight: p_0 = x_0[r] @ w_0[e] + x_1[r] @ w_1[e]. Their scales
// of blocks are one array: of all k-blocks of the first term, then of all of the second.
struct GroupedMatmulParams {
  int64_t m;              // rows of x and y
  int64_t k;              // columns of x
  int64_t n;              // columns of y, and of each weight
  int64_t groups;         // E
  DType dtype;            // of x and the weights; accumulated in fp32, fp64 in fp64
  DType out_dtype;        // of y and the sums
  bool transpose_rhs;     // weights are stored [E, n, k]
  Activation activation;  // kNone without a gate: y is the product
  bool gated;             // needs an activation
  bool scaled;            // there is a row scale
  bool sums;              // also write the sums
  TileChoice tile;
  // Of grouped_matmul_scaled alone. What is quantised is float32 as out_dtype.
  Scales scales = Scales::kNone;
  Quantizing quantize = Quantizing::kNone;
  int terms = 1;          // two not with a gate; with scales of blocks alone, and of whole k-blocks
  bool fill = true;       // write zeros to the rows of no group, in y and sums; else nothing
  double share = 1;       // of the m rows, which groups have, about: by it a tile is chosen
  bool portable = false;  // by the main loop of gpu/gemm_sm80.cuh

  int Weights() const { return gated ? 2 : 1; }  // of which a tile has columns
  int Operands() const { return gated ? 2 : terms; }
};

struct GroupedMatmulArrays {
  const void* x[2];            // [m, k] each
  const void* w[2];            // [groups, k, n], or [groups, n, k] if transpose_rhs
  const int32_t* group_sizes;  // [groups]
  const float* row_scale;      // [m], or null
  void* y;                     // [m, n]
  void* sums[2];               // [m, n] each, or null
  // Of grouped_matmul_scaled, with `scales` of sums, or of blocks of kScaleBlock of k and n:
  const float* x_scale = nullptr;  // [m], or [m, blocks of all k]
  const float* w_scale[2] = {};    // [groups, n], or [groups, blocks of n, blocks of all k]
  float* y_scale = nullptr;        // [m, blocks of n], if y is quantised
};

// dw[e] = sum over the rows r of group e of x[r]^T dy[r], accumulated in fp32 (fp64 for fp64) and
// rounded once. Exactly 0 for a group without rows. In one order of rows: the same bits each time.
// For weights stored [E, n, k], the caller swaps x and dy.
struct GroupedMatmulDwParams {
  int64_t m;        // rows of x and dy
  int64_t k;        // columns of x
  int64_t n;        // columns of dy
  int64_t groups;   // E
  DType dtype;      // of x and dy
  DType out_dtype;  // of dw
  TileChoice tile;
  Scales scales = Scales::kNone;  // of grouped_matmul_dw_scaled; with entries of k
  double share = 1;               // as above
  bool portable = false;
};

struct GroupedMatmulDwArrays {
  const void* x;               // [m, k]
  const void* dy;              // [m, n]
  const int32_t* group_sizes;  // [groups]
  void* dw;                    // [groups, k, n]
  // Of grouped_matmul_dw_scaled, whose operands are x^T [k, columns] and dy^T [n, columns] as
  // quantize makes them of rows of groups: each group begins a block of kScaleBlock columns.
  const float* x_scale = nullptr;   // [blocks, k]
  const float* dy_scale = nullptr;  // [blocks, n], or of kOfBlocks [blocks of n, blocks]
};

// What is wrong with the sizes of `groups` groups of m rows; empty if nothing is.
std::string SizesAreWrong(const int32_t* group_sizes, int64_t groups, int64_t m);

// The CPU back end's bodies. The sizes are right.
void GroupedMatmulCpu(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays);
void GroupedMatmulDwCpu(const GroupedMatmulDwParams& params, const GroupedMatmulDwArrays& arrays);

// The configurations that both grouped kernels have. A gate takes half of a tile's columns for each
// weight, in boxes of 128 bytes.
inline constexpr GemmChoice kGroupedCompiled[] = {
    {256, 2, 8}, {256, 1, 16}, {192, 1, 16}, {128, 1, 16}};
// Those of operands of 8 bits, by their scales. One of two CTAs reads w half as often, which blocks
// need: their tiles are narrower.
inline constexpr GemmChoice kGroupedOfSums[] = {{256, 2, 8}, {256, 1, 16}, {128, 1, 16}};
inline constexpr GemmChoice kGroupedOfBlocks[] = {
    {256, 2, 8}, {192, 2, 8}, {128, 2, 8}, {128, 1, 16}};
// Of the weight gradient alone.
inline constexpr GemmChoice kGroupedOfVectors[] = {{192, 2, 8}, {128, 2, 8}, {128, 1, 16}};
// With either scales, of which results are quantised.
inline constexpr GemmChoice kGroupedQuantizing[] = {{kQuantizingTile, 2, 8},
                                                    {kQuantizingTile, 1, 16}};

struct GroupedChoices {
  const GemmChoice *first, *last;
  constexpr const GemmChoice* begin() const { return first; }
  constexpr const GemmChoice* end() const { return last; }
};
inline constexpr GroupedChoices GroupedChoicesOf(Scales scales, bool quantizes = false) {
  const auto all = [](const auto& list) {
    return GroupedChoices{std::begin(list), std::end(list)};
  };
  if (quantizes) return all(kGroupedQuantizing);
  return scales == Scales::kNone        ? all(kGroupedCompiled)
         : scales == Scales::kOfSums    ? all(kGroupedOfSums)
         : scales == Scales::kOfVectors ? all(kGroupedOfVectors)
                                        : all(kGroupedOfBlocks);
}

// Whether kernel `c` takes such a call.
inline bool TakesGrouped(const GemmChoice& c, bool gated, TileChoice tile) {
  const bool is_wanted =
      tile.columns == 0 || (tile.columns == c.tile_n && tile.cluster_m == c.cluster_m);
  return is_wanted && (!gated || c.tile_n % 128 == 0);
}

inline bool IsGroupedTile(bool gated, TileChoice tile, Scales scales = Scales::kNone,
                          bool quantizes = false) {
  for (const GemmChoice& c : GroupedChoicesOf(scales, quantizes)) {
    if (TakesGrouped(c, gated, tile)) return true;
  }
  return false;
}

// The configuration with the least cost(choice) among those that take such a call.
template <typename Cost>
GemmChoice CheapestGrouped(bool gated, TileChoice tile, Cost&& cost, Scales scales = Scales::kNone,
                           bool quantizes = false) {
  const GemmChoice* best = nullptr;
  for (const GemmChoice& c : GroupedChoicesOf(scales, quantizes)) {
    if (!TakesGrouped(c, gated, tile)) continue;
    if (best == nullptr || cost(c) < cost(*best)) best = &c;
  }
  return *best;
}

inline bool HasFewRows(int64_t m, int64_t groups) { return m <= 64 * groups; }

// The cost of a product of `tile_rows` rows: the m rows of the groups, and what fills up their last
// tiles. With few rows in each group reading the weights takes the time, and the widest tile reads
// most at once.
inline double EstimateGroupedCost(const GemmChoice& c, int64_t m, int64_t groups, int64_t tile_rows,
                                  int64_t n, int64_t k_bytes, const Machine& machine,
                                  const TileCosts& costs = kGatherCosts) {
  if (HasFewRows(m, groups)) return c.cluster_m == 1 ? -c.tile_n : 0;
  return EstimateCost(c, tile_rows, n, k_bytes, machine, costs) * (c.cluster_m == 2 ? 0.957 : 1);
}

// Of m rows, this share.
inline int64_t MeanRows(int64_t m, double share) {
  return Max<int64_t>(1, std::llround(share * static_cast<double>(m)));
}

// Tiles of `rows` rows that a group takes on average, whose sizes are spread by 15 % about a mean.
inline double MeanTiles(double mean, int64_t rows) {
  constexpr double kSizes[] = {.85, .91, .97, 1.03, 1.09, 1.15};
  double sum = 0;
  for (const double size : kSizes) sum += std::ceil(size * mean / static_cast<double>(rows));
  return sum / std::size(kSizes);
}

// The mean cost of what groups of unknown sizes take: about as many tiles as `MeanTiles` says, and
// one deviation less and more, which matters where that is a wave more. On one H100 and one H200
// this choice was 1.1 % slower than the fastest kernel in the mean of 18 products
// (docs/experiments/0036).
inline GemmChoice ChooseGrouped(const GroupedMatmulParams& p, const Machine& machine) {
  const int64_t m = MeanRows(p.m, p.share);
  const auto cost = [&](const GemmChoice& c) {
    const int64_t rows = kGemmTileM * c.cluster_m;
    const auto groups = static_cast<double>(p.groups);
    const double tiles = MeanTiles(static_cast<double>(m) / groups, rows);
    const double share = tiles - std::floor(tiles);  // of groups that take a tile more
    double sum = 0;
    for (const double by : {-1, 0, 1}) {
      const double count = tiles * groups + by * std::sqrt(share * (1 - share) * groups);
      sum +=
          EstimateGroupedCost(c, m, p.groups, std::llround(count * static_cast<double>(rows)),
                              p.n * p.Weights(), p.terms * p.k * SizeOf(p.dtype), machine,
                              p.scales == Scales::kOfBlocks ? kGatherCostsOfBlocks : kGatherCosts);
    }
    return sum;
  };
  return CheapestGrouped(p.gated, p.tile, cost, p.scales, p.quantize != Quantizing::kNone);
}

inline GemmChoice ChooseGroupedDw(const GroupedMatmulDwParams& p, const Machine& machine) {
  const int64_t m = MeanRows(p.m, p.share);
  const auto cost = [&](const GemmChoice& c) -> double {
    if (HasFewRows(m, p.groups)) return c.cluster_m == 1 ? c.tile_n : 1e9;  // writing takes long
    const int64_t rows = RoundUp<int64_t>(p.k, kGemmTileM * c.cluster_m);
    return EstimateGroupedCost(c, m, p.groups, p.groups * rows, p.n,
                               CeilDiv(m, p.groups) * SizeOf(p.dtype), machine,
                               p.scales == Scales::kOfBlocks ? kGatherCostsOfBlocks : kGatherCosts);
  };
  return CheapestGrouped(/*gated=*/false, p.tile, cost, p.scales);
}

// Rows of a box of A: with few rows of each group, boxes that hold none of them are not loaded.
inline int32_t GroupedBoxRows(const GroupedMatmulParams& p) {
  const int64_t most = HasFewRows(p.m, p.groups) ? 64 : kGemmTileM;
  return static_cast<int32_t>(Min<int64_t>(p.m, most));
}

// Why no kernel takes the call; empty if one does. Pure.
std::string WhyNoGroupedMatmulKernel(const GroupedMatmulParams& params);
std::string WhyNoGroupedMatmulDwKernel(const GroupedMatmulDwParams& params);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchGroupedMatmul(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                         cudaStream_t stream, std::string* error);
bool LaunchGroupedMatmulDw(const GroupedMatmulDwParams& params, const GroupedMatmulDwArrays& arrays,
                           cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchGroupedMatmul80(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                           cudaStream_t stream, std::string* error);
bool LaunchGroupedMatmulDw80(const GroupedMatmulDwParams& params,
                             const GroupedMatmulDwArrays& arrays, cudaStream_t stream,
                             std::string* error);
bool LoadGroupedMatmulKernels80(std::string* error);

// Load kernels on the current device: the first function those of both ops, the second those of the
// weight gradient.
bool LoadGroupedMatmulKernels(std::string* error);
bool LoadGroupedMatmulDwKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_
