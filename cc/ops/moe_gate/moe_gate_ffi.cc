// The FFI handlers of moe_gate and of its gradient.
#include <optional>
#include <string>

#include "ops/moe_gate/moe_gate.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  bool normalize = false;
  double scale = 1;
  int64_t score = 0;  // number of a GateScore

  void Read(AttributeReader& read) {
    read("normalize", &normalize)("scale", &scale)("score", &score);
  }
};

struct GateAttributes : Attributes {
  bool biased = false, masked = false;  // which operands there are
  int64_t groups = 0, top_groups = 0;

  void Read(AttributeReader& read) {
    Attributes::Read(read);
    read("biased", &biased)("masked", &masked)("groups", &groups)("top_groups", &top_groups);
  }
};

// What attributes, logits, or what has their type and shape, and choices say of a call; empty if
// they do not fit together.
std::optional<MoeGateParams> ParamsOf(const Attributes& a, const ffi::AnyBuffer& logits,
                                      const ffi::AnyBuffer& indices) {
  const auto dtype = DTypeOf(logits.element_type());
  if (!dtype || logits.dimensions().size() != 2 || indices.dimensions().size() != 2 ||
      a.score < 0 || a.score > static_cast<int64_t>(GateScore::kSigmoid) || a.scale == 0) {
    return std::nullopt;
  }
  const MoeGateParams p{logits.dimensions()[0],
                        logits.dimensions()[1],
                        indices.dimensions()[1],
                        static_cast<GateScore>(a.score),
                        a.normalize,
                        static_cast<float>(a.scale),
                        *dtype};
  if (p.tokens < 1 || p.slots < 1 || p.slots > p.experts ||
      !Is(indices, ffi::S32, {p.tokens, p.slots})) {
    return std::nullopt;
  }
  return p;
}

// Operands logits[, bias][, mask]; results indices, weights.
ffi::Error Gate(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::Result<ffi::AnyBuffer> indices, ffi::Result<ffi::AnyBuffer> weights) {
  GateAttributes a;
  if (auto refused = ReadAttributes(kMoeGateId, attributes, &a)) return *refused;
  const auto do_not_fit = InvalidArgument("moe_gate: operands do not fit");
  if (operands.size() != size_t{1} + a.biased + a.masked) return do_not_fit;
  const auto logits = *operands.get<ffi::AnyBuffer>(0);
  auto p = ParamsOf(a, logits, *indices);
  if (!p || !Is(*weights, ffi::F32, {p->tokens, p->slots}) || a.groups < 0) return do_not_fit;
  p->groups = a.groups;
  p->top_groups = a.top_groups;
  MoeGateArrays arrays{};
  arrays.logits = logits.untyped_data();
  if (a.biased) {
    const auto bias = *operands.get<ffi::AnyBuffer>(1);
    if (!Is(bias, ffi::F32, {p->experts})) return do_not_fit;
    arrays.bias = static_cast<const float*>(bias.untyped_data());
  }
  if (a.masked) {
    const auto mask = *operands.get<ffi::AnyBuffer>(operands.size() - 1);
    if (!Is(mask, ffi::PRED, {p->tokens})) return do_not_fit;
    arrays.mask = static_cast<const uint8_t*>(mask.untyped_data());
  }
  arrays.indices = static_cast<int32_t*>(indices->untyped_data());
  arrays.weights = static_cast<float*>(weights->untyped_data());
  return LaunchLocalCuda(
      kMoeGateId, [&](std::string* error) { return LaunchMoeGate(*p, arrays, stream, error); });
}

// Operands dweights, indices, weights[, logits]; result dlogits.
ffi::Error Gradient(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                    ffi::Result<ffi::AnyBuffer> dlogits) {
  Attributes a;
  if (auto refused = ReadAttributes(kMoeGateGradientId, attributes, &a)) return *refused;
  const auto do_not_fit = InvalidArgument("moe_gate_gradient: operands do not fit");
  if (operands.size() < 3) return do_not_fit;
  const auto dweights = *operands.get<ffi::AnyBuffer>(0);
  const auto indices = *operands.get<ffi::AnyBuffer>(1);
  const auto weights = *operands.get<ffi::AnyBuffer>(2);
  const auto p = ParamsOf(a, *dlogits, indices);
  if (!p || !Is(dweights, ffi::F32, {p->tokens, p->slots}) ||
      !Is(weights, ffi::F32, {p->tokens, p->slots}) ||
      operands.size() != size_t{3} + p->GradientNeedsLogits()) {
    return do_not_fit;
  }
  MoeGateGradientArrays arrays{};
  arrays.dweights = static_cast<const float*>(dweights.untyped_data());
  arrays.indices = static_cast<const int32_t*>(indices.untyped_data());
  arrays.weights = static_cast<const float*>(weights.untyped_data());
  if (p->GradientNeedsLogits()) {
    const auto logits = *operands.get<ffi::AnyBuffer>(3);
    if (!Is(logits, dlogits->element_type(), {p->tokens, p->experts})) return do_not_fit;
    arrays.logits = logits.untyped_data();
  }
  arrays.dlogits = dlogits->untyped_data();
  return LaunchLocalCuda(kMoeGateGradientId, [&](std::string* error) {
    return LaunchMoeGateGradient(*p, arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kGate, Gate,
                       BindLocalCuda().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGradient, Gradient, BindLocalCuda().RemainingArgs().Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMoeGateOp, kMoeGateGradientOp;
const Op kMoeGateOp = {kMoeGateId,           "moe_gate",  /*cpu=*/nullptr,
                       JFLUX_IF_CUDA(kGate), OpFormats{}, kMoeGateFormats};
const Op kMoeGateGradientOp = {kMoeGateGradientId, "moe_gate_gradient",
                               /*cpu=*/nullptr,    JFLUX_IF_CUDA(kGradient),
                               OpFormats{},        kMoeGateGradientFormats};

}  // namespace jflux
