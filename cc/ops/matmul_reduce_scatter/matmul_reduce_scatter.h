// matmul_reduce_scatter: y = reduce_scatter over ranks of x[total rows, k] @ w[k, n]. k is this
// rank's part of the contracted dimension.
//
// The call (Params), its workspace layout, the CPU back end's body, what a plan for GPUs chooses,
// and the CUDA launcher. Python: jflux/_ops/products/matmul_reduce_scatter.py.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_H_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/quantize.h"
#include "core/rows.h"
#include "core/signal.h"
#include "core/tile_order.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

inline constexpr OpId kMatmulReduceScatterId{2};

struct MatmulReduceScatterParams {
  Rows rows;           // of x, before the scatter
  int64_t k;           // columns of this rank's x
  int64_t n;           // columns of w
  DType dtype;         // of x
  DType out_dtype;     // of y, and of the partial products that travel
  bool transpose_rhs;  // w is stored [n, k]
  // Of w, if it is not x's.
  std::optional<DType> w_dtype = {};
  // The format of partial products that travel, with a float32 scale for each kWireBlock columns of
  // a row; empty: out_dtype.
  std::optional<DType> wire = {};

  DType DTypeOfW() const { return w_dtype.value_or(dtype); }
  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMatmulReduceScatterId))
        .Add(rows.world)
        .Add(rows.outer)
        .Add(rows.inner)
        .Add(n)
        .Add(static_cast<int64_t>(out_dtype))
        .Add(wire ? static_cast<int64_t>(*wire) : -1)
        .Get();
  }
  // Of partial products of a tile that travel.
  int64_t BytesOf(int64_t elements) const {
    return wire ? elements + elements / kWireBlock * int64_t{sizeof(float)}
                : elements * SizeOf(out_dtype);
  }
};

// A rank receives from every peer the partial tiles that contain local rows. A tile has one slot
// per source. The contents of a slot are up to its writer and reader: rows on the CPU, register
// fragments on the GPU. `signals_per_slot` signals let several writers finish independently.
struct ReduceScatterLayout {
  int32_t world;
  int32_t tile_m;
  int32_t tiles_n;
  int32_t signals_per_slot;
  int32_t slots;  // per source: the most that any rank receives
  int64_t rows_per_rank;
  int64_t slot_bytes;

  static ReduceScatterLayout Make(const MatmulReduceScatterParams& p, int32_t tile_m,
                                  int32_t tile_n, int32_t signals_per_slot) {
    ReduceScatterLayout l{};
    l.world = p.rows.world;
    l.tile_m = tile_m;
    l.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(p.n, tile_n));
    l.signals_per_slot = signals_per_slot;
    l.rows_per_rank = p.rows.PerRank();
    for (int r = 0; r < l.world; ++r) {
      const int32_t rows =
          LastTileOf(r, l.rows_per_rank, tile_m) - FirstTileOf(r, l.rows_per_rank, tile_m) + 1;
      l.slots = Max(l.slots, rows * l.tiles_n);
    }
    l.slot_bytes = p.BytesOf(static_cast<int64_t>(tile_m) * tile_n);
    return l;
  }

  JFLUX_HD int32_t SlotOf(int dst, Tile tile) const {
    return (tile.m - FirstTileOf(dst, rows_per_rank, tile_m)) * tiles_n + tile.n;
  }
  // Offsets into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, int32_t slot, int signal) const {
    return ((static_cast<int64_t>(src) * slots + slot) * signals_per_slot + signal) *
           static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t SlotOffset(int src, int32_t slot) const {
    return (static_cast<int64_t>(src) * slots + slot) * slot_bytes;
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(world, 0, 0), SlotOffset(world, 0));
  }
};

struct MatmulReduceScatterArrays {
  const void* x;                   // [outer, world * inner, k]
  const void* w;                   // [k, n], or [n, k] if transpose_rhs
  void* y;                         // [outer, inner, n]
  const void* residual = nullptr;  // as y, or null
};

struct ScatterTiling {
  int32_t tile_m = 128;
  int32_t tile_n = 1024;
};

bool MatmulReduceScatterCpu(const MatmulReduceScatterParams& params, const ScatterTiling& tiling,
                            const MatmulReduceScatterArrays& arrays, const SymmetricView& view,
                            uint64_t epoch, const WaitContext& ctx);

// The offsets of a call's signals and data in its workspace, and its signal value.
struct CpuHalf {
  int64_t signals, data;
  Signal signal;
};

// The same for a call whose workspace holds more than `layout`. Calls finished(tile) when the local
// rows of a tile are in arrays.y.
bool ScatterTilesCpu(const MatmulReduceScatterParams& params, const ScatterTiling& tiling,
                     const ReduceScatterLayout& layout, const MatmulReduceScatterArrays& arrays,
                     const SymmetricView& view, const CpuHalf& half, const WaitContext& ctx,
                     const std::function<void(Tile)>& finished);

inline constexpr OpFormats kMatmulReduceScatterFormats{
    kHalves | SetOf(DType::kF32, DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16, DType::kF32)};
// `machine`: the formats of its architecture, or of a main loop.
inline std::string WhyNoKernel(const MatmulReduceScatterParams& p, FormatSet machine) {
  if (p.rows.outer > 1 && p.rows.inner % kGemmTileM != 0) return kStraddlingTiles;
  return WhyNotOperands(kMatmulReduceScatterFormats, machine, p.dtype, p.DTypeOfW(), p.out_dtype,
                        p.k, p.n, p.transpose_rhs);
}

// The same of calls with a wire. Hopper's kernels are few: of 16 bits, and of e4m3.
inline constexpr OpFormats kMatmulReduceScatterWireFormats{kHalves | SetOf(DType::kF8E4M3FN),
                                                           kMatmulReduceScatterFormats.results};
// Those in portable code: all but float32.
inline constexpr FormatSet kScatteredInWire80 =
    kHalves | SetOf(DType::kS8, DType::kF8E4M3FN, DType::kF8E5M2);
inline std::string WhyNoWireKernel(const MatmulReduceScatterParams& p, bool portable,
                                   FormatSet machine) {
  if (!Has(kWireFormats, *p.wire)) return "no kernel has such a wire";
  if (p.n % kWireBlock != 0) {
    return "a wire's blocks are parts of rows: n must be a multiple of " +
           std::to_string(kWireBlock);
  }
  if (!portable && p.rows.PerRank() < 2 * kGemmTileM) {
    return "with a wire ranks have at least " + std::to_string(2 * kGemmTileM) + " rows";
  }
  if (!portable && p.DTypeOfW() != p.dtype) return "with a wire x and w have the same type";
  const std::string why = WhyNoKernel(p, portable ? machine & kScatteredInWire80 : machine);
  if (portable || !why.empty()) return why;
  return WhyNotFormats(kMatmulReduceScatterWireFormats, machine, p.dtype, p.DTypeOfW(),
                       p.out_dtype);
}
// The choice for a call with a wire, with groups of as many rows: its tiles have whole blocks.
inline constexpr GemmChoice ForWire(const GemmChoice& c, Scales scales) {
  return {scales == Scales::kOfBlocks ? kSharedKTile : 256, 2,
          c.cluster_m == 2 ? c.group_m : CeilDiv(c.group_m, 2)};
}

inline ReduceScatterLayout CudaLayoutOf(const MatmulReduceScatterParams& p, const GemmChoice& c) {
  MatmulReduceScatterParams whole_tiles = p;
  whole_tiles.n = RoundUp<int64_t>(p.n, c.tile_n);
  return ReduceScatterLayout::Make(whole_tiles, kGemmTileM, c.tile_n / c.splits,
                                   /*signals_per_slot=*/kGemmTileM / 64);
}

inline GemmChoice ChooseReduceScatter(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                      DType dtype, const Machine& machine,
                                      bool transpose_rhs = false) {
  const int64_t m = world * rows_per_rank, k_bytes = k * SizeOf(dtype);
  if (m <= kGemmTileM) return ChooseFew(m, n, k_bytes, machine, kReduceSplits);
  // Tiles that ranks share wait in the middle of a raster group: at 996 rows on 2 x H200 1.13 of
  // XLA's time, and .92 with tiles of 192 columns.
  TileCosts costs = Loading(kScatterCosts, k_bytes, n * SizeOf(dtype), transpose_rhs);
  if (rows_per_rank % kGemmTileM != 0) costs.shared = 1.2;
  return ChooseGemm(world, rows_per_rank, n, k_bytes, machine, costs);
}

// Store warps that may send at a time; 0: all. params.k is that of all terms. In one raster group,
// or one wave, peers wait for the parts of the last tiles, which nothing hides: then all send.
inline int32_t ReduceScatterSenders(const MatmulReduceScatterParams& p, const GemmChoice& c,
                                    const Machine& machine) {
  const TileGrid grid = GridOf(c, p.rows.Total(), p.n, machine.sm_count);
  const bool hides = c.group_m != 0 && !IsOneWave(c, grid.tiles_m * grid.tiles_n, machine.sm_count);
  if (!hides) return 0;
  const double sent = p.wire ? 0.5 : p.out_dtype == DType::kF32 ? 2 : 1;  // of a 16-bit tile
  return SendingStoreWarps(p.k * SizeOf(p.dtype), sent, machine);
}

// The sum of several products is scattered once: y = scatter(sum_i x_i @ w_i) + bias + residual.
struct MatmulReduceScatterOperands {
  struct Term {
    const void* x;  // [outer, world * inner, k]
    const void* w;  // [k, n], or [n, k] if transpose_rhs
    int64_t k;
  } products[kMaxWeights];
  int32_t terms;
  void* y;               // [outer, inner, n]
  const float* bias;     // [n], or null
  const void* residual;  // as y, or null
  // Of operands of 8 bits, by the k-blocks of all terms: the scales of x's rows [outer, world *
  // inner] and of w's columns [n].
  Scales scales = Scales::kNone;
  const float* x_scale = nullptr;
  const float* w_scale = nullptr;
};

// Enqueues the call on `stream`. params.k is that of all terms. With outer > 1, inner must be a
// multiple of kGemmTileM.
bool LaunchMatmulReduceScatter(const MatmulReduceScatterParams& params,
                               const MatmulReduceScatterOperands& operands, const ProductPlan& plan,
                               int64_t site, const CudaDevice& device, const SymmetricView& view,
                               cudaStream_t stream, std::string* error);

// The same with a wire.
bool LaunchMatmulReduceScatterWire(const MatmulReduceScatterParams& params,
                                   const MatmulReduceScatterOperands& operands,
                                   const ProductPlan& plan, int64_t site, const CudaDevice& device,
                                   const SymmetricView& view, cudaStream_t stream,
                                   std::string* error);

// The same by the portable main loop.
bool LaunchMatmulReduceScatter80(const MatmulReduceScatterParams& params,
                                 const MatmulReduceScatterOperands& operands,
                                 const ProductPlan& plan, int64_t site, const CudaDevice& device,
                                 const SymmetricView& view, cudaStream_t stream,
                                 std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulReduceScatterKernels(std::string* error);
bool LoadMatmulReduceScatterWireKernels(std::string* error);
bool LoadMatmulReduceScatterKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_H_
