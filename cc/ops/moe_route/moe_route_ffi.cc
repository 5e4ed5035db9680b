// FFI handlers of moe_route.
#include <optional>
#include <string>
#include <utility>

#include "ops/moe_route/moe_route.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

struct Attributes {
  int64_t capacity = 0;

  void Read(AttributeReader& read) { read("capacity", &capacity); }
};

using Ints = ffi::AnyBuffer;

struct Call {
  MoeRouteParams params;
  MoeRouteArrays arrays;
};

// Sets *call, or says why operands, results and attributes do not fit together.
std::optional<ffi::Error> Read(const ffi::Dictionary& attributes, Ints& indices,
                               ffi::Result<Ints>& counts, ffi::Result<Ints>& offsets,
                               ffi::Result<Ints>& destination, ffi::Result<Ints>& source,
                               Call* call) {
  Attributes a;
  if (auto refused = ReadAttributes(kMoeRouteId, attributes, &a)) return refused;
  const auto size = [](const Ints& b) { return static_cast<int64_t>(b.element_count()); };
  const MoeRouteParams p{size(indices), size(*counts), a.capacity};
  for (const Ints* b : {&indices, &*counts, &*offsets, &*destination, &*source}) {
    if (b->element_type() != ffi::S32) return InvalidArgument("moe_route: arrays must be int32");
  }
  if (p.experts < 1 || size(*offsets) != p.experts + 1 || size(*destination) != p.slots ||
      size(*source) != p.slots || p.capacity < -1) {
    return InvalidArgument("moe_route: operands do not fit");
  }
  const auto data = [](const Ints& b) { return static_cast<int32_t*>(b.untyped_data()); };
  *call = {p, {data(indices), data(*counts), data(*offsets), data(*destination), data(*source)}};
  return std::nullopt;
}

ffi::Error Cpu(ffi::Dictionary attributes, Ints indices, ffi::Result<Ints> counts,
               ffi::Result<Ints> offsets, ffi::Result<Ints> destination, ffi::Result<Ints> source) {
  Call call;
  if (auto refused = Read(attributes, indices, counts, offsets, destination, source, &call)) {
    return *refused;
  }
  const std::string wrong = MoeRouteCpu(call.params, call.arrays);
  return wrong.empty() ? ffi::Error::Success() : InvalidArgument("moe_route: " + wrong);
}

// Operand and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Arg<Ints>()
      .template Ret<Ints>()
      .template Ret<Ints>()
      .template Ret<Ints>()
      .template Ret<Ints>();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(ffi::Ffi::Bind().Attrs()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, Ints indices,
                ffi::Result<Ints> counts, ffi::Result<Ints> offsets, ffi::Result<Ints> destination,
                ffi::Result<Ints> source) {
  Call call;
  if (auto refused = Read(attributes, indices, counts, offsets, destination, source, &call)) {
    return *refused;
  }
  return LaunchLocalCuda(kMoeRouteId, [&](std::string* error) {
    return LaunchMoeRoute(call.params, call.arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindLocalCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMoeRouteOp;
const Op kMoeRouteOp = {kMoeRouteId,          "moe_route",      kCpu,
                        JFLUX_IF_CUDA(kCuda), kMoeRouteFormats, kMoeRouteFormats};

}  // namespace jflux
