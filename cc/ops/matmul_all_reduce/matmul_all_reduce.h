// matmul_all_reduce: y = psum over ranks of x[rows, k] @ w[k, n], the same on all ranks. k is this
// rank's part of the contracted dimension.
//
// The call (Params), its workspace layout, the CPU back end's body, what a plan for GPUs chooses,
// and the CUDA launcher. Python: jflux/_ops/products/matmul_all_reduce.py.
//
// Protocol. First matmul_reduce_scatter: each rank owns the same number of rows of the sum and
// receives the peers' partial tiles of them. A finished local tile goes to y and to a slot in every
// peer's workspace, with a signal. Idle warps copy the peers' finished tiles to y. Peers cannot
// write to y, which XLA owns.
//
// Deadlock: computing and summing tiles waits for no finished tile, so matmul_reduce_scatter's
// argument holds (core/tile_order.h), and eventually every finished tile has been sent.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_

#include <cstdint>
#include <string>

#include "core/layout.h"
#include "core/platform.h"
#include "core/signal.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

inline constexpr OpId kMatmulAllReduceId{8};

struct MatmulAllReduceParams {
  MatmulReduceScatterParams scatter;  // rows.outer is 1

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMatmulAllReduceId))
        .Add(scatter.rows.world)
        .Add(scatter.rows.inner)
        .Add(scatter.n)
        .Add(static_cast<int64_t>(scatter.out_dtype))
        .Get();
  }
};

// A slot for each partial tile, then a slot for each finished tile, with the same sizes and
// numbering.
struct MatmulAllReduceLayout {
  ReduceScatterLayout partial;

  static MatmulAllReduceLayout Make(const MatmulAllReduceParams& p, int32_t tile_m, int32_t tile_n,
                                    int32_t signals_per_slot) {
    return {ReduceScatterLayout::Make(p.scatter, tile_m, tile_n, signals_per_slot)};
  }

  // Offsets of a tile that `src` has finished, into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, Tile tile, int signal) const {
    return partial.SignalOffset(partial.world + src, partial.SlotOf(src, tile), signal);
  }
  JFLUX_HD int64_t SlotOffset(int src, Tile tile) const {
    return partial.SlotOffset(partial.world + src, partial.SlotOf(src, tile));
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(partial.SignalOffset(2 * partial.world, 0, 0),
                                partial.SlotOffset(2 * partial.world, 0));
  }
};

struct MatmulAllReduceArrays {
  const void* x;         // [rows, k]
  const void* w;         // [k, n], or [n, k] if transpose_rhs
  void* y;               // [rows, n]
  const void* residual;  // as y, the same on all ranks; or null
  // Of operands of 8 bits, on GPUs: the scales of x's rows and of w's columns.
  Scales scales = Scales::kNone;
  const float* x_scale = nullptr;
  const float* w_scale = nullptr;
};

// The CPU back end's body for one rank. False if a wait failed; ctx.fault has the reason.
bool MatmulAllReduceCpu(const MatmulAllReduceParams& params, const ScatterTiling& tiling,
                        const MatmulAllReduceArrays& arrays, const SymmetricView& view,
                        uint64_t epoch, const WaitContext& ctx);

// matmul_all_reduce of few rows on two ranks, as in decoding: workspace layout and the CPU back
// end's body.
//
// Protocol. All tiles form one wave and finish at about the same time, so latency dominates. Both
// ranks compute every tile, send it, rounded, to each other, and add the peer's tile to their own,
// rounded alike. a + b equals b + a, so both ranks get the same bits, and a partial tile crosses
// the link once.
//
//   writes  each rank: the peer's workspace, one signal per m64 block
//   waits   each rank, for the peer's m64 block of the same slice
//   order   data, then the signal with release at system scope
//   reset   never: core/signal.h
//
// Deadlock: a tile is sent before the peer's tile is awaited, and both ranks compute the tiles in
// the same order. The first tile that some rank has not sent is running or next there: a wait is
// only for earlier tiles.

struct FewRowsLayout {
  int32_t slices;      // slices of the columns
  int32_t m64_blocks;  // m64 blocks of a slice
  int64_t m64_bytes;

  // slice_n: columns of a slice.
  static FewRowsLayout Make(int32_t slices, int32_t slice_n, int64_t rows, int64_t element_bytes) {
    return FewRowsLayout{slices, static_cast<int32_t>(CeilDiv<int64_t>(rows, 64)),
                         64 * slice_n * element_bytes};
  }

  // Offsets of an m64 block of a slice, into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int32_t slice, int m64) const {
    return Index(slice, m64) * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t M64Offset(int32_t slice, int m64) const { return Index(slice, m64) * m64_bytes; }
  WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(slices, 0), M64Offset(slices, 0));
  }

 private:
  JFLUX_HD int64_t Index(int32_t slice, int m64) const {
    return static_cast<int64_t>(slice) * m64_blocks + m64;
  }
};

// The CPU back end's layout, and its body, which has the parameters of MatmulAllReduceCpu.
inline FewRowsLayout FewRowsLayoutOf(const MatmulAllReduceParams& p, int32_t slice_n) {
  const MatmulReduceScatterParams& s = p.scatter;
  return FewRowsLayout::Make(static_cast<int32_t>(CeilDiv<int64_t>(s.n, slice_n)), slice_n,
                             s.rows.Total(), SizeOf(s.out_dtype));
}
bool FewRowsCpu(const MatmulAllReduceParams& params, int32_t slice_n,
                const MatmulAllReduceArrays& arrays, const SymmetricView& view, uint64_t epoch,
                const WaitContext& ctx);

// Whether the protocol is that of FewRowsLayout: all rows are one tile, of two ranks.
inline bool AreFewRows(int world, int64_t rows) { return world == 2 && rows <= kGemmTileM; }
inline bool AreFewRows(const MatmulAllReduceParams& p) {
  return AreFewRows(p.scatter.rows.world, p.scatter.rows.Total());
}

inline constexpr OpFormats kMatmulAllReduceFormats{
    kHalves | SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16)};
inline std::string WhyNoKernel(const MatmulAllReduceParams& p, bool portable) {
  const MatmulReduceScatterParams& s = p.scatter;
  if (!AreFewRows(p) && s.rows.inner % kGemmTileM != 0) {
    return "each rank must have a multiple of 128 rows (two ranks: or up to 128 rows in all)";
  }
  return WhyNotOperands(kMatmulAllReduceFormats, FormatsOfLoop(portable), s.dtype, s.DTypeOfW(),
                        s.out_dtype, s.k, s.n, s.transpose_rhs);
}

inline MatmulAllReduceLayout CudaLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  return MatmulAllReduceLayout::Make(p, kGemmTileM, c.tile_n, /*signals_per_slot=*/kGemmTileM / 64);
}

// The portable main loop sends whole tiles.
inline FewRowsLayout FewRowsLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  const MatmulReduceScatterParams& s = p.scatter;
  return FewRowsLayout::Make(static_cast<int32_t>(CeilDiv<int64_t>(s.n, c.tile_n)) * c.splits,
                             c.tile_n / c.splits, c.portable ? kGemmTileM : s.rows.Total(),
                             SizeOf(s.out_dtype));
}

// The workspaces that a call takes, on a CPU and on a GPU.
inline WorkspaceLayout MatmulAllReduceCpuWorkspace(const MatmulAllReduceParams& p) {
  const ScatterTiling tiling;
  return AreFewRows(p)
             ? FewRowsLayoutOf(p, tiling.tile_n).Workspace()
             : MatmulAllReduceLayout::Make(p, tiling.tile_m, tiling.tile_n, 1).Workspace();
}
inline WorkspaceLayout MatmulAllReduceWorkspace(const MatmulAllReduceParams& p,
                                                const GemmChoice& c) {
  return AreFewRows(p) ? FewRowsLayoutOf(p, c).Workspace() : CudaLayoutOf(p, c).Workspace();
}

// Measured as kScatterCosts.
inline constexpr TileCosts kReduceCosts{1.04, kScatterCosts.narrow, kExposed};

// Up to 2048 rows are one raster group over w: then tiles are finished, and sent to the peers, from
// the beginning on. More are shorter raster groups, faster at 4096 (docs/experiments/0027); and on
// two ranks, from 1024 rows on, tiles of 128 and 256 columns: the peer's rows come first then, and
// travel behind the own ones (docs/experiments/0051).
inline GemmChoice ChooseAllReduce(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  DType dtype, const Machine& machine, bool transpose_rhs = false) {
  const int64_t m = world * rows_per_rank, k_bytes = k * SizeOf(dtype);
  if (AreFewRows(world, m)) {
    return ChooseSplits(GemmChoice{kSharedKTile, 1, 1}, m, n, k_bytes, machine, kReduceSplits);
  }
  GemmChoice c = ChooseGemm(world, rows_per_rank, n, k_bytes, machine,
                            Loading(kReduceCosts, k_bytes, n * SizeOf(dtype), transpose_rhs));
  const bool peers_first = world == 2 && m >= 1024 && c.tile_n % 128 == 0;
  if (m <= 2048 && !peers_first) c.group_m = 0;
  return c;
}

// What a choice from elsewhere becomes. Few rows have kernels for one tile only.
inline GemmChoice Possible(const MatmulAllReduceParams& p, const GemmChoice& c,
                           Scales scales = Scales::kNone) {
  const MatmulReduceScatterParams& s = p.scatter;
  const bool few = AreFewRows(p);
  const GemmChoice tile = few ? GemmChoice{kSharedKTile, 1, 1, c.splits} : c;
  const GemmChoice fit =
      FitSplits(tile, s.rows.Total(), s.k * SizeOf(s.dtype), few ? kReduceSplits : /*most=*/1);
  return ForFew(ForScales(fit, scales), s.dtype);
}

// Store warps that may send at a time; 0: all. A finished tile goes to all peers. With fewer than
// 16 it was slower (2 x H200). Few rows are one wave, and all send.
inline int32_t AllReduceSenders(const MatmulAllReduceParams& p, const Machine& machine) {
  if (AreFewRows(p)) return 0;
  const MatmulReduceScatterParams& s = p.scatter;
  const int32_t warps = SendingStoreWarps(s.k * SizeOf(s.dtype), s.rows.world - 1, machine);
  return warps == 0 ? 0 : Min<int32_t>(Max(16, warps), MostSenders(kOfStoreWarp, machine));
}

// The product whose sums `rank` scatters into its rows of y.
inline MatmulReduceScatterOperands OwnRowsOf(const MatmulAllReduceParams& params,
                                             const MatmulAllReduceArrays& arrays, int rank) {
  const MatmulReduceScatterParams& p = params.scatter;
  const int64_t own = rank * p.rows.PerRank() * p.n * SizeOf(p.out_dtype);  // bytes
  MatmulReduceScatterOperands scattered{};
  scattered.products[0] = {arrays.x, arrays.w, p.k};
  scattered.terms = 1;
  scattered.y = static_cast<char*>(arrays.y) + own;
  if (arrays.residual != nullptr) {
    scattered.residual = static_cast<const char*>(arrays.residual) + own;
  }
  return scattered;
}

// Enqueues the call on `stream`.
bool LaunchMatmulAllReduce(const MatmulAllReduceParams& params, const MatmulAllReduceArrays& arrays,
                           const ProductPlan& plan, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchMatmulAllReduce80(const MatmulAllReduceParams& params,
                             const MatmulAllReduceArrays& arrays, const ProductPlan& plan,
                             int64_t site, const CudaDevice& device, const SymmetricView& view,
                             cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMatmulAllReduceKernels(std::string* error);
bool LoadMatmulAllReduceKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
