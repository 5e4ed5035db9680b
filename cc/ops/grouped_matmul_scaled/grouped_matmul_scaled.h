// grouped_matmul of operands of 8 bits with scales, and its weight gradient, of operands with
// scales of vectors or of blocks. Their kernels are grouped_matmul's, of weights [groups, n, k],
// and of transposes; there are no bodies for CPUs.
//
// Python: jflux/_ops/products/_grouped_scaled.py, _grouped_dw_scaled.py.
#ifndef JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_
#define JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_

#include <string>

#include "core/group_tiles.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulScaledId{44}, kGroupedMatmulDwScaledId{48};
inline constexpr OpFormats kGroupedScaledFormats{
    SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16, DType::kF32)};
inline constexpr OpFormats kGroupedDwScaledFormats{SetOf(DType::kF8E4M3FN),
                                                   SetOf(DType::kBF16, DType::kF32)};

// Why no kernel takes the call, whose w is of another format perhaps; empty if one does.
std::string WhyNoGroupedMatmulScaledKernel(const GroupedMatmulParams& params, DType w_dtype);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchGroupedMatmulScaled(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                               cudaStream_t stream, std::string* error);

// The same of the weight gradient (GroupedMatmulDwArrays).
std::string WhyNoGroupedMatmulDwScaledKernel(const GroupedMatmulDwParams& params);
bool LaunchGroupedMatmulDwScaled(const GroupedMatmulDwParams& params,
                                 const GroupedMatmulDwArrays& arrays, cudaStream_t stream,
                                 std::string* error);

// Load kernels on the current device: the first function those of both ops, the second those of the
// weight gradient.
bool LoadGroupedMatmulScaledKernels(std::string* error);
bool LoadGroupedMatmulDwScaledKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_
