// The plan and the FFI handlers of all_gather_grouped_matmul.
#include <initializer_list>
#include <string>

#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "runtime/handlers.h"
#include "runtime/product_plan.h"

namespace jflux {
namespace {

// A call has the fields of SegmentedCall, and gated. The plan has the fields of a product, and
// parts; on the CPU only parts and workspace_bytes.
bool PlanAllGatherGroupedMatmul(CallReader& call, const Machine& machine, Fields* plan,
                                std::string* why_not) {
  const SegmentedCall c = SegmentedCall::Read(call);
  AllGatherGroupedMatmulParams p{c.world, c.tokens, c.choices, /*parts=*/0, c.product};
  GroupedMatmulParams& product = p.product;
  product.gated = call.Get("gated", 0, 1) == 1;
  if (!call.Check(why_not)) return false;
  if (machine.IsCpu()) {
    p.parts = p.world > 1 ? 1 : 0;
    *plan = CpuPlan(TokenLayout::Make(p, kCpuTokenChunkBytes).Workspace().TotalBytes());
    (*plan)["parts"] = p.parts;
    return true;
  }
  const bool portable = IsForPortable(machine);
  *why_not = WhyNoKernel(p, portable);
  if (!why_not->empty()) return false;
  p.parts = ChooseParts(p.world, c.mean_rows, product.groups);
  if (!portable && !IsGroupedTile(product.gated, product.tile)) {
    *why_not = "no kernel has the tile";
    return false;
  }
  *plan =
      ProductPlan{ChooseSegmented(c.OfMeanRows(product), machine),
                  TokenSenders(p, c.mean_rows, machine), CudaLayoutOf(p).Workspace().TotalBytes()}
          .AsFields();
  (*plan)["parts"] = p.parts;
  return true;
}

// Operands x [tokens, k], w_0[, w_1], offsets [groups + 1], destination [world tokens, choices] and
// source [m]. Results y [m, n][, sums_0[, sums_1]].
struct Attributes {
  CallAttributes call;
  int64_t activation = 0;  // number of an Activation
  Int64s choice;           // tile_n, cluster_m, group_m and splits; on the CPU four zeros
  bool gated = false;      // there is w_1
  int64_t parts = 0, senders = 0;
  bool sums = false;  // there are sums, one for each weight
  bool transpose_rhs = false;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("activation", &activation)("choice", &choice)("gated", &gated)("parts", &parts)(
        "senders", &senders)("sums", &sums)("transpose_rhs", &transpose_rhs);
  }
};

struct Call {
  static constexpr OpId kId = kAllGatherGroupedMatmulId;
  AllGatherGroupedMatmulParams p{};
  AllGatherGroupedMatmulArrays arrays{};

  bool ReadOperands(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    const size_t weights = a.gated ? 2 : 1;
    if (operands.size() != 4 + weights || results.size() != 1 + (a.sums ? weights : 0) ||
        !IsActivation(a.activation) || (a.gated && a.activation == 0)) {
      return false;
    }
    const auto x = *operands.get<ffi::AnyBuffer>(0), w = *operands.get<ffi::AnyBuffer>(1);
    const auto offsets = *operands.get<ffi::AnyBuffer>(1 + weights);
    const auto destination = *operands.get<ffi::AnyBuffer>(2 + weights);
    const auto source = *operands.get<ffi::AnyBuffer>(3 + weights);
    auto y = *results.get<ffi::AnyBuffer>(0);
    const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y->element_type());
    if (!dtype || !out_dtype || x.dimensions().size() != 2 || w.dimensions().size() != 3 ||
        y->dimensions().size() != 2 || destination.dimensions().size() != 2) {
      return false;
    }
    p.world = static_cast<int32_t>(a.call.world);
    p.tokens = x.dimensions()[0];
    p.choices = static_cast<int32_t>(destination.dimensions()[1]);
    if (a.parts < 0 || a.parts > kMostParts) return false;
    p.parts = static_cast<int32_t>(a.parts);
    GroupedMatmulParams& product = p.product;
    product.m = y->dimensions()[0];
    product.k = x.dimensions()[1];
    product.n = y->dimensions()[1];
    product.groups = w.dimensions()[0];
    product.dtype = *dtype;
    product.out_dtype = *out_dtype;
    product.transpose_rhs = a.transpose_rhs;
    product.activation = static_cast<Activation>(a.activation);
    product.gated = a.gated;
    product.sums = a.sums;
    if (p.tokens == 0 || product.m == 0 || product.k == 0 || product.n == 0 ||
        product.groups == 0 || product.m > INT32_MAX || product.groups > INT32_MAX - 1 ||
        !Is(destination, ffi::S32, {p.world * p.tokens, p.choices}) ||
        product.m != p.world * p.tokens * p.choices || !Is(source, ffi::S32, {product.m}) ||
        !Is(offsets, ffi::S32, {product.groups + 1})) {
      return false;
    }
    arrays.x = x.untyped_data();
    arrays.offsets = static_cast<const int32_t*>(offsets.untyped_data());
    arrays.source = static_cast<const int32_t*>(source.untyped_data());
    arrays.y = y->untyped_data();
    for (size_t i = 0; i < weights; ++i) {
      const auto one = *operands.get<ffi::AnyBuffer>(1 + i);
      const int64_t rows = a.transpose_rhs ? product.n : product.k;
      const int64_t columns = a.transpose_rhs ? product.k : product.n;
      if (!Is(one, x.element_type(), {product.groups, rows, columns})) return false;
      arrays.w[i] = one.untyped_data();
      if (!a.sums) continue;
      auto sums = *results.get<ffi::AnyBuffer>(1 + i);
      if (!Is(*sums, y->element_type(), {product.m, product.n})) return false;
      arrays.sums[i] = sums->untyped_data();
    }
    return true;
  }
};

struct CallOnCpu : Call {
  std::string Read(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    return ReadOperands(a, operands, results) && IsCpuPlan(a.choice, a.senders) ? "" : kDoNotFit;
  }
  int64_t WorkspaceBytes() const {
    return TokenLayout::Make(p, kCpuTokenChunkBytes).Workspace().TotalBytes();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return AllGatherGroupedMatmulCpu(p, kCpuTokenChunkBytes, arrays, view, epoch, ctx);
  }
};

struct CallOnCuda : Call {
  GemmChoice choice{};
  int32_t senders = 0;

  std::string Read(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    if (!ReadOperands(a, operands, results)) return kDoNotFit;
    const auto given = ChoiceOf(a.choice);
    // With no sender all CTAs would wait for tokens for ever.
    if (!given || !IsGroupedChoice(*given, p.product.gated) || a.senders < 1 ||
        a.senders > kMostSms || !ArePossibleParts(p.parts, p.world, p.product.groups)) {
      return kNoKernel;
    }
    choice = *given;
    senders = static_cast<int32_t>(a.senders);
    return WhyNoKernel(p, choice.portable);
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p).Workspace().TotalBytes(); }
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    return LaunchAllGatherGroupedMatmul(p, arrays, choice, senders, site, device, view, stream,
                                        error);
  }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherGroupedMatmulOp;
const Op kAllGatherGroupedMatmulOp = {kAllGatherGroupedMatmulId,
                                      "all_gather_grouped_matmul",
                                      OnCpu<CallOnCpu>,
                                      JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                                      kCpuFormats,
                                      kGroupedFormats,
                                      PlanAllGatherGroupedMatmul};

}  // namespace jflux
