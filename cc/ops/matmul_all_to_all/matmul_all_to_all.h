// matmul_all_to_all: y = all_to_all(x[rows, k] @ w[k, columns]). Each rank receives one shard of
// every rank's product and concatenates them. Nothing is summed.
//
// The call (Params), its workspace layout, the CPU back end's body, what a plan for GPUs chooses,
// and the CUDA launcher. Python: jflux/_ops/products/matmul_all_to_all.py.
//
// Protocol. A rank computes the product tile by tile, the peers' shards first (core/shard_tiles.h).
// Local tiles go straight to y.
//
//   writes  a tile's data and its signal: into its slot in the owner's workspace
//   waits   idle warps (CPU: the same thread, at the end), for the peers' tiles, in the order in
//           which they are sent; they copy them to y, which XLA owns and peers cannot write to
//   order   data, then the signal with release at system scope
//   reset   never (core/signal.h). Shards are never empty, so every rank hears from every peer in
//           every call
//
// Deadlock: only these copies wait for peers, and nothing that a peer waits for comes after one.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_H_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/shard_tiles.h"
#include "core/signal.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

inline constexpr OpId kMatmulAllToAllId{7};

struct MatmulAllToAllParams {
  // A shard has rows.PerRank() rows, which are [outer, inner]. If split_rows, x's rows are [outer,
  // world, inner]; if concat_rows, y's rows are.
  Rows rows;
  int64_t k;           // columns of x
  int64_t n;           // columns of a shard
  DType dtype;         // of x
  DType out_dtype;     // of y, and of the tiles in the workspace
  bool transpose_rhs;  // w is stored [columns, k]
  bool split_rows;     // shards are rows of the product; else columns
  bool concat_rows;    // y's shards are concatenated along rows; else along columns
  // Of w, if it is not x's.
  std::optional<DType> w_dtype = {};

  DType DTypeOfW() const { return w_dtype.value_or(dtype); }
  JFLUX_HD int64_t RowsOfX() const { return split_rows ? rows.Total() : rows.PerRank(); }
  JFLUX_HD int64_t ColumnsOfW() const { return split_rows ? n : rows.world * n; }
  // The row of x from which row r of the shard for `dst` is computed.
  JFLUX_HD int64_t RowOfX(int dst, int64_t r) const {
    return split_rows ? rows.Actual(dst * rows.PerRank() + r) : r;
  }
  JFLUX_HD int64_t ColumnOfW(int dst, int64_t c) const { return split_rows ? c : dst * n + c; }
  // The element of y at which row r of the shard from `src` starts.
  JFLUX_HD int64_t OffsetInY(int src, int64_t r) const {
    return concat_rows ? rows.Actual(src * rows.PerRank() + r) * n : (r * rows.world + src) * n;
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMatmulAllToAllId))
        .Add(rows.world)
        .Add(rows.outer)
        .Add(rows.inner)
        .Add(n)
        .Add(static_cast<int64_t>(out_dtype))
        .Add(split_rows)
        .Add(concat_rows)
        .Get();
  }
};

// A rank receives the tiles of its shard from each peer: a slot and a signal for each. The contents
// of a slot are up to its writer and reader: rows on the CPU, TMA boxes on the GPU.
struct AllToAllLayout {
  int32_t world;
  int32_t tiles_m, tiles_n;  // of a shard
  int64_t slot_bytes;

  static AllToAllLayout Make(const MatmulAllToAllParams& p, int32_t tile_m, int32_t tile_n) {
    return AllToAllLayout{p.rows.world,
                          static_cast<int32_t>(CeilDiv<int64_t>(p.rows.PerRank(), tile_m)),
                          static_cast<int32_t>(CeilDiv<int64_t>(p.n, tile_n)),
                          static_cast<int64_t>(tile_m) * tile_n * SizeOf(p.out_dtype)};
  }

  // Slots in the workspace of `dst` are ordered by source, from rank dst + 1 around to rank dst -
  // 1. A rank sends nothing to itself.
  JFLUX_HD int64_t SlotOf(int dst, int src, int32_t m, int32_t n) const {
    const int place = (src - dst + world - 1) % world;
    return (static_cast<int64_t>(place) * tiles_m + m) * tiles_n + n;
  }
  JFLUX_HD int64_t Slots() const { return static_cast<int64_t>(world - 1) * tiles_m * tiles_n; }
  // Offsets into the signals and into the data of a half.
  JFLUX_HD static int64_t SignalOffset(int64_t slot) {
    return slot * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t SlotOffset(int64_t slot) const { return slot * slot_bytes; }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(Slots()), SlotOffset(Slots()));
  }
};

struct MatmulAllToAllArrays {
  const void* x;  // [RowsOfX(), k]
  const void* w;  // [k, ColumnsOfW()], or [ColumnsOfW(), k] if transpose_rhs
  void* y;        // [world * rows.PerRank(), n], or [rows.PerRank(), world * n]
  // Of operands of 8 bits, on GPUs: the scales of x's rows and of w's columns.
  Scales scales = Scales::kNone;
  const float* x_scale = nullptr;
  const float* w_scale = nullptr;
};

struct ShardTiling {
  int32_t tile_m = 128;
  int32_t tile_n = 1024;
};

// The CPU back end's body for one rank. False if a wait failed; ctx.fault has the reason.
bool MatmulAllToAllCpu(const MatmulAllToAllParams& params, const ShardTiling& tiling,
                       const MatmulAllToAllArrays& arrays, const SymmetricView& view,
                       uint64_t epoch, const WaitContext& ctx);

inline constexpr OpFormats kMatmulAllToAllFormats{
    kHalves | SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16)};
inline std::string WhyNoKernel(const MatmulAllToAllParams& p, bool portable,
                               Scales scales = Scales::kNone) {
  if (scales == Scales::kOfBlocks && !p.split_rows && p.n % kScaleBlock != 0) {
    return "shards of columns must be whole blocks of scales";
  }
  return WhyNotShards(kMatmulAllToAllFormats, FormatsOfLoop(portable), p, p.DTypeOfW());
}

inline AllToAllLayout CudaLayoutOf(const MatmulAllToAllParams& p, const GemmChoice& c) {
  return AllToAllLayout::Make(p, kGemmTileM, c.tile_n);
}

inline ShardGrid ShardGridOf(const MatmulAllToAllParams& p, const GemmChoice& c, int sm_count) {
  const TileGrid shard = GridOf(c, p.rows.PerRank(), p.n, sm_count);
  return ShardGrid{p.rows.world, shard.tiles_m, shard.tiles_n,
                   c.group_m == 0 ? shard.tiles_m : c.group_m};
}

// The configuration for `world` shards of `rows` rows and n columns. Each shard has whole tiles of
// its own, so the estimate counts the padding of every shard's last tiles.
inline GemmChoice ChooseAllToAll(int world, int64_t rows, int64_t n, int64_t k, DType dtype,
                                 const Machine& machine, bool transpose_rhs = false) {
  const int64_t k_bytes = k * SizeOf(dtype);
  const TileCosts costs = Loading(kScatterCosts, k_bytes, n * SizeOf(dtype), transpose_rhs);
  return ChooseForShards(world, rows, n, k_bytes, machine, costs);
}

// What a choice from elsewhere becomes.
inline GemmChoice Possible(const MatmulAllToAllParams& p, const GemmChoice& c, Scales scales) {
  const GemmChoice whole = FitSplits(c, p.rows.Total(), p.k * SizeOf(p.dtype), /*most=*/1);
  return ForFew(ForScales(whole, scales), p.dtype);
}

// Store warps that may send at a time; 0: all. All do if the tiles are one wave.
inline int32_t AllToAllSenders(const MatmulAllToAllParams& p, const GemmChoice& c,
                               const Machine& machine) {
  const int32_t tiles = ShardGridOf(p, c, machine.sm_count).Total();
  if (IsOneWave(c, tiles, machine.sm_count)) return 0;
  return SendingStoreWarps(p.k * SizeOf(p.dtype), 1, machine);
}

// Enqueues the call on `stream`.
bool LaunchMatmulAllToAll(const MatmulAllToAllParams& params, const MatmulAllToAllArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchMatmulAllToAll80(const MatmulAllToAllParams& params, const MatmulAllToAllArrays& arrays,
                            const ProductPlan& plan, int64_t site, const CudaDevice& device,
                            const SymmetricView& view, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulAllToAllKernels(std::string* error);
bool LoadMatmulAllToAllKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_H_
