// The plans of moe_dispatch and moe_combine: parts of a row, and what they take of the heap.
#include "ops/moe_dispatch/moe_dispatch_plan.h"

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

}  // namespace

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

}  // namespace jflux
