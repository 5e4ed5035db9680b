// matmul: y_i = activation(x @ w_i + bias_i), of operands with scales, on one GPU. A call is one of
// all_gather_matmul with one rank, whose operands, tiles and epilogue it has.
//
// Python: jflux/_ops/products/matmul.py.
#ifndef JFLUX_OPS_MATMUL_MATMUL_H_
#define JFLUX_OPS_MATMUL_MATMUL_H_

#include <optional>
#include <string>

#include "ops/all_gather_matmul/all_gather_matmul.h"

namespace jflux {

inline constexpr OpId kMatmulId{43};

// XLA multiplies operands without scales.
inline constexpr OpFormats kMatmulFormats{SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8),
                                          SetOf(DType::kF16, DType::kBF16, DType::kF32)};

// `given`: what was measured or is forced, if anything.
inline GemmChoice ChooseMatmul(const AllGatherMatmulParams& p,
                               const AllGatherMatmulOperands& operands,
                               const std::optional<GemmChoice>& given, const Machine& machine) {
  const GemmChoice wanted = given ? *given
                                  : ChooseAllGather(/*world=*/1, p.rows.Total(), p.n, p.k, p.dtype,
                                                    machine, p.transpose_rhs, operands.scales);
  return FitWeights(wanted, p, operands.gated, operands.scales,
                    operands.quantize != Quantizing::kNone, machine);
}

// Enqueues the call on `stream` of the current device.
bool LaunchMatmul(const AllGatherMatmulParams& params, const AllGatherMatmulOperands& operands,
                  const std::optional<GemmChoice>& given, cudaStream_t stream, std::string* error);

// The same by the portable main loop.
bool LaunchMatmul80(const AllGatherMatmulParams& params, const AllGatherMatmulOperands& operands,
                    const GemmChoice& choice, int sm_count, cudaStream_t stream,
                    std::string* error);

bool LoadMatmulKernels(std::string* error);
bool LoadMatmulKernels80(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_MATMUL_H_
