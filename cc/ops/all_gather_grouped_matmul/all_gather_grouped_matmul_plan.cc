// The plan of an all_gather_grouped_matmul.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_config.h"
#include "runtime/product_plan.h"

namespace jflux {

// A call has the fields of SegmentedCall, and gated. The plan has the fields of a product, and
// parts; on the CPU only parts and workspace_bytes.
bool PlanAllGatherGroupedMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                                std::string* why_not) {
  CallReader call(fields);
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
  *why_not = WhyNoKernel(p);
  if (!why_not->empty()) return false;
  p.parts = ChooseParts(p.world, c.mean_rows, product.groups);
  if (!IsGroupedTile(product.gated, product.tile)) {
    *why_not = "no kernel has the tile";
    return false;
  }
  *plan =
      ProductPlan{ChooseGrouped(c.OfMeanRows(product), machine),
                  TokenSenders(p, c.mean_rows, machine), CudaLayoutOf(p).Workspace().TotalBytes()}
          .AsFields();
  (*plan)["parts"] = p.parts;
  return true;
}

}  // namespace jflux
