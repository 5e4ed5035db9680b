// Properties that every product's plan must have (runtime/op.h), and a table of calls with their
// plans on an H200.
#ifndef JFLUX_TESTS_CC_PLANS_H_
#define JFLUX_TESTS_CC_PLANS_H_

#include <string>
#include <utility>
#include <vector>

#include "runtime/op.h"
#include "runtime/product_plan.h"
#include "testing.h"

namespace jflux {

struct PlannedProduct {
  int64_t world, outer, inner, k, n;
  DType out_dtype;  // operands are bfloat16
  Fields more;      // the op's own fields
  // The plan.
  GemmChoice choice;
  int32_t senders;
  int64_t workspace_bytes;

  Fields Call() const {
    Fields call{{"world", world},
                {"outer", outer},
                {"inner", inner},
                {"k", k},
                {"n", n},
                {"dtype", static_cast<int64_t>(DType::kBF16)},
                {"out_dtype", static_cast<int64_t>(out_dtype)},
                {"transpose_rhs", 0}};
    call.insert(more.begin(), more.end());
    return call;
  }
};

// A call of a product of rows that experts' tokens have, in bfloat16.
inline Fields GroupedCall(int64_t world, int64_t tokens, int64_t choices, int64_t k, int64_t n,
                          int64_t groups) {
  return {{"world", world}, {"tokens", tokens}, {"choices", choices},
          {"k", k},         {"n", n},           {"groups", groups},
          {"dtype", 1},     {"out_dtype", 1},   {"transpose_rhs", 0}};
}

inline std::string InWords(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + "=" + std::to_string(value) + " ";
  return text;
}

// The reason why the op refuses the call; empty if it accepts.
inline std::string WhyNot(const Op& op, const Fields& call, const Machine& machine) {
  Fields plan;
  std::string why_not;
  CallReader reader(call);
  return op.plan(reader, machine, &plan, &why_not) ? "" : why_not;
}

inline Fields PlanOf(const Op& op, const Fields& call, const Machine& machine) {
  Fields plan;
  std::string why_not;
  CallReader reader(call);
  EXPECT(op.plan(reader, machine, &plan, &why_not)) << why_not << ": " << InWords(call);
  return plan;
}

inline void ExpectPlans(const char* name, const std::vector<PlannedProduct>& table) {
  const Op* op = FindOp(name);
  EXPECT(op != nullptr && !table.empty());
  if (op == nullptr) return;
  for (const PlannedProduct& row : table) {
    const Fields call = row.Call();
    const Fields expected = ProductPlan{row.choice, row.senders, row.workspace_bytes}.AsFields();
    const Machine unknown{132}, known{132, 320};
    for (const Machine& machine : {unknown, known}) {
      const Fields plan = PlanOf(*op, call, machine);
      EXPECT(plan == expected) << InWords(call) << "-> " << InWords(plan);
    }
    // Asking for a plan's configuration gives the same plan: nothing is decided twice.
    Fields given = call;
    for (const char* field : {"tile_n", "cluster_m", "group_m", "splits"}) {
      given[field] = expected.at(field);
    }
    EXPECT(PlanOf(*op, given, unknown) == expected) << InWords(given);
    // The handler accepts the plan.
    const GemmChoice& c = row.choice;
    const std::vector<int64_t> attribute = {c.tile_n, c.cluster_m, c.group_m, c.splits};
    const auto taken = CudaPlanOf(attribute, row.senders, row.workspace_bytes);
    EXPECT(taken && taken->choice == c && taken->senders == row.senders);

    const Fields cpu = PlanOf(*op, call, Machine{0});
    EXPECT(cpu.size() == 1 && cpu.count("workspace_bytes") == 1) << InWords(cpu);
    EXPECT(cpu.begin()->second > 0);
  }
}

// Calls that no op plans. The reason names the problem.
inline void ExpectRefusals(const char* name, const Fields& call) {
  const Op& op = *FindOp(name);
  const Machine machine{132};
  const auto refused = [&](const Fields& bad, const std::string& reason) {
    for (const Machine& on : {machine, Machine{0}}) {
      EXPECT(WhyNot(op, bad, on).find(reason) != std::string::npos) << WhyNot(op, bad, on);
    }
  };
  const auto with = [&](const char* field, int64_t value) {
    Fields changed = call;
    changed[field] = value;
    return changed;
  };
  for (const auto& [field, value] : call) {
    Fields less = call;
    less.erase(field);
    refused(less, "has no `" + field + "`");
    refused(with(field.c_str(), -2), "`" + field + "` is -2");
  }
  refused(with("no_such_field", 1), "unknown field `no_such_field`");
  refused(with("world", kMaxRanks + 1), "`world` is 9");
}

// As above, and calls that products refuse.
inline void ExpectProductRefusals(const char* name) {
  const Fields call = PlannedProduct{2, 1, 1024, 4096, 8192, DType::kBF16, {}, {}, 0, 0}.Call();
  ExpectRefusals(name, call);
  const Op& op = *FindOp(name);
  const Machine machine{132};
  const auto why_not = [&](const Fields& changes, const Machine& on) {
    Fields changed = call;
    for (const auto& [field, value] : changes) changed[field] = value;
    return WhyNot(op, changed, on);
  };
  const auto says = [](const std::string& text, const char* what) {
    return text.find(what) != std::string::npos;
  };
  EXPECT_EQ(why_not({}, machine), "");
  EXPECT(says(why_not({{"tile_n", 192}}, machine), "has no `cluster_m`"));
  const Fields no_kernel{{"tile_n", 64}, {"cluster_m", 1}, {"group_m", 1}, {"splits", 1}};
  EXPECT(says(why_not(no_kernel, machine), "no kernel takes the configuration (tile_n 64"));
  // GPU kernels take some formats only, and rows of whole vectors.
  const std::pair<Fields, const char*> refusals[] = {
      {{{"dtype", 2}, {"out_dtype", 2}},
       "operands are float32, the kernels take float16, bfloat16"},
      {{{"out_dtype", 0}}, "results are float16, the kernels give bfloat16"},
      {{{"k", 4097}}, "k and n must be multiples of 8"},
      {{{"n", 8196}}, "k and n must be multiples of 8"}};
  for (const auto& [changes, reason] : refusals) {
    EXPECT(says(why_not(changes, machine), reason)) << InWords(changes);
    EXPECT_EQ(why_not(changes, Machine{0}), "");
  }
  EXPECT(says(why_not({{"k", INT32_MAX}, {"n", INT32_MAX}}, machine), "2^48 elements"));
  EXPECT(says(why_not({{"inner", INT32_MAX}}, machine), "2^31 rows"));
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_PLANS_H_
