// The plan of a grouped_matmul_reduce_scatter.
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_config.h"
#include "runtime/product_plan.h"

namespace jflux {

// A call has the fields of SegmentedCall. The plan has the fields of a product, parts and
// item_tokens; on the CPU only parts, item_tokens and workspace_bytes.
bool PlanGroupedMatmulReduceScatter(const Fields& fields, const Machine& machine, Fields* plan,
                                    std::string* why_not) {
  CallReader call(fields);
  const SegmentedCall c = SegmentedCall::Read(call);
  if (!call.Check(why_not)) return false;
  GroupedMatmulReduceScatterParams p{c.world, c.tokens, c.choices, 0, 1, c.product};
  if (machine.IsCpu()) {
    p.parts = p.world > 1 ? 1 : 0;
    p.item_tokens = kCpuItemTokens;
    *plan = CpuPlan(SumLayout::Make(p).Workspace().TotalBytes());
  } else {
    *why_not = WhyNoSegmentedKernel(p.product);
    if (!why_not->empty()) return false;
    if (!IsGroupedTile(/*gated=*/false, p.product.tile)) {
      *why_not = "no kernel has the tile";
      return false;
    }
    p.parts = ChooseParts(p.world, c.mean_rows, p.product.groups, kLeastRowsToScatter, kFewSpans);
    p.item_tokens = ItemTokens(p.RowBytes());
    *plan = ProductPlan{ChooseGrouped(c.OfMeanRows(p.product), machine), /*senders=*/0,
                        SumLayout::Make(p).Workspace().TotalBytes()}
                .AsFields();
  }
  (*plan)["parts"] = p.parts;
  (*plan)["item_tokens"] = p.item_tokens;
  return true;
}

}  // namespace jflux
