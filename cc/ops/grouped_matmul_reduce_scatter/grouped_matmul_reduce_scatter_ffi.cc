// The plan and the FFI handlers of grouped_matmul_reduce_scatter.
#include <string>

#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "runtime/handlers.h"
#include "runtime/product_plan.h"

namespace jflux {
namespace {

// A call has the fields of SegmentedCall, and perhaps wire, the format of what travels. The plan
// has the fields of a product, parts and item_tokens; on the CPU only parts, item_tokens and
// workspace_bytes.
bool PlanGroupedMatmulReduceScatter(CallReader& call, const Machine& machine, Fields* plan,
                                    std::string* why_not) {
  const SegmentedCall c = SegmentedCall::Read(call);
  GroupedMatmulReduceScatterParams p{c.world, c.tokens, c.choices, 0, 1, c.product};
  if (call.Has("wire")) p.wire = call.GetFormat("wire");
  if (!call.Check(why_not)) return false;
  *why_not = WhyNoWire(p);
  if (!why_not->empty()) return false;
  if (machine.IsCpu()) {
    p.parts = p.world > 1 ? 1 : 0;
    p.item_tokens = kCpuItemTokens;
    *plan = CpuPlan(SumLayout::Make(p).Workspace().TotalBytes());
  } else {
    const bool portable = IsForPortable(machine);
    *why_not = WhyNoSegmentedKernel(p.product, portable);
    if (!why_not->empty()) return false;
    if (!portable && !IsGroupedTile(/*gated=*/false, p.product.tile)) {
      *why_not = "no kernel has the tile";
      return false;
    }
    p.parts = ChooseParts(p.world, c.mean_rows, p.product.groups, kLeastRowsToScatter, kFewSpans);
    p.item_tokens = ItemTokens(p.RowBytes());
    const GemmChoice choice = ChooseSegmented(c.OfMeanRows(p.product), machine);
    *plan = ProductPlan{p.wire ? ForWire(choice) : choice, /*senders=*/0,
                        SumLayout::Make(p).Workspace().TotalBytes()}
                .AsFields();
  }
  (*plan)["parts"] = p.parts;
  (*plan)["item_tokens"] = p.item_tokens;
  return true;
}

// Operands h [m, k], w, weights [world tokens, choices], offsets [groups + 1], destination [world
// tokens, choices] and source [m]. Results out [tokens, n] and y [m, n].
struct Attributes {
  CallAttributes call;
  Int64s choice;  // tile_n, cluster_m, group_m and splits; on the CPU four zeros
  int64_t parts = 0, item_tokens = 0;
  bool transpose_rhs = false;
  int64_t wire = -1;  // number of the format of what travels; -1: y's

  void Read(AttributeReader& read) {
    call.Read(read);
    read("choice", &choice)("item_tokens", &item_tokens)("parts", &parts)(
        "transpose_rhs", &transpose_rhs)("wire", &wire);
  }
};

struct Call : CallOf<kGroupedMatmulReduceScatterId, GroupedMatmulReduceScatterCpu, nullptr> {
  bool ReadOperands(const Attributes& a, ffi::AnyBuffer h, ffi::AnyBuffer w, ffi::AnyBuffer weights,
                    ffi::AnyBuffer offsets, ffi::AnyBuffer destination, ffi::AnyBuffer source,
                    ffi::AnyBuffer out, ffi::AnyBuffer y) {
    const auto dtype = DTypeOf(h.element_type()), out_dtype = DTypeOf(y.element_type());
    if (!dtype || !out_dtype || h.dimensions().size() != 2 || w.dimensions().size() != 3 ||
        out.dimensions().size() != 2 || destination.dimensions().size() != 2 || a.parts < 0 ||
        a.parts > kMostParts || !AreItemTokens(a.item_tokens)) {
      return false;
    }
    p.world = static_cast<int32_t>(a.call.world);
    p.tokens = out.dimensions()[0];
    p.choices = static_cast<int32_t>(destination.dimensions()[1]);
    p.parts = static_cast<int32_t>(a.parts);
    p.item_tokens = static_cast<int32_t>(a.item_tokens);
    GroupedMatmulParams& product = p.product;
    product.m = h.dimensions()[0];
    product.k = h.dimensions()[1];
    product.n = out.dimensions()[1];
    product.groups = w.dimensions()[0];
    product.dtype = *dtype;
    product.out_dtype = *out_dtype;
    product.transpose_rhs = a.transpose_rhs;
    if (a.wire >= kFormatCount) return false;
    if (a.wire >= 0) p.wire = static_cast<DType>(a.wire);
    if (!WhyNoWire(p).empty()) return false;
    const int64_t rows = a.transpose_rhs ? product.n : product.k;
    const int64_t columns = a.transpose_rhs ? product.k : product.n;
    const auto wide = *out_dtype == DType::kF64 ? ffi::F64 : ffi::F32;
    const int64_t tokens = p.world * p.tokens;
    if (p.tokens == 0 || product.m == 0 || product.k == 0 || product.n == 0 ||
        product.groups == 0 || product.m > INT32_MAX || product.groups > INT32_MAX - 1 ||
        product.m != tokens * p.choices ||
        !Is(w, h.element_type(), {product.groups, rows, columns}) ||
        !Is(weights, wide, {tokens, p.choices}) ||
        !Is(destination, ffi::S32, {tokens, p.choices}) || !Is(source, ffi::S32, {product.m}) ||
        !Is(offsets, ffi::S32, {product.groups + 1}) ||
        !Is(out, y.element_type(), {p.tokens, product.n}) ||
        !Is(y, y.element_type(), {product.m, product.n})) {
      return false;
    }
    arrays = {h.untyped_data(),
              w.untyped_data(),
              weights.untyped_data(),
              static_cast<const int32_t*>(offsets.untyped_data()),
              static_cast<const int32_t*>(destination.untyped_data()),
              static_cast<const int32_t*>(source.untyped_data()),
              out.untyped_data(),
              y.untyped_data()};
    return true;
  }
  int64_t WorkspaceBytes() const { return SumLayout::Make(p).Workspace().TotalBytes(); }
};

struct CallOnCpu : Call {
  std::string Read(const Attributes& a, ffi::AnyBuffer h, ffi::AnyBuffer w, ffi::AnyBuffer weights,
                   ffi::AnyBuffer offsets, ffi::AnyBuffer destination, ffi::AnyBuffer source,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> y) {
    return ReadOperands(a, h, w, weights, offsets, destination, source, *out, *y) &&
                   IsCpuPlan(a.choice, 0)
               ? ""
               : kDoNotFit;
  }
};

struct CallOnCuda : Call {
  GemmChoice choice{};

  std::string Read(const Attributes& a, ffi::AnyBuffer h, ffi::AnyBuffer w, ffi::AnyBuffer weights,
                   ffi::AnyBuffer offsets, ffi::AnyBuffer destination, ffi::AnyBuffer source,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> y) {
    if (!ReadOperands(a, h, w, weights, offsets, destination, source, *out, *y)) return kDoNotFit;
    const auto given = ChoiceOf(a.choice);
    if (!given || !IsGroupedChoice(*given, /*gated=*/false) ||
        !ArePossibleParts(p.parts, p.world, p.product.groups) ||
        (p.wire && !(ForWire(*given) == *given))) {
      return kNoKernel;
    }
    choice = *given;
    return WhyNoSegmentedKernel(p.product, choice.portable);
  }
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    return LaunchGroupedMatmulReduceScatter(p, arrays, choice, site, device, view, stream, error);
  }
};

constexpr Constant kConstants[] = {
    {"most_spans", kMostSpans}, {"few_spans", kFewSpans}, {nullptr, 0}};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kGroupedMatmulReduceScatterOp;
const Op kGroupedMatmulReduceScatterOp = {kGroupedMatmulReduceScatterId,
                                          "grouped_matmul_reduce_scatter",
                                          OnCpu<CallOnCpu>,
                                          JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                                          kCpuFormats,
                                          kGroupedFormats,
                                          PlanGroupedMatmulReduceScatter,
                                          /*most_splits=*/1,
                                          kConstants};

}  // namespace jflux
