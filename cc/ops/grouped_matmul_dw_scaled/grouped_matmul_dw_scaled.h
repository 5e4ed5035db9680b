// The weight gradient of grouped_matmul in 8 bits, of operands with scales of vectors or of blocks.
// Its kernels are those of grouped_matmul_dw, of transposes; there are no bodies for CPUs.
//
// Python: jflux/_ops/products/_grouped_dw_scaled.py.
#ifndef JFLUX_OPS_GROUPED_MATMUL_DW_SCALED_GROUPED_MATMUL_DW_SCALED_H_
#define JFLUX_OPS_GROUPED_MATMUL_DW_SCALED_GROUPED_MATMUL_DW_SCALED_H_

#include <string>

#include "core/group_tiles.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulDwScaledId{48};
inline constexpr OpFormats kGroupedDwScaledFormats{SetOf(DType::kF8E4M3FN),
                                                   SetOf(DType::kBF16, DType::kF32)};

// Why no kernel takes the call; empty if one does.
std::string WhyNoGroupedMatmulDwScaledKernel(const GroupedMatmulDwParams& params);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchGroupedMatmulDwScaled(const GroupedMatmulDwParams& params,
                                 const GroupedMatmulDwArrays& arrays, cudaStream_t stream,
                                 std::string* error);

// Loads the kernels on the current device.
bool LoadGroupedMatmulDwScaledKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_DW_SCALED_GROUPED_MATMUL_DW_SCALED_H_
