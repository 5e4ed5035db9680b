// FFI handlers of grouped_matmul and grouped_matmul_dw.
#include <initializer_list>
#include <optional>
#include <string>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

// Operands x, w_0[, w_1], group_sizes[, row_scale]. Results y[, sums_0[, sums_1]].
struct Attributes {
  int64_t activation = 0;      // number of an Activation
  bool gated = false;          // there is w_1
  bool scaled = false;         // there is row_scale
  bool sums = false;           // there are sums, one for each weight
  Int64s tile;                 // columns and cluster_m of a TileChoice; empty: none
  bool transpose_rhs = false;  // weights are [E, n, k]

  void Read(AttributeReader& read) {
    read("activation", &activation)("gated", &gated)("scaled", &scaled)("sums", &sums)(
        "tile", &tile)("transpose_rhs", &transpose_rhs);
  }
};

// Operands x, dy, group_sizes. Result dw.
struct DwAttributes {
  Int64s tile;
  void Read(AttributeReader& read) { read("tile", &tile); }
};

TileChoice TileOf(const Int64s& tile) {
  if (tile.size() != 2) return {};
  return {static_cast<int32_t>(tile[0]), static_cast<int32_t>(tile[1])};
}

ffi::Error NoFit(OpId op) {
  return InvalidArgument(std::string(NameOf(op)) + ": operands do not fit");
}

// The parameters of the call; empty if operands and results do not fit together.
struct Call {
  GroupedMatmulParams params{};
  GroupedMatmulArrays arrays{};
};

std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  const size_t weights = a.gated ? 2 : 1;
  if (operands.size() != 2 + weights + (a.scaled ? 1 : 0) ||
      results.size() != 1 + (a.sums ? weights : 0) || !IsActivation(a.activation)) {
    return std::nullopt;
  }
  const auto x = *operands.get<ffi::AnyBuffer>(0), w = *operands.get<ffi::AnyBuffer>(1);
  auto y = *results.get<ffi::AnyBuffer>(0);
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y->element_type());
  if (!dtype || !out_dtype || x.dimensions().size() != 2 || w.dimensions().size() != 3 ||
      y->dimensions().size() != 2) {
    return std::nullopt;
  }
  Call call;
  GroupedMatmulParams& p = call.params;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.n = y->dimensions()[1];
  p.groups = w.dimensions()[0];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = a.transpose_rhs;
  p.activation = static_cast<Activation>(a.activation);
  p.gated = a.gated;
  p.scaled = a.scaled;
  p.sums = a.sums;
  p.tile = TileOf(a.tile);
  if (p.gated && p.activation == Activation::kNone) return std::nullopt;
  if (p.m == 0 || p.k == 0 || p.n == 0 || p.groups == 0) return std::nullopt;
  GroupedMatmulArrays& arrays = call.arrays;
  arrays.x = x.untyped_data();
  arrays.y = y->untyped_data();
  if (!Is(*y, y->element_type(), {p.m, p.n})) return std::nullopt;
  for (size_t i = 0; i < weights; ++i) {
    const auto one = *operands.get<ffi::AnyBuffer>(1 + i);
    const int64_t rows = p.transpose_rhs ? p.n : p.k, columns = p.transpose_rhs ? p.k : p.n;
    if (!Is(one, x.element_type(), {p.groups, rows, columns})) return std::nullopt;
    arrays.w[i] = one.untyped_data();
    if (!p.sums) continue;
    auto sums = *results.get<ffi::AnyBuffer>(1 + i);
    if (!Is(*sums, y->element_type(), {p.m, p.n})) return std::nullopt;
    arrays.sums[i] = sums->untyped_data();
  }
  const auto sizes = *operands.get<ffi::AnyBuffer>(1 + weights);
  if (!Is(sizes, ffi::S32, {p.groups})) return std::nullopt;
  arrays.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
  if (p.scaled) {
    const auto scale = *operands.get<ffi::AnyBuffer>(2 + weights);
    if (!Is(scale, ffi::F32, {p.m})) return std::nullopt;
    arrays.row_scale = static_cast<const float*>(scale.untyped_data());
  }
  return call;
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
  p.tile = TileOf(a.tile);
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
  Attributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulId, attributes, &a)) return *refused;
  const auto call = CallOf(a, operands, results);
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
  Attributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulId, attributes, &a)) return *refused;
  const auto call = CallOf(a, operands, results);
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
