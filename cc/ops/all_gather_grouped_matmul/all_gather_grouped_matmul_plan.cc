// The plan of an all_gather_grouped_matmul.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_config.h"
#include "runtime/product_plan.h"

namespace jflux {

// Fields of a call: world, tokens (of a rank), choices, k, n, groups, dtype, out_dtype,
// transpose_rhs, gated; perhaps tile_n and cluster_m, which a test forces. Of the plan: those of a
// product, and parts. On the CPU: parts and workspace_bytes.
bool PlanAllGatherGroupedMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                                std::string* why_not) {
  constexpr int64_t kMost = INT32_MAX;
  CallReader call(fields);
  AllGatherGroupedMatmulParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.tokens = call.Get("tokens", 1, kMost);
  p.choices = static_cast<int32_t>(call.Get("choices", 1, kMost));
  GroupedMatmulParams& product = p.product;
  product.k = call.Get("k", 1, kMost);
  product.n = call.Get("n", 1, kMost);
  product.groups = call.Get("groups", 1, kMost);
  product.dtype = static_cast<DType>(call.Get("dtype", 0, 3));
  product.out_dtype = static_cast<DType>(call.Get("out_dtype", 0, 3));
  product.transpose_rhs = call.Get("transpose_rhs", 0, 1) == 1;
  product.gated = call.Get("gated", 0, 1) == 1;
  product.tile.columns = static_cast<int32_t>(call.GetOr("tile_n", 0, 0, kMaxGroup));
  product.tile.cluster_m = static_cast<int32_t>(call.GetOr("cluster_m", 0, 0, 2));
  const double rows = static_cast<double>(p.world) * p.tokens * p.choices;
  const double widest = static_cast<double>(Max(product.k, product.n));
  if (rows > kMost || rows * widest > 0x1p48 ||
      widest * widest * static_cast<double>(product.groups) > 0x1p52) {
    call.Refuse("operands of more than 2^31 rows or 2^48 elements");
  }
  if (!call.Check(why_not)) return false;
  product.m = p.world * p.tokens * p.choices;
  if (machine.IsCpu()) {
    p.parts = p.world > 1 ? 1 : 0;
    *plan = CpuPlan(TokenLayout::Make(p, kCpuTokenChunkBytes).Workspace().TotalBytes());
    (*plan)["parts"] = p.parts;
    return true;
  }
  *why_not = WhyNoKernel(p);
  if (!why_not->empty()) return false;
  p.parts = ChooseParts(p.world, product.m, product.groups);
  if (!IsGroupedTile(product.gated, product.tile)) {
    *why_not = "no kernel has the tile";
    return false;
  }
  *plan = ProductPlan{ChooseGrouped(product, machine), TokenSenders(p, machine),
                      CudaLayoutOf(p).Workspace().TotalBytes()}
              .AsFields();
  (*plan)["parts"] = p.parts;
  return true;
}

}  // namespace jflux
