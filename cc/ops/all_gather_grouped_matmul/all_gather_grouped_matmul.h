// all_gather_grouped_matmul: y[i] = all_gather(x)[source[i] / choices] @ w[e] for the rows i of
// each group e: the tokens of all ranks in the order of experts, times this rank's columns of their
// experts' weights. On one rank it is a permutation and a grouped product in one.
//
// The rows of group e are offsets[e] to offsets[e + 1], and in a group source grows. Rows from
// offsets[groups] on are zeros. An element of source that is no slot stands for a row of zeros.
//
// The call (Params), the layout of its workspace, the CPU back end's body, what a plan for GPUs
// chooses, and the CUDA launcher. Python: jflux/_ops/experts/all_gather_grouped_matmul.py.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_H_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/gathered_tiles.h"
#include "core/layout.h"
#include "core/signal.h"
#include "gpu/senders.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/segments.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kAllGatherGroupedMatmulId{11};

struct AllGatherGroupedMatmulParams {
  int32_t world;
  int64_t tokens;               // of each rank
  int32_t choices;              // slots of a token
  int32_t parts;                // GatheredTiles::parts
  GroupedMatmulParams product;  // m = world tokens choices; neither scaled nor with a tile

  int64_t RowBytes() const { return product.k * SizeOf(product.dtype); }
  int64_t ShardBytes() const { return tokens * RowBytes(); }
  // What ranks must agree on. Each may have other weights, of other widths.
  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kAllGatherGroupedMatmulId))
        .Add(world)
        .Add(tokens)
        .Add(product.k)
        .Add(static_cast<int64_t>(product.dtype))
        .Add(product.groups)  // this and parts: TokenLayout::chunk_bytes
        .Add(parts)
        .Get();
  }
};

// A rank's tokens travel as chunks: byte ranges of its x, each with its own signal. The workspace
// has the tokens of all ranks, as they lie in x; the rank's own place is not used.
//
//   writes  the rank whose tokens they are
//   waits   for the chunks that hold a tile's rows, and the chunks before them of the same rank
//   order   the copy completes, then the signal is stored with release at system scope
//   reset   never (core/signal.h)
struct TokenLayout {
  int32_t world;
  int32_t chunks;  // of a rank
  int64_t chunk_bytes, shard_bytes, row_bytes;

  static TokenLayout Make(const AllGatherGroupedMatmulParams& p, int64_t chunk_bytes) {
    return TokenLayout{p.world, static_cast<int32_t>(CeilDiv(p.ShardBytes(), chunk_bytes)),
                       chunk_bytes, p.ShardBytes(), p.RowBytes()};
  }

  // Offsets into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, int64_t chunk) const {
    return (static_cast<int64_t>(src) * chunks + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t ChunkOffset(int src, int64_t chunk) const {
    return src * shard_bytes + chunk * chunk_bytes;
  }
  JFLUX_HD int64_t ChunkSize(int64_t chunk) const {
    return Min(chunk_bytes, shard_bytes - chunk * chunk_bytes);
  }
  // The chunks before this one hold the first `tokens` tokens of a rank.
  JFLUX_HD int32_t ChunksOf(int64_t tokens) const {
    return static_cast<int32_t>((tokens * row_bytes + chunk_bytes - 1) / chunk_bytes);
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(world, 0), ChunkOffset(world, 0));
  }
};

struct AllGatherGroupedMatmulArrays {
  const void* x;           // [tokens, k]
  const void* w[2];        // [groups, k, n], or [groups, n, k] if transpose_rhs
  const int32_t* offsets;  // [groups + 1]
  const int32_t* source;   // [m]
  void* y;                 // [m, n]
  void* sums[2];           // [m, n] each, or null
};

inline constexpr int64_t kCpuTokenChunkBytes = 64 << 10;

// The CPU back end's body for one rank. False if a wait failed, or if the offsets make no sense;
// ctx.fault has the reason.
bool AllGatherGroupedMatmulCpu(const AllGatherGroupedMatmulParams& params, int64_t chunk_bytes,
                               const AllGatherGroupedMatmulArrays& arrays,
                               const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// A send warp's shared memory: a chunk, which passes through in four boxes, and behind it the table
// of spans. A table of more than 767 spans takes some of the chunk's memory: its last boxes are
// smaller then, or empty.
inline constexpr int32_t kTokenBoxes = 4, kTokenBoxBytes = 3328;
inline constexpr int64_t kMostTokenChunkBytes = kTokenBoxes * kTokenBoxBytes;
inline constexpr int64_t kTokenSendBytes = 16 << 10;
inline constexpr int64_t TokenChunkBytes(int64_t spans) {
  const int64_t table = RoundUp<int64_t>(4 * (spans + 1), 128);
  return Min(kMostTokenChunkBytes, kTokenSendBytes - table);
}
inline TokenLayout CudaLayoutOf(const AllGatherGroupedMatmulParams& p) {
  return TokenLayout::Make(p, TokenChunkBytes(p.product.groups * Max(1, p.world * p.parts)));
}

// CTAs that may send. mean_rows: SegmentedCall's.
inline int32_t TokenSenders(const AllGatherGroupedMatmulParams& p, int64_t mean_rows,
                            const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  const int64_t columns = p.product.n * p.product.Weights();
  return SendingCtas(p.world, Max<int64_t>(1, columns * mean_rows / (p.world * p.tokens)), used);
}

// Why no kernel takes the call; empty if one does.
inline std::string WhyNoKernel(const AllGatherGroupedMatmulParams& p, bool portable) {
  const std::string why = WhyNoSegmentedKernel(p.product, portable);
  if (!why.empty()) return why;
  constexpr int64_t kMostChunks = int64_t{1} << 29;
  return p.ShardBytes() / TokenChunkBytes(kMostSpans) > kMostChunks / p.world
             ? "a dimension is too large"
             : "";
}

// Enqueues the call on `stream`.
bool LaunchAllGatherGroupedMatmul(const AllGatherGroupedMatmulParams& params,
                                  const AllGatherGroupedMatmulArrays& arrays,
                                  const GemmChoice& choice, int32_t senders, int64_t site,
                                  const CudaDevice& device, const SymmetricView& view,
                                  cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchAllGatherGroupedMatmul80(const AllGatherGroupedMatmulParams& params,
                                    const AllGatherGroupedMatmulArrays& arrays,
                                    const GemmChoice& choice, int32_t senders, int64_t site,
                                    const CudaDevice& device, const SymmetricView& view,
                                    cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadAllGatherGroupedMatmulKernels(std::string* error);
bool LoadAllGatherGroupedMatmulKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_H_
