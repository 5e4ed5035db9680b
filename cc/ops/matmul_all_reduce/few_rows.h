// matmul_all_reduce of few rows on two ranks, as in decoding: where the peer's parts lie in the
// heap, and the CPU back end's body.
//
// Protocol. All tiles are one wave, and done at about the same time, so what counts are latencies:
// both ranks compute every tile, send it, rounded, to each other, and add what has come to their
// own, rounded too. a + b is b + a, so both have the same bits, and a part travels one way once.
//
// Deadlock: a tile is sent before its part is awaited, and both ranks compute the tiles in the same
// order. The first tile that some rank has yet to send is being computed there, or is the next to
// be taken, since whoever waits there waits for tiles before it.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_

#include <cstdint>

#include "core/layout.h"
#include "core/platform.h"
#include "core/signal.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"

namespace jflux {

struct FewRowsLayout {
  int32_t slices;  // of the tiles' columns
  int32_t blocks;  // of 64 rows, of a slice
  int64_t block_bytes;

  // slice_n: columns of a slice.
  static FewRowsLayout Make(int32_t slices, int32_t slice_n, int64_t rows, int64_t element_bytes) {
    return FewRowsLayout{slices, static_cast<int32_t>(CeilDiv<int64_t>(rows, 64)),
                         64 * slice_n * element_bytes};
  }

  // Of a block of a slice; offsets into a half's signals and its data.
  JFLUX_HD int64_t SignalOffset(int32_t slice, int block) const {
    return Index(slice, block) * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t BlockOffset(int32_t slice, int block) const {
    return Index(slice, block) * block_bytes;
  }
  WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(slices, 0), BlockOffset(slices, 0));
  }

 private:
  JFLUX_HD int64_t Index(int32_t slice, int block) const {
    return static_cast<int64_t>(slice) * blocks + block;
  }
};

// The CPU back end's layout and body, which is as MatmulAllReduceCpu.
inline FewRowsLayout FewRowsLayoutOf(const MatmulAllReduceParams& p, int32_t slice_n) {
  const MatmulReduceScatterParams& s = p.scatter;
  return FewRowsLayout::Make(static_cast<int32_t>(CeilDiv<int64_t>(s.n, slice_n)), slice_n,
                             s.rows.Total(), SizeOf(s.out_dtype));
}
bool FewRowsCpu(const MatmulAllReduceParams& params, int32_t slice_n,
                const MatmulAllReduceArrays& arrays, const SymmetricView& view, uint32_t epoch,
                const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_
