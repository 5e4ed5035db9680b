// The plans and the FFI handlers of moe_dispatch and moe_combine.
#include <string>

#include "ops/moe_dispatch/moe_dispatch.h"
#include "runtime/fault.h"
#include "runtime/handlers.h"

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
bool PlanMoeDispatch(CallReader& call, const Machine& machine, Fields* plan, std::string* why_not) {
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
  if (p.ScratchBytes() > MostMoeDispatchScratch(machine.arch)) {
    call.Refuse("the tables of " + std::to_string(p.experts) + " experts and " +
                std::to_string(p.AllTokens()) + " tokens do not fit into an SM's shared memory");
  }
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"parts", p.items.parts}, {"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

// Whether sums of this type travel in the format of this number.
bool HasWire(DType dtype, int64_t wire) {
  return wire >= 0 && wire < kFormatCount && Has(kWireFormats, static_cast<DType>(wire)) &&
         Has(kMoeCombineFormats.operands, dtype);
}

// Further fields: rows, and perhaps wire, the format of what travels, and then dtype, y's. Of the
// plan: parts, workspace_bytes.
bool PlanMoeCombine(CallReader& call, const Machine& machine, Fields* plan, std::string* why_not) {
  MoeCombineParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.slots = static_cast<int32_t>(call.Get("slots", 1, kMostMoeSlots));
  p.rows = static_cast<int32_t>(call.Get("rows", 1, kMost));
  const int64_t wire = call.GetOr("wire", -1, -1, kFormatCount - 1);
  p.items = ItemsOf(&call, MoeCombineCtasPerSm(wire >= 0) * kMoeCombineWarps, machine);
  CheckCounts(&call, p.world, p.slots, p.items);
  if (wire >= 0) {
    p.dtype = call.GetFormat("dtype");
    if (!HasWire(p.dtype, wire)) call.Refuse("no kernel has such a wire");
  }
  if (!call.Check(why_not)) return false;
  if (wire >= 0) p.SetWire(static_cast<DType>(wire));
  *plan = Fields{{"parts", p.items.parts}, {"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
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
  bool fill = true;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("alignment", &alignment)("capacity", &capacity)("fill", &fill)("parts", &parts)("stride",
                                                                                         &stride);
  }
};

// Operands x, indices, weights[, scale]. Results rows, row_weights, sizes, slot, there[,
// row_scale].
struct DispatchCall : CallOf<kMoeDispatchId, MoeDispatchCpu, LaunchMoeDispatch> {
  std::string Read(const DispatchAttributes& a, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
    const auto s32 = ffi::DataType::S32, f32 = ffi::DataType::F32;
    const bool is_scaled = operands.size() == 4;
    if (operands.size() < 3 || operands.size() > 4 || results.size() != (is_scaled ? 6 : 5)) {
      return kDoNotFit;
    }
    const auto operand = [&](size_t i) { return *operands.get<ffi::AnyBuffer>(i); };
    const auto result = [&](size_t i) { return *results.get<ffi::AnyBuffer>(i); };
    auto x = operand(0), indices = operand(1), weights = operand(2);
    auto rows = result(0), row_weights = result(1), sizes = result(2), slot = result(3),
         there = result(4);
    if (x.dimensions().size() != 2 || indices.dimensions().size() != 2 ||
        rows->dimensions().size() != 2 || sizes->dimensions().size() != 1) {
      return kDoNotFit;
    }
    const int64_t tokens = x.dimensions()[0], slots = indices.dimensions()[1];
    const int64_t count = rows->dimensions()[0], experts = sizes->dimensions()[0];
    auto items = ItemsOf(tokens, x, a.parts);
    if (!items || !Is(indices, s32, {tokens, slots}) || !Is(weights, f32, {tokens, slots}) ||
        !Is(*rows, x.element_type(), {count, x.dimensions()[1]}) ||
        !Is(*row_weights, f32, {count}) || !Is(*sizes, s32, {experts}) ||
        !Is(*slot, s32, {count}) || !Is(*there, s32, {a.call.world * tokens, slots})) {
      return kDoNotFit;
    }
    if (slots < 1 || slots > kMostMoeSlots || experts < 1 || experts > 1 << 16 || count < 1 ||
        count > kMost || a.call.world * items->Items() > kMost / slots || a.capacity < -1 ||
        a.capacity > kMost || a.alignment < 1 || a.alignment > kMost || a.stride < 0 ||
        a.stride > kMost) {
      return kDoNotFit;
    }
    p.world = static_cast<int32_t>(a.call.world);
    p.slots = static_cast<int32_t>(slots);
    p.experts = static_cast<int32_t>(experts);
    if (is_scaled) {
      const auto scale = operand(3);
      auto row_scale = result(5);
      const auto of_scale = ItemsOf(tokens, scale, a.parts);
      if (!of_scale || !Is(scale, f32, {tokens, scale.dimensions()[1]}) ||
          !Is(*row_scale, f32, {count, scale.dimensions()[1]}) ||
          items->vectors > kMost / a.parts - of_scale->vectors) {
        return kDoNotFit;
      }
      p.scale_vectors = of_scale->vectors;
      items->vectors += of_scale->vectors;
      arrays.scale = scale.untyped_data();
      arrays.row_scale = row_scale->untyped_data();
    }
    p.rows = static_cast<int32_t>(count);
    p.expert_rows = ExpertRows{static_cast<int32_t>(a.capacity), static_cast<int32_t>(a.alignment),
                               static_cast<int32_t>(a.stride)};
    p.items = *items;
    p.fill = a.fill;
    if (p.ScratchBytes() > MostMoeDispatchScratch(kHopperArch)) return kDoNotFit;
    arrays.x = x.untyped_data();
    arrays.indices = static_cast<const int32_t*>(indices.untyped_data());
    arrays.weights = static_cast<const float*>(weights.untyped_data());
    arrays.rows = rows->untyped_data();
    arrays.row_weights = static_cast<float*>(row_weights->untyped_data());
    arrays.sizes = static_cast<int32_t*>(sizes->untyped_data());
    arrays.slot = static_cast<int32_t*>(slot->untyped_data());
    arrays.there = static_cast<int32_t*>(there->untyped_data());
    return "";
  }
  int64_t WorkspaceBytes() const { return p.Workspace().TotalBytes(); }
};

// ---- moe_combine --------------------------------------------------------------------------------

struct CombineAttributes {
  CallAttributes call;
  int64_t parts = 0;
  int64_t wire = -1;  // number of the format of what travels; -1: y's own

  void Read(AttributeReader& read) {
    call.Read(read);
    read("parts", &parts)("wire", &wire);
  }
};

struct CombineCall : CallOf<kMoeCombineId, MoeCombineCpu, LaunchMoeCombine> {
  // `indices` and `slot` are for the derivatives alone.
  std::string Read(const CombineAttributes& a, ffi::AnyBuffer y, ffi::AnyBuffer weights,
                   ffi::AnyBuffer /*indices*/, ffi::AnyBuffer /*slot*/, ffi::AnyBuffer there,
                   ffi::AnyBuffer part, ffi::Result<ffi::AnyBuffer> out) {
    const auto s32 = ffi::DataType::S32, f32 = ffi::DataType::F32;
    const auto dtype = DTypeOf(y.element_type());
    if (!dtype || !Has(kMoeCombineFormats.operands, *dtype) || y.dimensions().size() != 2 ||
        part.dimensions().size() != 2) {
      return kDoNotFit;
    }
    const int64_t tokens = part.dimensions()[0], slots = part.dimensions()[1];
    const int64_t rows = y.dimensions()[0], columns = y.dimensions()[1];
    const bool out_f32 = out->element_type() == f32;
    const auto items = ItemsOf(tokens, y, a.parts);
    if (!items || slots < 1 || slots > kMostMoeSlots || rows > kMost ||
        a.call.world * items->Items() > kMost / slots ||
        (!out_f32 && out->element_type() != y.element_type()) ||
        !Is(weights, f32, {a.call.world * tokens, slots}) ||
        !Is(there, s32, {a.call.world * tokens, slots}) || !Is(part, s32, {tokens, slots}) ||
        !Is(*out, out->element_type(), {tokens, columns})) {
      return kDoNotFit;
    }
    p.world = static_cast<int32_t>(a.call.world);
    p.slots = static_cast<int32_t>(slots);
    p.rows = static_cast<int32_t>(rows);
    p.dtype = *dtype;
    p.out_f32 = out_f32;
    p.items = *items;
    if (a.wire != -1) {
      if (!HasWire(*dtype, a.wire)) return kDoNotFit;
      p.SetWire(static_cast<DType>(a.wire));
    }
    arrays = {y.untyped_data(), static_cast<const float*>(weights.untyped_data()),
              static_cast<const int32_t*>(there.untyped_data()),
              static_cast<const int32_t*>(part.untyped_data()), out->untyped_data()};
    return "";
  }
  int64_t WorkspaceBytes() const { return p.Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMoeDispatchOp, kMoeCombineOp;
const Op kMoeDispatchOp = {
    kMoeDispatchId, "moe_dispatch", OnCpu<DispatchCall>, JFLUX_IF_CUDA(OnCuda<DispatchCall>),
    kMovesBytes,    kMovesBytes,    PlanMoeDispatch};
const Op kMoeCombineOp = {
    kMoeCombineId,      "moe_combine",      OnCpu<CombineCall>, JFLUX_IF_CUDA(OnCuda<CombineCall>),
    kMoeCombineFormats, kMoeCombineFormats, PlanMoeCombine};

}  // namespace jflux
