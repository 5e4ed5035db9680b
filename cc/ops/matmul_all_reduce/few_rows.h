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
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_

#include <cstdint>

#include "core/layout.h"
#include "core/platform.h"
#include "core/signal.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"

namespace jflux {

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

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_FEW_ROWS_H_
