// The launcher of the CUDA kernel.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_

#include <cuda_runtime.h>

#include <string>

#include "gpu/gemm_config.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ops/matmul_all_to_all/matmul_all_to_all_config.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// What the kernel takes: 16-bit operands and results of one type, rows of whole 16-byte units, and
// tiles whose rows follow each other in x and in y.
inline bool FitsKernel(const MatmulAllToAllParams& p) {
  const bool apart = p.rows.outer > 1 && (p.split_rows || p.concat_rows);
  return SizeOf(p.dtype) == 2 && p.out_dtype == p.dtype && p.k % 8 == 0 && p.n % 8 == 0 &&
         (!apart || p.rows.inner % kGemmTileM == 0);
}

inline AllToAllLayout CudaLayoutOf(const MatmulAllToAllParams& p, const GemmChoice& c) {
  return AllToAllLayout::Make(p, kGemmTileM, c.tile_n);
}

// The workspace that a call takes.
inline WorkspaceLayout MatmulAllToAllWorkspace(const MatmulAllToAllParams& p,
                                               const GemmChoice& choice) {
  return CudaLayoutOf(p, choice).Workspace();
}

// Enqueues the call on `stream`.
bool LaunchMatmulAllToAll(const MatmulAllToAllParams& params, const MatmulAllToAllArrays& arrays,
                          const GemmChoice& choice, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CUDA_H_
