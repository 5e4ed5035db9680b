// The FFI handler of grouped_matmul_scaled.
#include <string>

#include "ops/grouped_matmul/call_ffi.h"
#include "ops/grouped_matmul_scaled/grouped_matmul_scaled.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  GroupedAttributes grouped;
  int64_t scales = 0;    // number of a Scales
  int64_t quantize = 0;  // number of a Quantizing

  void Read(AttributeReader& read) {
    grouped.Read(read);
    read("quantize", &quantize)("scales", &scales);
  }
};

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulScaledId, attributes, &a)) return *refused;
  const std::string name = NameOf(kGroupedMatmulScaledId);
  const auto scales = static_cast<Scales>(a.scales);
  if (!IsScales(a.scales) || scales == Scales::kNone || !IsQuantizing(a.quantize)) {
    return InvalidArgument(name + ": the call has no scales");
  }
  const auto call =
      GroupedCallOf(a.grouped, operands, results, scales, static_cast<Quantizing>(a.quantize));
  if (!call) return InvalidArgument(name + ": operands do not fit");
  const auto w = *operands.get<ffi::AnyBuffer>(call->params.terms);
  const auto w_dtype = DTypeOf(w.element_type(), kAllFormats);
  const std::string why =
      w_dtype ? WhyNoGroupedMatmulScaledKernel(call->params, *w_dtype) : "w is of no format";
  if (!why.empty()) return InvalidArgument(name + ": " + why);
  return LaunchLocalCuda(kGroupedMatmulScaledId, [&](std::string* error) {
    return LaunchGroupedMatmulScaled(call->params, call->arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kGroupedMatmulScaledOp;
const Op kGroupedMatmulScaledOp = {
    kGroupedMatmulScaledId, "grouped_matmul_scaled", nullptr, JFLUX_IF_CUDA(kCuda), OpFormats{},
    kGroupedScaledFormats};

}  // namespace jflux
