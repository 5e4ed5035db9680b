// The FFI handler of matmul.
#include <optional>
#include <string>

#include "ops/all_gather_matmul/weights_ffi.h"
#include "ops/matmul/matmul.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  WeightsAttributes weights;
  Int64s choice;  // the numbers of a GemmChoice, which is fitted to the operands; zeros: none

  void Read(AttributeReader& read) {
    weights.Read(read);
    read("choice", &choice);
  }
};

// x [rows, k] and weights [n, k] (weights_ffi.h).
ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::RemainingArgs rest, ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kMatmulId, attributes, &a)) return *refused;
  AllGatherMatmulParams p{};
  AllGatherMatmulOperands operands{};
  operands.x = x.untyped_data();
  const auto params_of = [&](const ffi::AnyBuffer& w, const ffi::AnyBuffer& y,
                             bool gathered) -> std::optional<AllGatherMatmulParams> {
    const auto dtype = DTypeOf(x.element_type(), kAllFormats);
    const auto w_dtype = DTypeOf(w.element_type(), kAllFormats);
    const auto out_dtype = DTypeOf(y.element_type(), kAllFormats);
    if (gathered || !dtype || !w_dtype || !out_dtype || x.dimensions().size() != 2 ||
        w.dimensions().size() != 2) {
      return std::nullopt;
    }
    const int64_t rows = x.dimensions()[0], k = x.dimensions()[1], n = w.dimensions()[0];
    if (rows == 0 || k == 0 || n == 0 || !Is(w, w.element_type(), {n, k}) ||
        !Is(y, y.element_type(), {rows, n})) {
      return std::nullopt;
    }
    return AllGatherMatmulParams{Rows{1, 1, rows}, k, n, *dtype, *out_dtype, true, false, *w_dtype};
  };
  std::string why = ReadWeights(a.weights, rest, results, params_of, &p, &operands);
  std::optional<GemmChoice> given;
  if (!IsCpuPlan(a.choice, /*senders=*/0)) {
    const auto plan = CudaPlanOf(a.choice, /*senders=*/0, /*workspace_bytes=*/0);
    if (plan) given = plan->choice;
    if (why.empty() && !plan) why = kNoKernel;
  }
  if (why.empty() && (operands.scales == Scales::kNone || !Has(kMatmulFormats.operands, p.dtype) ||
                      (operands.scales == Scales::kOfVectors && operands.gated) ||
                      (given && given->portable && !CanTake(*given, p, operands)))) {
    why = kNoKernel;
  }
  if (!why.empty()) return InvalidArgument("matmul: " + why);
  return LaunchLocalCuda(kMatmulId, [&](std::string* error) {
    return LaunchMatmul(p, operands, given, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda,
                       BindLocalCuda().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulOp;
const Op kMatmulOp = {kMatmulId,   "matmul",      /*cpu=*/nullptr, JFLUX_IF_CUDA(kCuda),
                      OpFormats{}, kMatmulFormats};

}  // namespace jflux
