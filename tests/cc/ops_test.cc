// The list of ops (cc/ops/registry.cc), and what is derived from it.
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "core/activation.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/grouped_matmul/segments.h"
#include "plans.h"
#include "runtime/capi.h"
#include "runtime/fault.h"
#include "testing.h"

namespace jflux {
namespace {

TEST(NumbersAndNamesAreUnique) {
  std::set<uint32_t> ids;
  std::set<std::string> names;
  for (const Op* op : AllOps()) {
    const auto id = static_cast<uint32_t>(op->id);
    EXPECT(0 < id && id < kFirstCustomOp) << op->name;
    EXPECT(ids.insert(id).second) << op->name << " has the number of another op, " << id;
    EXPECT(names.insert(op->name).second) << op->name;
    EXPECT(FindOp(op->name) == op);
    EXPECT_EQ(std::string(NameOf(op->id)), op->name);
  }
  EXPECT(FindOp("no_such_op") == nullptr);
  EXPECT_EQ(std::string(NameOf(OpId{kFirstCustomOp - 1})), "unknown op");
}

TEST(EveryOpIsWhole) {
  for (const Op* op : AllOps()) {
    EXPECT_EQ(op->cuda != nullptr, jflux_built_with_cuda() != 0) << op->name;
    EXPECT_EQ(jflux_most_splits(op->name), op->most_splits);
    if (op->IsLocal()) continue;
    EXPECT(op->cpu != nullptr) << op->name;
    EXPECT(op->most_splits == 1 || op->most_splits == 2 || op->most_splits == 4) << op->name;
    const std::string why_not = WhyNot(*op, {}, Machine{132});
    EXPECT(why_not.find("the call has no `") == 0) << op->name << ": " << why_not;
  }
}

TEST(EveryFolderHasKernels) {
  for (const OpFolder& folder : AllFolders()) {
    EXPECT_EQ(folder.load_kernels != nullptr, jflux_built_with_cuda() != 0);
    EXPECT(folder.gpus.Has(kHopperArch));
    for (const Op* op : folder.ops) {
      EXPECT_EQ(jflux_gpus(op->name).from, folder.gpus.from);
      EXPECT_EQ(jflux_gpus(op->name).to, folder.gpus.to);
    }
  }
  EXPECT_EQ(jflux_gpus("moe_route").from, kPortableArch);
  EXPECT_EQ(jflux_gpus("no_such_op").from, 0);
}

TEST(EveryHandlerIsATarget) {
  std::map<std::string, int> targets;
  for (const JfluxTarget* t = jflux_targets(); t->name != nullptr; ++t) {
    EXPECT(std::strncmp(t->name, "jflux_", 6) == 0) << t->name;
    EXPECT(t->execute != nullptr) << t->name << " " << t->platform;
    // A local op has no call site and no use of a workspace; nor has a check.
    const Op* op = FindOp(t->name + 6);
    EXPECT_EQ(t->instantiate == nullptr,
              op == nullptr ? std::strcmp(t->name, "jflux_in_range") == 0 : op->IsLocal());
    ++targets[t->name + 6];
  }
  for (const char* of_no_op : {"node_exchange", "module_call", "in_range"}) targets.erase(of_no_op);
  for (const Op* op : AllOps()) {
    EXPECT_EQ(targets[op->name], (op->cpu != nullptr) + (op->cuda != nullptr)) << op->name;
  }
  EXPECT_EQ(targets.size(), AllOps().size());
}

TEST(ConstantsOfOneListAreInOrder) {
  std::map<std::string, int64_t> numbers;
  std::map<std::string, int64_t> next = {{"activations", 1},
                                         {"all_reduce_algorithms", 0},
                                         {"norms", 1},
                                         {"wire_parts", 0},
                                         {"grouped_tiles", 0},
                                         {"grouped_tiles_of_sums", 0},
                                         {"grouped_tiles_of_blocks", 0},
                                         {"grouped_tiles_of_vectors", 0}};
  for (const JfluxField* c = jflux_constants(); c->name != nullptr; ++c) {
    EXPECT(numbers.emplace(c->name, c->value).second) << c->name;
    const char* dot = std::strchr(c->name, '.');
    if (dot == nullptr) continue;
    const std::string list(c->name, dot);
    EXPECT(next.count(list) == 1 && next[list] == c->value) << c->name;
    ++next[list];
  }
  EXPECT_EQ(numbers["max_ranks"], kMaxRanks);
  EXPECT_EQ(numbers["max_weights"], kMaxWeights);
  EXPECT_EQ(numbers["tile_rows"], kGemmTileM);
  EXPECT_EQ(numbers["vector_bytes"], kVectorBytes);
  EXPECT_EQ(numbers["activations.relu"], static_cast<int64_t>(Activation::kRelu));
  EXPECT(IsActivation(next["activations"] - 1) && !IsActivation(next["activations"]));
  EXPECT_EQ(numbers["all_reduce_algorithms.butterfly"],
            static_cast<int64_t>(AllReduceAlgorithm::kButterfly));
  EXPECT_EQ(next["all_reduce_algorithms"], kAllReduceAlgorithms);
  EXPECT_EQ(numbers["norms.layer"], static_cast<int64_t>(Norm::kLayer));
  EXPECT_EQ(next["norms"], kNorms);
}

TEST(PlansThroughTheCInterface) {
  const JfluxField call[] = {{"world", 2}, {"shard_bytes", 100000}, {"chunked", 1}};
  JfluxField plan[4];
  int count = 0;
  const auto plan_of = [&](const char* op, int fields, int32_t sm_count, int capacity) {
    const char* why_not =
        jflux_plan(op, call, fields, sm_count, 0, kHopperArch, plan, capacity, &count);
    return std::string(why_not == nullptr ? "" : why_not);
  };
  EXPECT_EQ(plan_of("all_gather", 3, 132, 4), "");
  EXPECT(count == 1 && std::string(plan[0].name) == "workspace_bytes");
  EXPECT_EQ(plan[0].value, 271360);
  EXPECT_EQ(plan_of("all_gather", 3, 132, 0), "");
  EXPECT_EQ(count, 1);  // more than fit
  EXPECT_EQ(plan_of("all_gather", 2, 132, 4), "jflux.all_gather: the call has no `chunked`");
  EXPECT_EQ(plan_of("all_father", 3, 132, 4), "jflux has no op all_father");
  EXPECT(plan_of("all_gather", 3, -1, 4).find("negative") != std::string::npos);
}

// Calls that a handler refuses before it reads its operands.
TEST(MalformedPlans) {
  using Numbers = std::vector<int64_t>;
  const Numbers good = {192, 2, 8, 1};
  EXPECT(CudaPlanOf(good, 0, 1) && CudaPlanOf(good, kMostSms, 1));
  EXPECT(CudaPlanOf(Numbers{128, 1, 8, 1, 1}, 0, 1)->choice == Portable(8));
  EXPECT(!CudaPlanOf(good, -1, 1) && !CudaPlanOf(good, kMostSms + 1, 1));
  for (const Numbers& bad :
       {Numbers{}, Numbers{192, 2, 8}, Numbers{192, 2, 8, 1, 1}, Numbers{128, 1, 8, 1, 2},
        Numbers{128, 1, 8, 2, 1}, Numbers{0, 0, 0, 0}, Numbers{192, 2, 8, 2}, Numbers{191, 2, 8, 1},
        Numbers{192, 2, -1, 1}, Numbers{192, 2, kMaxGroup + 1, 1},
        Numbers{192 + (int64_t{1} << 32), 2, 8, 1}}) {
    EXPECT(!CudaPlanOf(bad, 0, 1));
  }
  // Grouped products have tiles that others have not.
  for (const GemmChoice& c : GroupedChoicesOf(Scales::kNone, /*quantizes=*/false)) {
    const auto read = ChoiceOf(Numbers{c.tile_n, c.cluster_m, c.group_m, 1});
    EXPECT(read && *read == c && IsGroupedChoice(*read, /*gated=*/false)) << c.tile_n;
  }
  EXPECT(!IsGroupedChoice(*ChoiceOf(Numbers{0, 0, 0, 0}), /*gated=*/false));
  EXPECT(IsCpuPlan(Numbers{0, 0, 0, 0}, 0));
  EXPECT(!IsCpuPlan(good, 0) && !IsCpuPlan(Numbers{0, 0, 0, 0}, 1) && !IsCpuPlan(Numbers{}, 0));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
