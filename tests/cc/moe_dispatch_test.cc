// moe_dispatch and moe_combine: where rows lie, parts of rows, and the bodies that the CPU back end
// and the kernels share, on 1 to 8 ranks.
#include "ops/moe_dispatch/moe_dispatch.h"

#include <array>
#include <set>

#include "expect_right.h"
#include "moe_dispatch_call.h"
#include "plans.h"
#include "testing.h"

namespace jflux {
namespace {

// ---- Index arithmetic ---------------------------------------------------------------------------

TEST(MarksNumberTheTokensOfEachExpert) {
  std::mt19937 random(1);
  for (int32_t experts : {1, 3, 7}) {
    for (int32_t tokens : {1, 31, 32, 33, 127, 128, 129, 400}) {
      for (const ExpertRows& rows :
           {ExpertRows{-1, 1, 0}, ExpertRows{5, 4, 0}, ExpertRows{-1, 8, 0}, ExpertRows{3, 1, 7}}) {
        std::vector<int32_t> memory(ExpertMarks::Bytes(experts, tokens) / 4 + 1, -1);
        const auto marks = ExpertMarks::At(memory.data(), experts, tokens);
        std::vector<std::set<int32_t>> chosen(experts);
        marks.Build<shmem::Block>(rows, [&](auto&& mark) {
          for (int32_t i = 0; i < 2 * tokens; ++i) {
            const auto e = static_cast<int32_t>(random() % experts);
            const auto t = static_cast<int32_t>(random() % tokens);
            mark(e, t);
            chosen[e].insert(t);
          }
        });
        EXPECT_EQ(memory.back(), -1);  // past the end
        std::set<int32_t> taken;
        int32_t start = 0;
        for (int32_t e = 0; e < experts; ++e) {
          EXPECT_EQ(marks.starts[e], start);
          int32_t number = 0;
          for (int32_t t : chosen[e]) {
            const bool fits = rows.capacity < 0 || number < rows.capacity;
            const int32_t row = marks.Row(e, t);
            EXPECT_EQ(row, fits ? start + number : ExpertMarks::kDropped);
            if (fits) taken.insert(row);
            number += fits;
          }
          EXPECT_EQ(marks.sizes[e], number);
          start += rows.Padded(number);
        }
        EXPECT_EQ(marks.starts[experts], start);
        for (int32_t row = 0; row < start + 3; ++row) {
          EXPECT_EQ(marks.IsFree(row), taken.count(row) == 0) << row;
        }
      }
    }
  }
}

TEST(PartsCoverARowOnce) {
  for (int64_t tokens : {1, 5}) {
    for (int64_t vectors : {1, 2, 7, 896}) {
      for (int32_t parts : {1, 2, 3, 8}) {
        const TokenParts items{tokens, vectors, parts};
        std::vector<int> visits(tokens * vectors, 0);
        for (int64_t item = 0; item < items.Items(); ++item) {
          const int32_t part = items.Part(item);
          for (int64_t v = items.First(part); v < items.First(part + 1); ++v) {
            ++visits[items.Token(item) * vectors + v];
          }
        }
        for (int count : visits) EXPECT_EQ(count, 1);
      }
    }
  }
  EXPECT_EQ(TokenParts::PartsFor(1, 896, 132), 8);
  EXPECT_EQ(TokenParts::PartsFor(32, 896, 132), 4);
  EXPECT_EQ(TokenParts::PartsFor(64, 896, 132), 2);
  EXPECT_EQ(TokenParts::PartsFor(128, 896, 132), 1);
  EXPECT_EQ(TokenParts::PartsFor(1, 64, 132), 1);
  EXPECT_EQ(TokenParts::PartsFor(1, 256, 132), 4);
  EXPECT_EQ(TokenParts::PartsFor(1, 896, 0), 1);
  EXPECT_EQ(TokenParts::PartsFor(1, 896, 132, 4), 4);
  EXPECT_EQ(TokenParts::PartsFor(1, 896, 132, 3), 2);
  EXPECT_EQ(TokenParts::PartsFor(1, 896, 132, 1), 1);
}

// ---- Plans --------------------------------------------------------------------------------------

Fields DispatchOf(int64_t tokens, int64_t experts, int64_t row_bytes) {
  return {{"world", 2},         {"tokens", tokens},       {"slots", 8},
          {"experts", experts}, {"row_bytes", row_bytes}, {"rows", 100},
          {"capacity", -1},     {"alignment", 1},         {"stride", 0}};
}

TEST(PlansSayWhatFits) {
  const Op& op = *FindOp("moe_dispatch");
  EXPECT_EQ(WhyNot(op, DispatchOf(4096, 128, 14336), Machine{132}), "");
  EXPECT(WhyNot(op, DispatchOf(8192, 128, 14336), Machine{132}).find("shared memory") !=
         std::string::npos);
  // Portable code has 96 KiB.
  const Machine portable{108, 0, kPortableArch};
  EXPECT_EQ(WhyNot(op, DispatchOf(8192, 32, 14336), portable), "");
  EXPECT(WhyNot(op, DispatchOf(4096, 128, 14336), portable).find("shared memory") !=
         std::string::npos);
  EXPECT(WhyNot(op, DispatchOf(8, 128, 40), Machine{132}).find("16 bytes") != std::string::npos);
  EXPECT_EQ(
      WhyNot(*FindOp("moe_combine"),
             {{"world", 8}, {"tokens", 8192}, {"slots", 8}, {"row_bytes", 14336}, {"rows", 9}},
             Machine{132}),
      "");
}

// 4096 rows of 14336 bytes have halves of 64 MiB, and 32768 signals of parts more than 64.
TEST(FewerPartsTakeLessOfTheHeap) {
  const Op& op = *FindOp("moe_combine");
  const Fields call{{"world", 8}, {"tokens", 512}, {"slots", 8}, {"row_bytes", 14336}, {"rows", 9}};
  const int64_t least = WorkspaceLayout{64 << 20}.TotalBytes();
  for (const auto& [most, parts, bytes] :
       {std::array<int64_t, 3>{8, 8, WorkspaceLayout{256 << 20}.TotalBytes()},
        std::array<int64_t, 3>{4, 4, WorkspaceLayout{128 << 20}.TotalBytes()},
        std::array<int64_t, 3>{1, 1, least}}) {
    Fields fields = call, plan;
    fields["most_parts"] = most;
    plan = PlanOf(op, fields, Machine{132});
    EXPECT_EQ(plan["parts"], parts);
    EXPECT_EQ(plan["workspace_bytes"], bytes);
  }
  Fields none = call;
  none["most_parts"] = 9;
  EXPECT(WhyNot(op, none, Machine{132}).find("most_parts") != std::string::npos);
}

TEST(PlansOfAWire) {
  const Op& op = *FindOp("moe_combine");
  Fields call{{"world", 8}, {"tokens", 4096}, {"slots", 8}, {"row_bytes", 14336}, {"rows", 9}};
  EXPECT_EQ(PlanOf(op, call, Machine{132})["workspace_bytes"],
            WorkspaceLayout{512 << 20}.TotalBytes());
  call["wire"] = static_cast<int64_t>(DType::kS8);
  call["dtype"] = static_cast<int64_t>(DType::kBF16);
  EXPECT_EQ(PlanOf(op, call, Machine{132})["workspace_bytes"],
            WorkspaceLayout{256 << 20}.TotalBytes());
  call["wire"] = static_cast<int64_t>(DType::kF8E5M2);
  EXPECT(WhyNot(op, call, Machine{132}).find("such a wire") != std::string::npos);
}

// ---- The bodies ---------------------------------------------------------------------------------

// Calls of both ops, of many sizes, on one workspace.
void Check(int world, int blocks, int running, const RunOptions& options) {
  std::vector<std::unique_ptr<MoeCall>> calls;
  const auto smallest = MoeParamsFor(world, 1, 1, 1, 1, -1, 1, false, 1).Workspace();
  uint32_t seed = 10 * world;
  for (int64_t tokens : {1, 6, 17}) {
    for (int32_t slots : {1, 4}) {
      for (int32_t experts : {1, 3}) {
        for (int32_t capacity : {-1, 2}) {
          for (int32_t parts : {1, 3}) {
            const bool masked = seed % 2 == 1;
            auto p = MoeParamsFor(world, tokens, slots, experts, 5, capacity,
                                  1 + static_cast<int32_t>(seed % 4), masked, parts);
            p.fill = seed / 2 % 2 == 0;
            p.scale_vectors = seed / 2 % 3;
            if (p.Workspace().TotalBytes() != smallest.TotalBytes()) continue;
            const DType dtype = std::vector{DType::kF16, DType::kBF16, DType::kF32}[seed % 3];
            const bool out_f32 = seed % 4 == 3;
            calls.push_back(std::make_unique<MoeDispatchCall>(p, blocks, running, ++seed));
            calls.push_back(
                std::make_unique<MoeCombineCall>(p, dtype, out_f32, blocks, running, ++seed));
          }
        }
      }
    }
  }
  EXPECT(calls.size() > 40);
  ExpectRight(calls, PlainHeap(world, smallest, options.first_epoch), options);
}

TEST(EqualTheirDefinition) {
  OnEverySchedule([](int world, const RunOptions& options) { Check(world, 1, 1, options); });
}

// As CTAs of a kernel, however few of them run at a time.
TEST(BlocksShareARanksPart) {
  RunOptions options;
  options.max_delay_us = 200;
  for (int world : {2, 3}) {
    for (const auto& [blocks, running] : {std::pair{3, 1}, std::pair{4, 2}, std::pair{8, 8}}) {
      Check(world, blocks, running, options);
    }
  }
}

// More items of a block than it sends ahead.
TEST(ManyTokens) {
  for (int32_t capacity : {-1, 40}) {
    const auto p = MoeParamsFor(3, 150, 3, 5, 6, capacity, 4, false, 1);
    std::vector<std::unique_ptr<MoeCall>> calls;
    for (uint32_t seed : {1, 2, 3}) {
      calls.push_back(std::make_unique<MoeDispatchCall>(p, 4, 2, seed));
    }
    ExpectRight(calls, PlainHeap(3, p.Workspace()));
    calls.clear();
    for (uint32_t seed : {1, 2, 3}) {
      calls.push_back(std::make_unique<MoeCombineCall>(p, DType::kBF16, true, 4, 2, seed));
    }
    MoeCombineParams c{};
    c.world = 3;
    c.items = p.items;
    ExpectRight(calls, PlainHeap(3, c.Workspace()));
  }
}

// Rows of one block and of several, the last one short, with parts that have no block.
TEST(SumsTravelInAWire) {
  for (const auto& [vectors, parts] : {std::pair{1, 1}, std::pair{16, 3}, std::pair{75, 2}}) {
    for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
      const auto p = MoeParamsFor(3, 20, 3, 5, vectors, 6, 4, false, parts);
      std::vector<std::unique_ptr<MoeCall>> calls;
      for (DType wire : {DType::kF8E4M3FN, DType::kS8}) {
        for (bool out_f32 : {false, true}) {
          const auto seed = static_cast<uint32_t>(calls.size()) + 1;
          calls.push_back(std::make_unique<MoeCombineCall>(p, dtype, out_f32, 4, 2, seed, wire));
        }
      }
      ExpectRight(calls, PlainHeap(3, calls[0]->Workspace()));
    }
  }
}

TEST(APeerThatDoesNotComeIsNamed) {
  const auto p = MoeParamsFor(3, 4, 2, 2, 4, -1, 1, false, 1);
  for (bool combine : {false, true}) {
    std::vector<std::unique_ptr<MoeCall>> calls;
    if (combine) {
      calls.push_back(std::make_unique<MoeCombineCall>(p, DType::kF32, true, 1, 1, 5));
    } else {
      calls.push_back(std::make_unique<MoeDispatchCall>(p, 1, 1, 5));
    }
    PlainHeap heap(3, calls[0]->Workspace());
    RunOptions options;
    options.absent = 2;
    options.deadline_s = 0.2;
    const auto errors = RunRanks(heap, Pointers(calls), options);
    const std::string name = combine ? "moe_combine" : "moe_dispatch";
    for (int rank : {0, 1}) {
      EXPECT(errors[rank].find(name) != std::string::npos) << errors[rank];
      EXPECT(errors[rank].find("rank 2") != std::string::npos) << errors[rank];
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
