// grouped_matmul_reduce_scatter: the weighted sum of each token's experts, scattered over the
// ranks. Each rank has a part of every expert's hidden units.
//
//   y[i]       = h[i] @ w[e]                       for the rows i of each group e, rounded
//   part[r][t] = sum over j of weights[t, j] y[destination[t, j]] on rank r, in the order of j, in
//                float32 (float64 for float64), rounded to y's type
//   out[t]     = sum over r of part[r][t]          likewise, in the order of r, rounded once
//
// With a wire parts are not rounded to y's type. Those of other ranks travel quantised in blocks of
// 128 columns (core/quantize.h), with the blocks' scales; the rank's own is added as it is.
//
// The rows of group e are offsets[e] to offsets[e + 1], and in a group source, the inverse of
// destination, grows. Rows of y from offsets[groups] on are zeros. A destination that is no row of
// a group stands for a row of zeros, whatever its weight.
//
// The call (Params), the layout of its workspace, the CPU back end's body, what a plan for GPUs
// chooses, and the CUDA launcher. Python: jflux/_ops/experts/grouped_matmul_reduce_scatter.py.
//
// Protocol. A rank computes tiles in the order of core/scattered_tiles.h. When all rows of some
// tokens are there, it sums them: peers' tokens into slots in the owner's workspace, with a signal
// for each item, then own ones. A wire's scales have places of their own, under the same signal.
//
//   writes  an item's sums and its signal: into the owner's workspace
//   waits   for tiles of this rank; for the same item of every peer, before an own item is summed
//   order   data, then the signal with release at system scope
//   reset   never (core/signal.h). Each rank has a token, so every rank hears from every peer in
//           every call
//
// Deadlock: only own items wait for peers, and they come after all items that peers wait for.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_H_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/quantize.h"
#include "core/scattered_tiles.h"
#include "core/signal.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/segments.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulReduceScatterId{14};

struct GroupedMatmulReduceScatterParams {
  int32_t world;
  int64_t tokens;               // of each rank
  int32_t choices;              // slots of a token
  int32_t parts;                // SegmentedTiles::parts
  int32_t item_tokens;          // SumItems::item_tokens
  GroupedMatmulParams product;  // m = world tokens choices; one weight, and nothing after it
  std::optional<DType> wire = {};

  int64_t RowBytes() const { return product.n * SizeOf(product.out_dtype); }
  // What travels of a token: its sum, and the scales of the sum's blocks.
  int64_t SumBytes() const { return wire ? product.n : RowBytes(); }
  int64_t ScaleBytes() const { return wire ? product.n / kWireBlock * int64_t{sizeof(float)} : 0; }
  SumItems Items(int32_t rank) const {
    return SumItems{world, rank, parts, static_cast<int32_t>(tokens), item_tokens};
  }
  // What ranks must agree on. Each may have other weights, of other k.
  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kGroupedMatmulReduceScatterId))
        .Add(world)
        .Add(tokens)
        .Add(parts)
        .Add(item_tokens)
        .Add(product.n)
        .Add(static_cast<int64_t>(product.out_dtype))
        .Add(wire ? static_cast<int64_t>(*wire) : -1)
        .Get();
  }
};

// A rank receives the sums of its tokens from each peer: a row for each token, as it lies in `out`
// or quantised, and a signal for each item. Scales of all rows are behind the rows.
struct SumLayout {
  int32_t world;
  int32_t items;                   // of a rank's tokens
  int64_t tokens, row_bytes;       // of y and out
  int64_t sum_bytes, scale_bytes;  // of a token

  static SumLayout Make(const GroupedMatmulReduceScatterParams& p) {
    return SumLayout{p.world,      p.Items(0).OfOwner(), p.tokens,
                     p.RowBytes(), p.SumBytes(),         p.ScaleBytes()};
  }

  // Peers are ordered from rank dst + 1 around to rank dst - 1. A rank sends nothing to itself.
  JFLUX_HD int32_t PlaceOf(int dst, int src) const { return (src - dst + world - 1) % world; }
  // Offsets into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int dst, int src, int32_t item) const {
    return (static_cast<int64_t>(PlaceOf(dst, src)) * items + item) *
           static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t RowOffset(int dst, int src, int64_t token) const {
    return (PlaceOf(dst, src) * tokens + token) * sum_bytes;
  }
  JFLUX_HD int64_t ScaleOffset(int dst, int src, int64_t token) const {
    return (world - 1) * tokens * sum_bytes + (PlaceOf(dst, src) * tokens + token) * scale_bytes;
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    const int64_t peers = world - 1;
    return WorkspaceLayout::For(peers * items * static_cast<int64_t>(sizeof(Signal)),
                                peers * tokens * (sum_bytes + scale_bytes));
  }
};

struct GroupedMatmulReduceScatterArrays {
  const void* h;               // [m, k]
  const void* w;               // [groups, k, n], or [groups, n, k] if transpose_rhs
  const void* weights;         // [world tokens, choices], float32; float64 if y is float64
  const int32_t* offsets;      // [groups + 1]
  const int32_t* destination;  // [world tokens, choices]
  const int32_t* source;       // [m]
  void* out;                   // [tokens, n], of y's type
  void* y;                     // [m, n]
};

inline constexpr int32_t kCpuItemTokens = 16;

// The CPU back end's body for one rank. False if a wait failed, or if the offsets make no sense;
// ctx.fault has the reason.
bool GroupedMatmulReduceScatterCpu(const GroupedMatmulReduceScatterParams& params,
                                   const GroupedMatmulReduceScatterArrays& arrays,
                                   const SymmetricView& view, uint64_t epoch,
                                   const WaitContext& ctx);

// Bytes of an item's sums: enough that a signal, and a wait for it, do not count. The last items
// are what nothing hides, so there should be one for each warp.
inline constexpr int64_t kItemBytes = 8192;
inline constexpr int32_t kMostItemTokens = 16;

// The fewest rows of an expert in a segment for several segments of a rank. The sums that they hide
// take a few percent of the product's time, so reading weights once more needs more rows than in a
// gather to be worthwhile.
inline constexpr int64_t kLeastRowsToScatter = 2 * kLeastRowsOfSegment;

inline int32_t ItemTokens(int64_t row_bytes) {
  return static_cast<int32_t>(
      Max<int64_t>(1, Min<int64_t>(kMostItemTokens, kItemBytes / row_bytes)));
}

inline bool AreItemTokens(int64_t n) { return 0 < n && n <= kMostItemTokens; }

// Why no kernel takes the call's wire, or "".
inline std::string WhyNoWire(const GroupedMatmulReduceScatterParams& p) {
  if (!p.wire) return "";
  if (!Has(kWireFormats, *p.wire) || SizeOf(p.product.out_dtype) > 4) {
    return "no kernel has such a wire";
  }
  if (p.product.n % kWireBlock == 0) return "";
  return "a wire's blocks are parts of rows: n must be a multiple of " + std::to_string(kWireBlock);
}

// On Hopper calls with a wire have kernels of the widest tiles alone, which such calls take nearly
// always: where one kernel pays, experts have many rows.
inline constexpr GemmChoice kWireTile{256, 1, 16};
inline constexpr GemmChoice ForWire(const GemmChoice& c) {
  return c.portable || c.tile_n == kWireTile.tile_n ? c : kWireTile;
}

// Enqueues the call on `stream`.
bool LaunchGroupedMatmulReduceScatter(const GroupedMatmulReduceScatterParams& params,
                                      const GroupedMatmulReduceScatterArrays& arrays,
                                      const GemmChoice& choice, int64_t site,
                                      const CudaDevice& device, const SymmetricView& view,
                                      cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchGroupedMatmulReduceScatter80(const GroupedMatmulReduceScatterParams& params,
                                        const GroupedMatmulReduceScatterArrays& arrays,
                                        const GemmChoice& choice, int64_t site,
                                        const CudaDevice& device, const SymmetricView& view,
                                        cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadGroupedMatmulReduceScatterKernels(std::string* error);
bool LoadGroupedMatmulReduceScatterKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_H_
