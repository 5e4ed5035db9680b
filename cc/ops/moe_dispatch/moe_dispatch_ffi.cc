// The plans and the FFI handlers of moe_dispatch and moe_combine.
#include <string>

#include "ops/moe_dispatch/moe_dispatch.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

// Fields of both: world, tokens, slots, row_bytes, and perhaps most_parts, of a row: each has a
// signal for each token of all ranks, which can take more of the heap than the rows.
TokenParts ItemsOf(CallReader* call, int warps_per_sm, const Machine& machine) {
  const int64_t row_bytes = call->Get("row_bytes", 1, kMost);
  if (row_bytes % 16 != 0) call->Refuse("a row is no multiple of 16 bytes");
  TokenParts items{call->Get("tokens", 1, kMost), row_bytes / 16, 1};
  const auto most = static_cast<int32_t>(
      call->GetOr("most_parts", TokenParts::kMostParts, 1, TokenParts::kMostParts));
  const int64_t warps = int64_t{warps_per_sm} * machine.sm_count;
  items.parts = TokenParts::PartsFor(items.tokens, items.vectors, warps, most);
  return items;
}

void CheckCounts(CallReader* call, int32_t world, int32_t slots, const TokenParts& items) {
  if (world * items.tokens * slots > kMost || world * items.Items() > kMost) {
    call->Refuse("the ranks' tokens have 2^31 choices or more");
  }
}

// Further fields: experts (of a rank), rows, capacity, alignment, stride. Of the plan: parts,
// workspace_bytes.
bool PlanMoeDispatch(const Fields& fields, const Machine& machine, Fields* plan,
                     std::string* why_not) {
  CallReader call(fields);
  MoeDispatchParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.slots = static_cast<int32_t>(call.Get("slots", 1, kMostMoeSlots));
  p.experts = static_cast<int32_t>(call.Get("experts", 1, 1 << 16));
  p.rows = static_cast<int32_t>(call.Get("rows", 1, kMost));
  p.expert_rows.capacity = static_cast<int32_t>(call.Get("capacity", -1, kMost));
  p.expert_rows.alignment = static_cast<int32_t>(call.Get("alignment", 1, kMost));
  p.expert_rows.stride = static_cast<int32_t>(call.Get("stride", 0, kMost));
  p.items = ItemsOf(&call, kMoeDispatchCtasPerSm * kMoeDispatchWarps, machine);
  CheckCounts(&call, p.world, p.slots, p.items);
  if (p.ScratchBytes() > kMostMoeDispatchScratch) {
    call.Refuse("the tables of " + std::to_string(p.experts) + " experts and " +
                std::to_string(p.AllTokens()) + " tokens do not fit into an SM's shared memory");
  }
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"parts", p.items.parts}, {"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

// A further field: rows. Of the plan: parts, workspace_bytes.
bool PlanMoeCombine(const Fields& fields, const Machine& machine, Fields* plan,
                    std::string* why_not) {
  CallReader call(fields);
  MoeCombineParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.slots = static_cast<int32_t>(call.Get("slots", 1, kMostMoeSlots));
  p.rows = static_cast<int32_t>(call.Get("rows", 1, kMost));
  p.items = ItemsOf(&call, kMoeCombineCtasPerSm * kMoeCombineWarps, machine);
  CheckCounts(&call, p.world, p.slots, p.items);
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"parts", p.items.parts}, {"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

ffi::Error DoNotFit(OpId op) {
  return InvalidArgument(std::string(NameOf(op)) + ": operands do not fit");
}

// Rows of whole vectors; empty if an array has others, or is no matrix.
std::optional<TokenParts> ItemsOf(int64_t tokens, const ffi::AnyBuffer& rows, int64_t parts) {
  if (rows.dimensions().size() != 2 || tokens < 1 || parts < 1 || parts > kMost) {
    return std::nullopt;
  }
  const auto count = static_cast<int64_t>(rows.dimensions()[0]);
  const auto bytes = static_cast<int64_t>(rows.size_bytes());
  if (count < 1 || bytes == 0 || bytes / count % 16 != 0) return std::nullopt;
  const int64_t vectors = bytes / count / 16;
  if (tokens > kMost / parts || vectors > kMost / parts) return std::nullopt;
  return TokenParts{tokens, vectors, static_cast<int32_t>(parts)};
}

// ---- moe_dispatch -------------------------------------------------------------------------------

struct DispatchAttributes {
  CallAttributes call;
  int64_t alignment = 0, capacity = 0, parts = 0, stride = 0;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("alignment", &alignment);
    read("capacity", &capacity);
    read("parts", &parts);
    read("stride", &stride);
  }
};

struct DispatchOperands {
  ffi::AnyBuffer x, indices, weights, rows, row_weights, sizes, slot, there;
};

// The parameters of the call; empty if operands do not fit.
std::optional<MoeDispatchParams> ParamsOf(const DispatchAttributes& a, const DispatchOperands& o) {
  const auto s32 = ffi::DataType::S32, f32 = ffi::DataType::F32;
  if (o.x.dimensions().size() != 2 || o.indices.dimensions().size() != 2 ||
      o.rows.dimensions().size() != 2 || o.sizes.dimensions().size() != 1) {
    return std::nullopt;
  }
  const int64_t tokens = o.x.dimensions()[0], slots = o.indices.dimensions()[1];
  const int64_t rows = o.rows.dimensions()[0], experts = o.sizes.dimensions()[0];
  const auto items = ItemsOf(tokens, o.x, a.parts);
  if (!items || !Is(o.indices, s32, {tokens, slots}) || !Is(o.weights, f32, {tokens, slots}) ||
      !Is(o.rows, o.x.element_type(), {rows, o.x.dimensions()[1]}) ||
      !Is(o.row_weights, f32, {rows}) || !Is(o.sizes, s32, {experts}) || !Is(o.slot, s32, {rows}) ||
      !Is(o.there, s32, {a.call.world * tokens, slots})) {
    return std::nullopt;
  }
  if (slots < 1 || slots > kMostMoeSlots || experts < 1 || experts > 1 << 16 || rows < 1 ||
      rows > kMost || a.call.world * items->Items() > kMost / slots || a.capacity < -1 ||
      a.capacity > kMost || a.alignment < 1 || a.alignment > kMost || a.stride < 0 ||
      a.stride > kMost) {
    return std::nullopt;
  }
  MoeDispatchParams p{};
  p.world = static_cast<int32_t>(a.call.world);
  p.slots = static_cast<int32_t>(slots);
  p.experts = static_cast<int32_t>(experts);
  p.rows = static_cast<int32_t>(rows);
  p.expert_rows = ExpertRows{static_cast<int32_t>(a.capacity), static_cast<int32_t>(a.alignment),
                             static_cast<int32_t>(a.stride)};
  p.items = *items;
  if (p.ScratchBytes() > kMostMoeDispatchScratch) return std::nullopt;
  return p;
}

MoeDispatchArrays ArraysOf(const DispatchOperands& o) {
  return MoeDispatchArrays{o.x.untyped_data(),
                           static_cast<const int32_t*>(o.indices.untyped_data()),
                           static_cast<const float*>(o.weights.untyped_data()),
                           o.rows.untyped_data(),
                           static_cast<float*>(o.row_weights.untyped_data()),
                           static_cast<int32_t*>(o.sizes.untyped_data()),
                           static_cast<int32_t*>(o.slot.untyped_data()),
                           static_cast<int32_t*>(o.there.untyped_data())};
}

// Operands and results.
constexpr auto DispatchBindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};

ffi::Future DispatchOnCpu(CallSite* site, ffi::RunId run_id, int32_t device,
                          ffi::Dictionary attributes, ffi::AnyBuffer x, ffi::AnyBuffer indices,
                          ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> rows,
                          ffi::Result<ffi::AnyBuffer> row_weights,
                          ffi::Result<ffi::AnyBuffer> sizes, ffi::Result<ffi::AnyBuffer> slot,
                          ffi::Result<ffi::AnyBuffer> there) {
  DispatchAttributes a;
  if (auto refused = ReadAttributes(kMoeDispatchId, attributes, &a)) return FailedFuture(*refused);
  const DispatchOperands o{x, indices, weights, *rows, *row_weights, *sizes, *slot, *there};
  const auto p = ParamsOf(a, o);
  if (!p) return FailedFuture(DoNotFit(kMoeDispatchId));
  return JoinFfiCall(kMoeDispatchId, site, run_id, device, a.call, p->Workspace().TotalBytes(),
                     [p = *p, arrays = ArraysOf(o)](const SymmetricView& view, uint64_t epoch,
                                                    const WaitContext& ctx) {
                       return MoeDispatchCpu(p, arrays, view, epoch, ctx);
                     });
}
XLA_FFI_DEFINE_HANDLER(kMoeDispatchCpu, DispatchOnCpu, DispatchBindings(BindCpu()));

// ---- moe_combine --------------------------------------------------------------------------------

struct CombineAttributes {
  CallAttributes call;
  int64_t parts = 0;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("parts", &parts);
  }
};

// `indices` and `slot` are for the derivatives alone.
struct CombineOperands {
  ffi::AnyBuffer y, weights, indices, slot, there, part, out;
};

std::optional<MoeCombineParams> ParamsOf(const CombineAttributes& a, const CombineOperands& o) {
  const auto s32 = ffi::DataType::S32, f32 = ffi::DataType::F32;
  const auto dtype = DTypeOf(o.y.element_type());
  if (!dtype || !Has(kMoeCombineFormats.operands, *dtype) || o.y.dimensions().size() != 2 ||
      o.part.dimensions().size() != 2) {
    return std::nullopt;
  }
  const int64_t tokens = o.part.dimensions()[0], slots = o.part.dimensions()[1];
  const int64_t rows = o.y.dimensions()[0], columns = o.y.dimensions()[1];
  const bool out_f32 = o.out.element_type() == f32;
  const auto items = ItemsOf(tokens, o.y, a.parts);
  if (!items || slots < 1 || slots > kMostMoeSlots || rows > kMost ||
      a.call.world * items->Items() > kMost / slots ||
      (!out_f32 && o.out.element_type() != o.y.element_type()) ||
      !Is(o.weights, f32, {a.call.world * tokens, slots}) ||
      !Is(o.there, s32, {a.call.world * tokens, slots}) || !Is(o.part, s32, {tokens, slots}) ||
      !Is(o.out, o.out.element_type(), {tokens, columns})) {
    return std::nullopt;
  }
  MoeCombineParams p{};
  p.world = static_cast<int32_t>(a.call.world);
  p.slots = static_cast<int32_t>(slots);
  p.rows = static_cast<int32_t>(rows);
  p.dtype = *dtype;
  p.out_f32 = out_f32;
  p.items = *items;
  return p;
}

MoeCombineArrays ArraysOf(const CombineOperands& o) {
  return MoeCombineArrays{o.y.untyped_data(), static_cast<const float*>(o.weights.untyped_data()),
                          static_cast<const int32_t*>(o.there.untyped_data()),
                          static_cast<const int32_t*>(o.part.untyped_data()), o.out.untyped_data()};
}

constexpr auto CombineBindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};

ffi::Future CombineOnCpu(CallSite* site, ffi::RunId run_id, int32_t device,
                         ffi::Dictionary attributes, ffi::AnyBuffer y, ffi::AnyBuffer weights,
                         ffi::AnyBuffer indices, ffi::AnyBuffer slot, ffi::AnyBuffer there,
                         ffi::AnyBuffer part, ffi::Result<ffi::AnyBuffer> out) {
  CombineAttributes a;
  if (auto refused = ReadAttributes(kMoeCombineId, attributes, &a)) return FailedFuture(*refused);
  const CombineOperands o{y, weights, indices, slot, there, part, *out};
  const auto p = ParamsOf(a, o);
  if (!p) return FailedFuture(DoNotFit(kMoeCombineId));
  return JoinFfiCall(kMoeCombineId, site, run_id, device, a.call, p->Workspace().TotalBytes(),
                     [p = *p, arrays = ArraysOf(o)](const SymmetricView& view, uint64_t epoch,
                                                    const WaitContext& ctx) {
                       return MoeCombineCpu(p, arrays, view, epoch, ctx);
                     });
}
XLA_FFI_DEFINE_HANDLER(kMoeCombineCpu, CombineOnCpu, CombineBindings(BindCpu()));

// ---- On GPUs ------------------------------------------------------------------------------------

#ifdef JFLUX_WITH_CUDA
ffi::Error DispatchOnCuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                          ffi::AnyBuffer x, ffi::AnyBuffer indices, ffi::AnyBuffer weights,
                          ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::AnyBuffer> row_weights,
                          ffi::Result<ffi::AnyBuffer> sizes, ffi::Result<ffi::AnyBuffer> slot,
                          ffi::Result<ffi::AnyBuffer> there) {
  DispatchAttributes a;
  if (auto refused = ReadAttributes(kMoeDispatchId, attributes, &a)) return *refused;
  const DispatchOperands o{x, indices, weights, *rows, *row_weights, *sizes, *slot, *there};
  const auto p = ParamsOf(a, o);
  if (!p) return DoNotFit(kMoeDispatchId);
  return LaunchCudaCall(
      kMoeDispatchId, ordinal, a.call, p->Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMoeDispatch(*p, ArraysOf(o), a.call.site, device, view, stream, error);
      });
}

ffi::Error CombineOnCuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                         ffi::AnyBuffer y, ffi::AnyBuffer weights, ffi::AnyBuffer indices,
                         ffi::AnyBuffer slot, ffi::AnyBuffer there, ffi::AnyBuffer part,
                         ffi::Result<ffi::AnyBuffer> out) {
  CombineAttributes a;
  if (auto refused = ReadAttributes(kMoeCombineId, attributes, &a)) return *refused;
  const CombineOperands o{y, weights, indices, slot, there, part, *out};
  const auto p = ParamsOf(a, o);
  if (!p) return DoNotFit(kMoeCombineId);
  return LaunchCudaCall(
      kMoeCombineId, ordinal, a.call, p->Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMoeCombine(*p, ArraysOf(o), a.call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kMoeDispatchCuda, DispatchOnCuda, DispatchBindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMoeCombineCuda, CombineOnCuda, CombineBindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMoeDispatchOp, kMoeCombineOp;
const Op kMoeDispatchOp = {
    kMoeDispatchId, "moe_dispatch", kMoeDispatchCpu, JFLUX_IF_CUDA(kMoeDispatchCuda),
    kMovesBytes,    kMovesBytes,    PlanMoeDispatch};
const Op kMoeCombineOp = {
    kMoeCombineId,      "moe_combine",      kMoeCombineCpu, JFLUX_IF_CUDA(kMoeCombineCuda),
    kMoeCombineFormats, kMoeCombineFormats, PlanMoeCombine};

}  // namespace jflux
