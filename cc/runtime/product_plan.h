// Code that the plans of products share (runtime/op.h): the fields of a call, the fields of a plan,
// and the plan as a handler reads it from its attributes.
#ifndef JFLUX_RUNTIME_PRODUCT_PLAN_H_
#define JFLUX_RUNTIME_PRODUCT_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/format.h"
#include "core/layout.h"
#include "core/rows.h"
#include "gpu/gemm_config.h"
#include "runtime/op.h"

namespace jflux {

// Fields that every product's call has.
struct ProductCall {
  Rows rows;
  int64_t k, n;  // of all weights or terms
  DType dtype, out_dtype;
  bool transpose_rhs;
  std::optional<GemmChoice> given;  // by a tuning table or a test; else the heuristic chooses

  // The op reads its own fields and then calls `call.Check`.
  static ProductCall Read(CallReader& call) {
    ProductCall c{};
    c.rows.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
    constexpr int64_t kMost = INT32_MAX;
    c.rows.outer = call.Get("outer", 1, kMost);
    c.rows.inner = call.Get("inner", 1, kMost);
    c.k = call.Get("k", 1, kMost);
    c.n = call.Get("n", 1, kMost);
    // Within these limits no size below overflows.
    const double rows = static_cast<double>(c.rows.PerRank()) * c.rows.world;
    if (rows > kMost || rows * Max(c.k, c.n) > 0x1p48 || static_cast<double>(c.k) * c.n > 0x1p48) {
      call.Refuse("operands of more than 2^31 rows or 2^48 elements");
    }
    c.dtype = call.GetFormat("dtype");
    c.out_dtype = call.GetFormat("out_dtype");
    c.transpose_rhs = call.Get("transpose_rhs", 0, 1) == 1;
    if (call.Has("tile_n") || call.Has("cluster_m") || call.Has("group_m") || call.Has("splits")) {
      const auto number = [&](const char* name) {
        return static_cast<int32_t>(call.Get(name, 0, kMaxGroup));
      };
      c.given =
          GemmChoice{number("tile_n"), number("cluster_m"), number("group_m"), number("splits")};
    }
    return c;
  }
};

inline std::string Describe(const GemmChoice& c) {
  return "(tile_n " + std::to_string(c.tile_n) + ", cluster_m " + std::to_string(c.cluster_m) +
         ", group_m " + std::to_string(c.group_m) + ", splits " + std::to_string(c.splits) + ")";
}

// Whether GPU kernels take the call at all; else *why_not. `refused`: why they do not take its
// operands, if they do not.
inline bool IsPlannable(const ProductCall& call, const std::string& refused, std::string* why_not) {
  *why_not = refused;
  if (refused.empty() && call.given && !IsPossible(*call.given)) {
    *why_not = "no kernel takes the configuration " + Describe(*call.given);
  }
  return why_not->empty();
}

// A product's plan, as a handler gets it.
struct ProductPlan {
  GemmChoice choice;        // all zeros on the CPU
  int32_t senders;          // CTAs or store warps that send at a time: the op says what 0 means
  int64_t workspace_bytes;  // of WorkspaceLayout::TotalBytes()

  Fields AsFields() const {
    Fields fields{{"tile_n", choice.tile_n},   {"cluster_m", choice.cluster_m},
                  {"group_m", choice.group_m}, {"splits", choice.splits},
                  {"senders", senders},        {"workspace_bytes", workspace_bytes}};
    if (choice.portable) fields["portable"] = 1;
    return fields;
  }
};

// The plan of a product for the CPU.
inline Fields CpuPlan(int64_t workspace_bytes) {
  return Fields{{"workspace_bytes", workspace_bytes}};
}

// The attribute `choice`: four numbers, and for the portable main loop a fifth, which is 1. Empty
// if none can be meant.
template <typename Numbers>
std::optional<GemmChoice> ChoiceOf(const Numbers& choice) {
  const bool portable = choice.size() == 5 && choice[4] == 1;
  if (choice.size() != (portable ? 5 : 4)) return std::nullopt;
  for (size_t i = 0; i < 4; ++i) {
    if (choice[i] < 0 || choice[i] > kMaxGroup) return std::nullopt;
  }
  return GemmChoice{static_cast<int32_t>(choice[0]), static_cast<int32_t>(choice[1]),
                    static_cast<int32_t>(choice[2]), static_cast<int32_t>(choice[3]), portable};
}

// The attributes `choice`, `senders` and `workspace_bytes`. Empty if no kernel can be meant.
template <typename Numbers>
std::optional<ProductPlan> CudaPlanOf(const Numbers& choice, int64_t senders,
                                      int64_t workspace_bytes) {
  const auto c = ChoiceOf(choice);
  if (!c || senders < 0 || senders > kMostSms || !IsPossible(*c)) return std::nullopt;
  return ProductPlan{*c, static_cast<int32_t>(senders), workspace_bytes};
}

// On the CPU there is nothing to choose: four zeros, and no senders.
template <typename Numbers>
bool IsCpuPlan(const Numbers& choice, int64_t senders) {
  if (choice.size() != 4 || senders != 0) return false;
  for (size_t i = 0; i < 4; ++i) {
    if (choice[i] != 0) return false;
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_PRODUCT_PLAN_H_
