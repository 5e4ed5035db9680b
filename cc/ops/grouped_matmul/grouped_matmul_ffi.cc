// FFI handlers of grouped_matmul and grouped_matmul_dw.
#include <initializer_list>
#include <optional>
#include <string>

#include "ops/grouped_matmul/call_ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

// Operands x, dy, group_sizes. Result dw.
struct DwAttributes {
  bool portable = false;
  double share = 1;  // of the rows, which groups have, about
  Int64s tile;
  void Read(AttributeReader& read) { read("portable", &portable)("share", &share)("tile", &tile); }
};

ffi::Error NoFit(OpId op) {
  return InvalidArgument(std::string(NameOf(op)) + ": operands do not fit");
}

struct DwCall {
  GroupedMatmulDwParams params{};
  GroupedMatmulDwArrays arrays{};
};

std::optional<DwCall> DwCallOf(const DwAttributes& a, const ffi::AnyBuffer& x,
                               const ffi::AnyBuffer& dy, const ffi::AnyBuffer& sizes,
                               ffi::Result<ffi::AnyBuffer>& dw) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(dw->element_type());
  if (!dtype || !out_dtype || x.dimensions().size() != 2 || dy.dimensions().size() != 2 ||
      sizes.dimensions().size() != 1) {
    return std::nullopt;
  }
  DwCall call;
  GroupedMatmulDwParams& p = call.params;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.n = dy.dimensions()[1];
  p.groups = sizes.dimensions()[0];
  p.tile = TileChoiceOf(a.tile);
  p.share = a.share;
  p.portable = a.portable;
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  if (p.m == 0 || p.k == 0 || p.n == 0 || p.groups == 0) return std::nullopt;
  if (!Is(dy, x.element_type(), {p.m, p.n}) || !Is(sizes, ffi::S32, {p.groups}) ||
      !Is(*dw, dw->element_type(), {p.groups, p.k, p.n})) {
    return std::nullopt;
  }
  call.arrays = {x.untyped_data(), dy.untyped_data(),
                 static_cast<const int32_t*>(sizes.untyped_data()), dw->untyped_data()};
  return call;
}

// Empty if the sizes of a call on the CPU are right.
std::optional<ffi::Error> Refused(OpId op, const int32_t* sizes, int64_t groups, int64_t m) {
  const std::string why = SizesAreWrong(sizes, groups, m);
  if (why.empty()) return std::nullopt;
  return InvalidArgument(std::string(NameOf(op)) + ": " + why);
}

ffi::Error Cpu(ffi::Dictionary attributes, ffi::RemainingArgs operands,
               ffi::RemainingRets results) {
  GroupedAttributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulId, attributes, &a)) return *refused;
  const auto call = GroupedCallOf(a, operands, results);
  if (!call) return NoFit(kGroupedMatmulId);
  const GroupedMatmulParams& p = call->params;
  if (auto refused = Refused(kGroupedMatmulId, call->arrays.group_sizes, p.groups, p.m)) {
    return *refused;
  }
  GroupedMatmulCpu(p, call->arrays);
  return ffi::Error::Success();
}

ffi::Error DwCpu(ffi::Dictionary attributes, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                 ffi::AnyBuffer sizes, ffi::Result<ffi::AnyBuffer> dw) {
  DwAttributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulDwId, attributes, &a)) return *refused;
  const auto call = DwCallOf(a, x, dy, sizes, dw);
  if (!call) return NoFit(kGroupedMatmulDwId);
  const GroupedMatmulDwParams& p = call->params;
  if (auto refused = Refused(kGroupedMatmulDwId, call->arrays.group_sizes, p.groups, p.m)) {
    return *refused;
  }
  GroupedMatmulDwCpu(p, call->arrays);
  return ffi::Error::Success();
}

// Operands and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding).RemainingArgs().RemainingRets();
};
constexpr auto DwBindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(ffi::Ffi::Bind().Attrs()));
XLA_FFI_DEFINE_HANDLER(kDwCpu, DwCpu, DwBindings(ffi::Ffi::Bind().Attrs()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  GroupedAttributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulId, attributes, &a)) return *refused;
  const auto call = GroupedCallOf(a, operands, results);
  if (!call) return NoFit(kGroupedMatmulId);
  const std::string why = WhyNoGroupedMatmulKernel(call->params);
  if (!why.empty()) return InvalidArgument("grouped_matmul: " + why);
  return LaunchLocalCuda(kGroupedMatmulId, [&](std::string* error) {
    return LaunchGroupedMatmul(call->params, call->arrays, stream, error);
  });
}

ffi::Error DwCuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::AnyBuffer x,
                  ffi::AnyBuffer dy, ffi::AnyBuffer sizes, ffi::Result<ffi::AnyBuffer> dw) {
  DwAttributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulDwId, attributes, &a)) return *refused;
  const auto call = DwCallOf(a, x, dy, sizes, dw);
  if (!call) return NoFit(kGroupedMatmulDwId);
  const std::string why = WhyNoGroupedMatmulDwKernel(call->params);
  if (!why.empty()) return InvalidArgument("grouped_matmul_dw: " + why);
  return LaunchLocalCuda(kGroupedMatmulDwId, [&](std::string* error) {
    return LaunchGroupedMatmulDw(call->params, call->arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindLocalCuda()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDwCuda, DwCuda, DwBindings(BindLocalCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kGroupedMatmulOp, kGroupedMatmulDwOp;
const Op kGroupedMatmulOp = {kGroupedMatmulId,     "grouped_matmul", kCpu,
                             JFLUX_IF_CUDA(kCuda), kCpuFormats,      kGroupedFormats};
const Op kGroupedMatmulDwOp = {kGroupedMatmulDwId,     "grouped_matmul_dw", kDwCpu,
                               JFLUX_IF_CUDA(kDwCuda), kCpuFormats,         kGroupedFormats};

}  // namespace jflux
