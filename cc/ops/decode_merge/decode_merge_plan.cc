// The plan of decode_merge: the bytes that it takes of the heap.
#include "ops/decode_merge/decode_merge_plan.h"

namespace jflux {

// Fields of a call: world, rows, width. Of the plan: workspace_bytes.
bool PlanDecodeMerge(const Fields& fields, const Machine&, Fields* plan, std::string* why_not) {
  CallReader call(fields);
  DecodeMergeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.rows = call.Get("rows", 1, int64_t{1} << 31);
  p.width = call.Get("width", 1, int64_t{1} << 20);
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

}  // namespace jflux
