// The FFI handler of activation_gradient.
#include <optional>

#include "ops/activation_gradient/activation_gradient.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  int64_t activation = 0;  // number of an Activation
  bool gated = false;      // there are two sums

  void Read(AttributeReader& read) { read("activation", &activation)("gated", &gated); }
};

struct Call {
  ActivationGradientParams params{};
  ActivationGradientArrays arrays{};
};

// The parameters of the call; empty if operands and results do not fit together. Operands dy,
// sums_0[, sums_1], group_sizes; results the gradients of the sums.
std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  const size_t sums = a.gated ? 2 : 1;
  if (operands.size() != 2 + sums || results.size() != sums || !IsActivation(a.activation) ||
      static_cast<Activation>(a.activation) == Activation::kNone) {
    return std::nullopt;
  }
  const auto dy = *operands.get<ffi::AnyBuffer>(0), sizes = *operands.get<ffi::AnyBuffer>(1 + sums);
  const auto dtype = DTypeOf(dy.element_type());
  if (!dtype || dy.dimensions().size() != 2 || sizes.dimensions().size() != 1) return std::nullopt;
  Call call;
  call.params = {dy.dimensions()[0],
                 dy.dimensions()[1],
                 sizes.dimensions()[0],
                 a.gated,
                 static_cast<Activation>(a.activation),
                 *dtype};
  const ActivationGradientParams& p = call.params;
  if (p.rows < 1 || p.columns < 1 || p.groups < 1 || !Is(sizes, ffi::S32, {p.groups})) {
    return std::nullopt;
  }
  call.arrays.dy = dy.untyped_data();
  call.arrays.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
  for (size_t i = 0; i < sums; ++i) {
    const auto sum = *operands.get<ffi::AnyBuffer>(1 + i);
    auto gradient = *results.get<ffi::AnyBuffer>(i);
    if (!Is(sum, dy.element_type(), {p.rows, p.columns}) ||
        !Is(*gradient, dy.element_type(), {p.rows, p.columns})) {
      return std::nullopt;
    }
    call.arrays.sums[i] = sum.untyped_data();
    call.arrays.gradients[i] = gradient->untyped_data();
  }
  return call;
}

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes read;
  if (auto refused = ReadAttributes(kActivationGradientId, attributes, &read)) return *refused;
  const auto call = CallOf(read, operands, results);
  if (!call) return InvalidArgument("activation_gradient: operands do not fit");
  return LaunchLocalCuda(kActivationGradientId, [&](std::string* error) {
    return LaunchActivationGradient(call->params, call->arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kActivationGradientOp;
const Op kActivationGradientOp = {kActivationGradientId, "activation_gradient",
                                  /*cpu=*/nullptr,       JFLUX_IF_CUDA(kCuda),
                                  OpFormats{},           kActivationGradientFormats};

}  // namespace jflux
