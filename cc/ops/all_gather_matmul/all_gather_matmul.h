// all_gather_matmul: y[total rows, n] = all_gather(x)[total rows, k] @ w[k, n].
//
// The call (Params), the CPU back end's workspace layout and its body, what a plan for GPUs
// chooses, and the CUDA launcher. GPU's layout: core/k_panel_layout.h.
// Python: jflux/_ops/products/all_gather_matmul.py.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/activation.h"
#include "core/format.h"
#include "core/k_panel_layout.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "runtime/cuda_device.h"
#include "runtime/product_plan.h"

namespace jflux {

inline constexpr OpId kAllGatherMatmulId{1};

struct AllGatherMatmulParams {
  Rows rows;             // of the gathered x
  int64_t k;             // columns of x
  int64_t n;             // columns of this rank's w
  DType dtype;           // of x and the gathered x
  DType out_dtype;       // of y
  bool transpose_rhs;    // w is stored [n, k]
  bool return_gathered;  // also write the gathered x
  // Of w, if it is not x's.
  std::optional<DType> w_dtype = {};

  DType DTypeOfW() const { return w_dtype.value_or(dtype); }
  int64_t ShardBytes() const { return rows.PerRank() * k * SizeOf(dtype); }
  // `scales`: of x and w. They travel with x.
  uint32_t Signature(Scales scales = Scales::kNone) const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kAllGatherMatmulId))
        .Add(static_cast<int64_t>(scales))
        .Add(rows.world)
        .Add(rows.outer)
        .Add(rows.inner)
        .Add(k)
        .Add(static_cast<int64_t>(dtype))
        .Get();
  }
};

// CPU: a shard travels as `chunks` chunks of `chunk_bytes` (the last may be shorter), each with its
// own signal. Chunks are byte ranges of the shard, independent of rows.
struct AllGatherLayout {
  int32_t world;
  int32_t chunks;
  int64_t chunk_bytes;
  int64_t shard_bytes;

  static AllGatherLayout Make(const AllGatherMatmulParams& p, int64_t chunk_bytes) {
    return AllGatherLayout{p.rows.world, static_cast<int32_t>(CeilDiv(p.ShardBytes(), chunk_bytes)),
                           chunk_bytes, p.ShardBytes()};
  }

  // Offsets into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, int64_t chunk) const {
    return (static_cast<int64_t>(src) * chunks + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  // Shards are contiguous, so the workspace is the gathered array in virtual-row order.
  JFLUX_HD int64_t ChunkOffset(int src, int64_t chunk) const {
    return src * shard_bytes + chunk * chunk_bytes;
  }
  JFLUX_HD int64_t ChunkSize(int64_t chunk) const {
    return Min(chunk_bytes, shard_bytes - chunk * chunk_bytes);
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(world, 0), ChunkOffset(world, 0));
  }
};

// The CPU back end's body for one rank. False if a wait failed; ctx.fault has the reason.
struct AllGatherMatmulArrays {
  const void* x;   // [outer, inner, k]
  const void* w;   // [k, n], or [n, k] if transpose_rhs
  void* y;         // [outer, world * inner, n]
  void* gathered;  // [outer, world * inner, k], or null
};
inline constexpr int64_t kCpuChunkBytes = 256 << 10;
inline constexpr int32_t kCpuTileM = 128;
inline constexpr int32_t kCpuTileN = 1024;

struct CpuTiling {
  int64_t chunk_bytes = kCpuChunkBytes;
  int32_t tile_m = kCpuTileM;
  int32_t tile_n = kCpuTileN;
};

bool AllGatherMatmulCpu(const AllGatherMatmulParams& params, const CpuTiling& tiling,
                        const AllGatherMatmulArrays& arrays, const SymmetricView& view,
                        uint64_t epoch, const WaitContext& ctx);

inline constexpr OpFormats kAllGatherMatmulFormats{
    kHalves | SetOf(DType::kF32, DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16, DType::kF32)};
inline constexpr OpFormats kAllGatherMatmulCpuFormats{
    kWideFormats | SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16, DType::kF32, DType::kS32)};
// `machine`: the formats of its architecture, or of a main loop.
inline std::string WhyNoKernel(const AllGatherMatmulParams& p, FormatSet machine) {
  return WhyNotOperands(kAllGatherMatmulFormats, machine, p.dtype, p.DTypeOfW(), p.out_dtype, p.k,
                        p.n, p.transpose_rhs);
}

inline KPanelLayout CudaLayoutOf(const AllGatherMatmulParams& p) {
  static_assert(KPanelLayout::kPanelRows == kGemmTileM);
  return KPanelLayout::Make(p.rows, p.k * SizeOf(p.dtype));
}

// `scales`: of x and w.
inline WorkspaceLayout CudaWorkspaceOf(const AllGatherMatmulParams& p, Scales scales) {
  return CudaLayoutOf(p).Workspace(scales != Scales::kNone);
}

inline TileCosts AllGatherCosts(DType dtype, int64_t k, int64_t n, bool transpose_rhs, int world,
                                Scales scales) {
  const TileCosts& costs = scales == Scales::kOfBlocks ? kGatherCostsOfBlocks
                           : SizeOf(dtype) == 1        ? kGatherCosts8
                                                       : kGatherCosts;
  return Loading(costs, k * SizeOf(dtype), n * SizeOf(dtype), transpose_rhs, world);
}

inline GemmChoice ChooseAllGather(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  DType dtype, const Machine& machine, bool transpose_rhs = false,
                                  Scales scales = Scales::kNone) {
  const int64_t m = world * rows_per_rank, k_bytes = k * SizeOf(dtype);
  if (m <= kGemmTileM) return ChooseFew(m, n, k_bytes, machine, kGatherSplits);
  const TileCosts costs = AllGatherCosts(dtype, k, n, transpose_rhs, world, scales);
  const GemmChoice c = ChooseGemm(world, rows_per_rank, n, k_bytes, machine, costs);
  return GatherGroups(c, world, rows_per_rank, n, machine);
}

// `wanted`, as a call with these weights can take it. p.n is the columns of all weights.
inline GemmChoice FitWeights(GemmChoice wanted, const AllGatherMatmulParams& p, bool gated,
                             Scales scales, bool quantizes, const Machine& machine) {
  if (quantizes) return ForQuantizing(wanted);
  const int64_t rows = p.rows.Total(), k_bytes = p.k * SizeOf(p.dtype);
  const GemmChoice choice =
      gated ? ForGate(wanted, rows, p.n, k_bytes, machine,
                      AllGatherCosts(p.dtype, p.k, p.n / 2, p.transpose_rhs, p.rows.world, scales))
            : FitSplits(wanted, rows, k_bytes, kGatherSplits);
  return ForScales(choice, scales, /*gates=*/true, kGatherSplits);
}

// CTAs that may send. With few rows all do. (One raster group of 512 or 1024 rows is faster with
// fewer: 2 x H200.)
inline int32_t AllGatherSenders(const AllGatherMatmulParams& p, const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  return p.rows.Total() <= kGemmTileM ? used.sm_count : SendingCtas(p.rows.world, p.n, used);
}

// Several weights share one gather: y_i = activation(all_gather(x) @ w_i + bias_i), or, gated, one
// y_0 = activation(all_gather(x) @ w_0 + bias_0) * (all_gather(x) @ w_1 + bias_1).
struct AllGatherMatmulOperands {
  const void* x;
  struct Product {
    const void* w;  // [k, n], or [n, k] if transpose_rhs
    void* y;        // [outer, world * inner, n]
    int64_t n;
    const float* bias;             // [n], or null
    void* sums;                    // as y, of what the activation is applied to; or null
    const float* scale = nullptr;  // of w: [n], [blocks of n, blocks of k], or [blocks of k, n]
    float* y_scale = nullptr;      // of y that is quantised: [rows, blocks of n]
  } products[kMaxWeights];
  int32_t weights;
  Activation activation;
  bool gated;
  void* gathered;  // or null
  Scales scales = Scales::kNone;
  const float* x_scale = nullptr;           // of x's rows: [rows], or [rows, blocks of k]
  float* gathered_scale = nullptr;          // the same of `gathered`, if x has a scale
  Quantizing quantize = Quantizing::kNone;  // of all y, which params say are float32
};

// Enqueues the call on `stream`. params.n is the columns of all weights.
bool LaunchAllGatherMatmul(const AllGatherMatmulParams& params,
                           const AllGatherMatmulOperands& operands, const ProductPlan& plan,
                           int64_t site, const CudaDevice& device, const SymmetricView& view,
                           cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchAllGatherMatmul80(const AllGatherMatmulParams& params,
                             const AllGatherMatmulOperands& operands, const ProductPlan& plan,
                             int64_t site, const CudaDevice& device, const SymmetricView& view,
                             cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllGatherMatmulKernels(std::string* error);
bool LoadAllGatherMatmulKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_H_
