// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "gpu/gemm_config.h"
#include "ops/matmul_all_reduce/few_rows.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// What the kernels take: 16-bit operands and results of one type, rows of whole 16-byte units, and
// few rows or as many whole tiles of rows for each rank.
inline bool FitsKernel(const MatmulAllReduceParams& p) {
  const MatmulReduceScatterParams& s = p.scatter;
  return SizeOf(s.dtype) == 2 && s.out_dtype == s.dtype && s.k % 8 == 0 && s.n % 8 == 0 &&
         (AreFewRows(p) || s.rows.inner % kGemmTileM == 0);
}

inline MatmulAllReduceLayout CudaLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  return MatmulAllReduceLayout::Make(p, kGemmTileM, c.tile_n, /*parts=*/kGemmTileM / 64);
}

inline FewRowsLayout FewRowsLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  const MatmulReduceScatterParams& s = p.scatter;
  return FewRowsLayout::Make(static_cast<int32_t>(CeilDiv<int64_t>(s.n, c.tile_n)) * c.splits,
                             c.tile_n / c.splits, s.rows.Total(), SizeOf(s.out_dtype));
}

// What a choice from elsewhere becomes.
inline GemmChoice Possible(const MatmulAllReduceParams& p, const GemmChoice& c) {
  const MatmulReduceScatterParams& s = p.scatter;
  if (!AreFewRows(p)) return FitSplits(c, s.rows.Total(), s.k, /*most=*/1);
  return FitSplits(GemmChoice{kSharedKTile, 1, 1, c.splits}, s.rows.Total(), s.k, kReduceSplits);
}

// The workspace that a call takes.
inline WorkspaceLayout MatmulAllReduceWorkspace(const MatmulAllReduceParams& p,
                                                const GemmChoice& c) {
  return AreFewRows(p) ? FewRowsLayoutOf(p, c).Workspace() : CudaLayoutOf(p, c).Workspace();
}

// Enqueues the call on `stream`.
bool LaunchMatmulAllReduce(const MatmulAllReduceParams& params, const MatmulAllReduceArrays& arrays,
                           const GemmChoice& choice, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CUDA_H_
