// The FFI handler of grouped_matmul_dw_scaled.
#include <string>

#include "ops/grouped_matmul/call_ffi.h"
#include "ops/grouped_matmul_dw_scaled/grouped_matmul_dw_scaled.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

// Operands x^T [k, columns], dy^T [n, columns], group_sizes, x_scale [blocks, k], dy_scale
// [blocks, n] or [blocks of n, blocks]. Result dw.
struct Attributes {
  int64_t rows = 0;    // of x, to which the groups' sizes sum at most
  int64_t scales = 0;  // number of a Scales
  Int64s tile;

  void Read(AttributeReader& read) { read("rows", &rows)("scales", &scales)("tile", &tile); }
};

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kGroupedMatmulDwScaledId, attributes, &a)) return *refused;
  const std::string name = NameOf(kGroupedMatmulDwScaledId);
  const ffi::Error no_fit = InvalidArgument(name + ": operands do not fit");
  if (operands.size() != 5 || results.size() != 1) return no_fit;
  const auto operand = [&](size_t i) { return *operands.get<ffi::AnyBuffer>(i); };
  const auto x = operand(0), dy = operand(1), sizes = operand(2);
  auto dw = *results.get<ffi::AnyBuffer>(0);
  const auto dtype = DTypeOf(x.element_type(), kGroupedDwScaledFormats.operands),
             out_dtype = DTypeOf(dw->element_type(), kGroupedDwScaledFormats.results);
  if (!dtype || !out_dtype || dw->dimensions().size() != 3 || dw->element_count() == 0 ||
      a.rows < 1 || a.rows > INT32_MAX || !IsScales(a.scales)) {
    return no_fit;
  }
  const auto shape = dw->dimensions();
  GroupedMatmulDwParams p{
      a.rows, shape[1], shape[2], shape[0], *dtype, *out_dtype, TileChoiceOf(a.tile)};
  p.scales = static_cast<Scales>(a.scales);
  const int64_t blocks = MostGroupBlocks(p.m, p.groups, kScaleBlock);
  GroupedMatmulDwArrays arrays{x.untyped_data(), dy.untyped_data(),
                               static_cast<const int32_t*>(sizes.untyped_data()),
                               dw->untyped_data()};
  arrays.x_scale = FloatsOf(operand(3), blocks * p.k);
  const bool of_blocks = p.scales == Scales::kOfBlocks;
  const int64_t entries = of_blocks ? CeilDiv<int64_t>(p.n, kScaleBlock) : p.n;
  arrays.dy_scale = FloatsOf(operand(4), blocks * entries);
  if (!Is(x, x.element_type(), {p.k, blocks * kScaleBlock}) ||
      !Is(dy, x.element_type(), {p.n, blocks * kScaleBlock}) || !Is(sizes, ffi::S32, {p.groups}) ||
      arrays.x_scale == nullptr || arrays.dy_scale == nullptr) {
    return no_fit;
  }
  const std::string why = WhyNoGroupedMatmulDwScaledKernel(p);
  if (!why.empty()) return InvalidArgument(name + ": " + why);
  return LaunchLocalCuda(kGroupedMatmulDwScaledId, [&](std::string* error) {
    return LaunchGroupedMatmulDwScaled(p, arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kGroupedMatmulDwScaledOp;
const Op kGroupedMatmulDwScaledOp = {kGroupedMatmulDwScaledId,
                                     "grouped_matmul_dw_scaled",
                                     nullptr,
                                     JFLUX_IF_CUDA(kCuda),
                                     OpFormats{},
                                     kGroupedDwScaledFormats};

}  // namespace jflux
