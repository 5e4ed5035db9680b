// all_to_all_matmul: y = all_to_all(x) @ w. Each rank receives one shard of every rank's x,
// concatenates them, and multiplies. The transpose of matmul_all_to_all.
//
//   split rows, concatenate columns    x [outer, world, inner, k]  w [world * k, n]
//                                      y [outer, inner, n]
//   split columns, concatenate rows    x [outer, inner, world * k] w [k, n]
//                                      y [outer, world, inner, n]
//
// Rows to rows and columns to columns differ only in strides.
//
// The call (Params), the CPU back end's workspace layout and its body, what a plan for GPUs
// chooses, and the CUDA launcher. GPU's layout: core/shard_panels.h.
// Python: jflux/_ops/products/all_to_all_matmul.py.
//
//   writes  each rank: its shards of x, in chunks, into the workspaces of the ranks they are for; a
//           signal after each chunk
//   waits   a tile, for the chunks with its rows: of one rank's shard if rows are concatenated, of
//           every rank's if columns are
//   order   data, then the signal with release at system scope
//   reset   never (core/signal.h). Shards are never empty and every tile is computed, so every rank
//           hears from every peer in every call
//
// Deadlock: senders wait for no peer. Only tiles wait, for rows that senders send.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_H_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/shard_panels.h"
#include "core/signal.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

inline constexpr OpId kAllToAllMatmulId{9};

struct AllToAllMatmulParams {
  // A shard has rows.PerRank() rows, which are [outer, inner]. If split_rows, x's rows are [outer,
  // world, inner]; if concat_rows, y's rows are.
  Rows rows;
  int64_t k;             // columns of a shard
  int64_t n;             // columns of w
  DType dtype;           // of x
  DType out_dtype;       // of y
  bool transpose_rhs;    // w is stored [n, KOfW()]
  bool split_rows;       // shards are rows of x; else columns
  bool concat_rows;      // shards are concatenated along rows; else along columns
  bool return_gathered;  // also write all_to_all(x)
  // Of w, if it is not x's.
  std::optional<DType> w_dtype = {};

  DType DTypeOfW() const { return w_dtype.value_or(dtype); }
  JFLUX_HD int64_t RowsOfX() const { return split_rows ? rows.Total() : rows.PerRank(); }
  JFLUX_HD int64_t ColumnsOfX() const { return split_rows ? k : rows.world * k; }
  JFLUX_HD int64_t RowsOfY() const { return concat_rows ? rows.Total() : rows.PerRank(); }
  // The contracted dimension.
  JFLUX_HD int64_t KOfW() const { return concat_rows ? k : rows.world * k; }
  // The element of x at which row r of the shard for `dst` starts.
  JFLUX_HD int64_t OffsetInX(int dst, int64_t r) const {
    return split_rows ? rows.Actual(dst * rows.PerRank() + r) * k : (r * rows.world + dst) * k;
  }
  // The row of y, and of all_to_all(x), of the product's row r. With concat_rows, the product's
  // rows are virtual rows (core/rows.h), so that each shard's rows are contiguous.
  JFLUX_HD int64_t RowOfY(int64_t r) const { return concat_rows ? rows.Actual(r) : r; }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kAllToAllMatmulId))
        .Add(rows.world)
        .Add(rows.outer)
        .Add(rows.inner)
        .Add(k)
        .Add(static_cast<int64_t>(dtype))
        .Add(split_rows)
        .Add(concat_rows)
        .Get();
  }
};

// CPU: the workspace is all_to_all(x) with the product's rows, so that tiles read one array; a rank
// also sends itself its local shard. A chunk is `chunk_rows` rows of a shard; the last may have
// fewer.
struct AllToAllMatmulLayout {
  int32_t world;
  int32_t chunks;      // of a shard
  int64_t chunk_rows;  // at least 1
  int64_t rows_per_rank;
  int64_t row_bytes;  // of a shard
  bool concat_rows;

  static AllToAllMatmulLayout Make(const AllToAllMatmulParams& p, int64_t chunk_bytes) {
    AllToAllMatmulLayout l{};
    l.world = p.rows.world;
    l.rows_per_rank = p.rows.PerRank();
    l.row_bytes = p.k * SizeOf(p.dtype);
    l.chunk_rows = Max<int64_t>(1, chunk_bytes / l.row_bytes);
    l.chunks = static_cast<int32_t>(CeilDiv(l.rows_per_rank, l.chunk_rows));
    l.concat_rows = p.concat_rows;
    return l;
  }

  // Offsets into the signals and into the data of a half.
  int64_t SignalOffset(int src, int64_t chunk) const {
    return (static_cast<int64_t>(src) * chunks + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  int64_t RowOffset(int src, int64_t r) const {
    return (concat_rows ? src * rows_per_rank + r : r * world + src) * row_bytes;
  }
  WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(world, 0), world * rows_per_rank * row_bytes);
  }
};

struct AllToAllMatmulArrays {
  const void* x;   // [RowsOfX(), ColumnsOfX()]
  const void* w;   // [KOfW(), n], or [n, KOfW()] if transpose_rhs
  void* y;         // [RowsOfY(), n]
  void* gathered;  // [RowsOfY(), KOfW()], or null
  // Of operands of 8 bits, on GPUs: the scales of all_to_all(x)'s rows and of w's columns. Where
  // columns are concatenated, entries of k are there twice, one after the other: a rank begins with
  // its own.
  Scales scales = Scales::kNone;
  const float* x_scale = nullptr;
  const float* w_scale = nullptr;
};

struct AllToAllMatmulTiling {
  int64_t chunk_bytes = 256 << 10;
  int32_t tile_m = 128;
  int32_t tile_n = 1024;
};

// The CPU back end's body for one rank. False if a wait failed; ctx.fault has the reason.
bool AllToAllMatmulCpu(const AllToAllMatmulParams& params, const AllToAllMatmulTiling& tiling,
                       const AllToAllMatmulArrays& arrays, const SymmetricView& view,
                       uint64_t epoch, const WaitContext& ctx);

// k: the columns of a shard of x.
inline constexpr OpFormats kAllToAllMatmulFormats{
    kHalves | SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16)};
inline std::string WhyNoKernel(const AllToAllMatmulParams& p, bool portable,
                               Scales scales = Scales::kNone) {
  if (scales == Scales::kOfBlocks && !p.concat_rows && p.k % kScaleBlock != 0) {
    return "shards of columns must be whole blocks of scales";
  }
  return WhyNotShards(kAllToAllMatmulFormats, FormatsOfLoop(portable), p, p.DTypeOfW());
}

// Entries of k of a row's scale.
inline int64_t ScaleEntries(const AllToAllMatmulParams& p) {
  return (p.concat_rows ? 1 : 2) * CeilDiv<int64_t>(p.KOfW(), kScaleBlock);
}

inline ShardPanels CudaLayoutOf(const AllToAllMatmulParams& p) {
  static_assert(KPanelLayout::kPanelRows == kGemmTileM);
  return ShardPanels::Make(p.rows.world, p.rows.PerRank(), p.k * SizeOf(p.dtype));
}

inline ShardTileOrder TileOrderOf(const AllToAllMatmulParams& p, const GemmChoice& c,
                                  int sm_count) {
  const TileGrid shard = GridOf(c, p.rows.PerRank(), p.n, sm_count);
  return ShardTileOrder{p.concat_rows ? p.rows.world : 1, shard.tiles_m, shard.tiles_n,
                        c.group_m == 0 ? shard.tiles_m : c.group_m};
}

// Limits the tile rows of a raster group if the all-to-all concatenates columns. The first wave of
// tiles begins with the own term, while the peers' parts of the raster group arrive. The last term
// begins when (world - 1) / world of the wave are over. By then (world - 1) / world of the g rows
// of the raster group must have arrived:
//
//   g * columns <= SMs * kGemmTileM * tile_n
//
// `columns`: a row arrives in the time of its product with this many columns of w. The limit does
// not depend on n: a raster group over more columns has more waves, each as long. All raster groups
// have one size. Otherwise nearly all rows would be in the first one (docs/experiments/0034).
inline GemmChoice TermGroups(GemmChoice c, int world, int64_t rows, const Machine& machine) {
  if (world == 1) return c;
  const double columns = kReferenceColumns * machine.sm_count / kReferenceSms / machine.LinkShare();
  const double wave = static_cast<double>(machine.sm_count) * kGemmTileM * c.tile_n;
  const double most = wave / columns / (kGemmTileM * c.cluster_m);
  const auto limit = static_cast<int64_t>(Min(most, static_cast<double>(c.group_m)));
  const int64_t tiles = CeilDiv<int64_t>(rows, kGemmTileM * c.cluster_m);
  c.group_m = static_cast<int32_t>(EvenGroup(tiles, limit));
  return c;
}

// rows, k: of a shard. If the all-to-all concatenates rows, each shard is rounded up to whole
// tiles, and the estimate counts the rounded rows.
inline GemmChoice ChooseAllToAllMatmul(int world, int64_t rows, int64_t k, int64_t n, DType dtype,
                                       bool concat_rows, const Machine& machine,
                                       bool transpose_rhs = false) {
  const int64_t k_bytes = k * SizeOf(dtype);
  const int64_t shards = concat_rows ? world : 1, sum = concat_rows ? k_bytes : world * k_bytes;
  if (shards == 1 && rows <= kGemmTileM) return ChooseFew(rows, n, sum, machine, /*most=*/1);
  const TileCosts costs = Loading(kGatherCosts, k_bytes, n * SizeOf(dtype), transpose_rhs, world);
  const GemmChoice best = ChooseForShards(shards, rows, n, sum, machine, costs);
  return concat_rows ? GatherGroups(best, world, rows, n, machine)
                     : TermGroups(best, world, rows, machine);
}

// What a choice from elsewhere becomes.
inline GemmChoice Possible(const AllToAllMatmulParams& p, const GemmChoice& c, Scales scales) {
  const GemmChoice whole = FitSplits(c, p.RowsOfY(), p.KOfW() * SizeOf(p.dtype), /*most=*/1);
  return ForFew(ForScales(whole, scales), p.dtype);
}

// How many CTAs send: as many as in an all-gather with the same world and n, since a rank sends as
// many bytes per operation. With few rows all CTAs send.
inline int32_t AllToAllMatmulSenders(const AllToAllMatmulParams& p, const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  return p.rows.PerRank() <= kGemmTileM ? used.sm_count : SendingCtas(p.rows.world, p.n, used);
}

// Enqueues the call on `stream`.
bool LaunchAllToAllMatmul(const AllToAllMatmulParams& params, const AllToAllMatmulArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchAllToAllMatmul80(const AllToAllMatmulParams& params, const AllToAllMatmulArrays& arrays,
                            const ProductPlan& plan, int64_t site, const CudaDevice& device,
                            const SymmetricView& view, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllToAllMatmulKernels(std::string* error);
bool LoadAllToAllMatmulKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_H_
