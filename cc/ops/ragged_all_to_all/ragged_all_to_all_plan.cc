// The plan of a ragged_all_to_all: the bytes that it takes of the heap.
#include "ops/ragged_all_to_all/ragged_all_to_all_plan.h"

namespace jflux {

// Fields of a call: world, slices, batch, output_rows, row_bytes and chunked. Of the plan:
// workspace_bytes.
bool PlanRaggedAllToAll(const Fields& fields, const Machine&, Fields* plan, std::string* why_not) {
  constexpr int64_t kMost = int64_t{1} << 31;
  CallReader call(fields);
  RaggedParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.slices = static_cast<int32_t>(call.Get("slices", 1, 1 << 20));
  p.batch = static_cast<int32_t>(call.Get("batch", 1, 1 << 20));
  p.output_rows = call.Get("output_rows", 1, kMost - 1);
  p.row_bytes = call.Get("row_bytes", 1, kMost - 1);
  p.chunked = call.Get("chunked", 0, 1) == 1;
  if (int64_t{p.slices} * p.batch > 1 << 20) call.Refuse("there are more than 2^20 slices");
  if (p.ImageRows() >= kMost) call.Refuse("there are 2^31 rows or more");
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.WorkspaceBytes()}};
  return true;
}

}  // namespace jflux
