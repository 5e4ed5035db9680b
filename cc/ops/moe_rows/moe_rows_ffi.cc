// The FFI handler of moe_rows.
#include <initializer_list>
#include <optional>
#include <string>

#include "ops/moe_rows/moe_rows.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  bool fill = true;
  int64_t form = 0;  // number of a MoeRowsForm

  void Read(AttributeReader& read) { read("fill", &fill)("form", &form); }
};

struct Call {
  MoeRowsParams params{};
  MoeRowsArrays arrays{};
};

// The parameters of the call; empty if operands and result do not fit together. The operands are
// the two of the form, source and destination.
std::optional<Call> CallOf(const Attributes& attributes, const ffi::AnyBuffer& a,
                           const ffi::AnyBuffer& b, const ffi::AnyBuffer& source,
                           const ffi::AnyBuffer& destination, ffi::AnyBuffer& out) {
  const int64_t form = attributes.form;
  if (form < 0 || form > static_cast<int64_t>(MoeRowsForm::kDots)) return std::nullopt;
  const auto dtype = DTypeOf(a.element_type()), out_dtype = DTypeOf(out.element_type());
  if (!dtype || !out_dtype || a.dimensions().size() != 2 || source.dimensions().size() != 1 ||
      destination.dimensions().size() != 2) {
    return std::nullopt;
  }
  Call call;
  MoeRowsParams& p = call.params;
  p.form = static_cast<MoeRowsForm>(form);
  p.fill = attributes.fill;
  p.columns = a.dimensions()[1];
  p.tokens = destination.dimensions()[0];
  p.slots = destination.dimensions()[1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  const bool spreads = p.form == MoeRowsForm::kSpread, dots = p.form == MoeRowsForm::kDots;
  p.rows = spreads ? source.dimensions()[0] : a.dimensions()[0];
  if (p.rows < 1 || p.tokens < 1 || p.slots < 1 || p.columns < 1) return std::nullopt;
  const int64_t out_rows = spreads ? p.rows : p.tokens, out_columns = dots ? p.slots : p.columns;
  if (!Is(a, a.element_type(), {spreads ? p.tokens : p.rows, p.columns}) ||
      !Is(source, ffi::S32, {source.dimensions()[0]}) ||
      !Is(destination, ffi::S32, {p.tokens, p.slots}) ||
      !Is(out, out.element_type(), {out_rows, out_columns}) ||
      (dots ? !Is(b, a.element_type(), {p.tokens, p.columns})
            : !Is(b, ffi::F32, {p.tokens, p.slots}))) {
    return std::nullopt;
  }
  const bool same = p.out_dtype == p.dtype, wide = p.out_dtype == DType::kF32;
  if (dots ? !wide : spreads ? !same : !(same || wide)) return std::nullopt;
  MoeRowsArrays& arrays = call.arrays;
  (spreads ? arrays.g : arrays.y) = a.untyped_data();
  if (dots) {
    arrays.g = b.untyped_data();
  } else {
    arrays.w = static_cast<const float*>(b.untyped_data());
  }
  arrays.source = static_cast<const int32_t*>(source.untyped_data());
  arrays.destination = static_cast<const int32_t*>(destination.untyped_data());
  arrays.out = out.untyped_data();
  return call;
}

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::AnyBuffer a, ffi::AnyBuffer b,
                ffi::AnyBuffer source, ffi::AnyBuffer destination,
                ffi::Result<ffi::AnyBuffer> out) {
  Attributes read;
  if (auto refused = ReadAttributes(kMoeRowsId, attributes, &read)) return *refused;
  const auto call = CallOf(read, a, b, source, destination, *out);
  if (!call) return InvalidArgument("moe_rows: operands do not fit");
  return LaunchLocalCuda(kMoeRowsId, [&](std::string* error) {
    return LaunchMoeRows(call->params, call->arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda,
                       BindLocalCuda()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMoeRowsOp;
const Op kMoeRowsOp = {kMoeRowsId,           "moe_rows",  /*cpu=*/nullptr,
                       JFLUX_IF_CUDA(kCuda), OpFormats{}, kMoeRowsFormats};

}  // namespace jflux
