// grouped_matmul of operands of 8 bits with scales. Its kernels are grouped_matmul's, of weights
// [groups, n, k], in both main loops; there are no bodies for CPUs. Portable ones take scales of
// sums, and quantise nothing.
//
// Python: jflux/_ops/products/_grouped_scaled.py.
#ifndef JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_
#define JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_

#include <string>

#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulScaledId{44};
inline constexpr OpFormats kGroupedScaledFormats{
    SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
    SetOf(DType::kF16, DType::kBF16, DType::kF32)};

// Why no kernel takes the call, whose w is of another format perhaps; empty if one does.
std::string WhyNoGroupedMatmulScaledKernel(const GroupedMatmulParams& params, DType w_dtype);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchGroupedMatmulScaled(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays,
                               cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchGroupedMatmulScaled80(const GroupedMatmulParams& params,
                                 const GroupedMatmulArrays& arrays, cudaStream_t stream,
                                 std::string* error);

// Load the kernels on the current device: the second function the portable ones alone.
bool LoadGroupedMatmulScaledKernels(std::string* error);
bool LoadGroupedMatmulScaledKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_SCALED_GROUPED_MATMUL_SCALED_H_
