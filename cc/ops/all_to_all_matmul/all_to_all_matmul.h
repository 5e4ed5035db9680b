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
// The call (Params), the CPU back end's workspace layout and its body. GPU: shard_panels.h;
// launcher in all_to_all_matmul_cuda.h. Python: jflux/_ops/products/all_to_all_matmul.py.
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

#include "core/dtype.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"

namespace jflux {

inline constexpr OpId kAllToAllMatmulId{9};

struct AllToAllMatmulParams {
  // A shard has rows.PerRank() rows, which are [outer, inner]. If split_rows, x's rows are [outer,
  // world, inner]; if concat_rows, y's rows are.
  Rows rows;
  int64_t k;             // columns of a shard
  int64_t n;             // columns of w
  DType dtype;           // of x and w
  DType out_dtype;       // of y
  bool transpose_rhs;    // w is stored [n, KOfW()]
  bool split_rows;       // shards are rows of x; else columns
  bool concat_rows;      // shards are concatenated along rows; else along columns
  bool return_gathered;  // also write all_to_all(x)

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

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_H_
