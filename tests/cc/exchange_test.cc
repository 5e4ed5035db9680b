// The exchanges' CPU body, which is also what the kernel's threads run, on 1 to 8 ranks.
#include "ops/exchange/exchange.h"

#include <algorithm>

#include "ranks.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr OpId kOps[] = {OpId::kAllGather, OpId::kAllToAll, OpId::kReduceScatter};
constexpr DType kDtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

// A piece of so many elements, in rows of different lengths in x and in y: whole units and not.
ExchangeParams ParamsFor(OpId op, int world, DType dtype, int64_t elements, int64_t x_rows,
                         int64_t y_rows) {
  const int64_t bytes = elements * SizeOf(dtype);
  const bool gathers = op == OpId::kAllGather, sums = op == OpId::kReduceScatter;
  return ExchangeParams{op, world, dtype, Pieces{gathers ? 1 : world, x_rows, bytes / x_rows},
                        Pieces{sums ? 1 : world, y_rows, bytes / y_rows}};
}

std::vector<std::unique_ptr<ExchangeCall>> AllKinds(int world) {
  std::vector<std::unique_ptr<ExchangeCall>> calls;
  uint32_t seed = 100 * world;
  for (OpId op : kOps) {
    for (DType dtype : kDtypes) {
      for (int64_t elements : {1, 6, 60, 360}) {
        for (int64_t x_rows : {1, 3, 4, 12}) {
          for (int64_t y_rows : {1, 2, 5}) {
            if (elements % x_rows != 0 || elements % y_rows != 0) continue;
            const auto p = ParamsFor(op, world, dtype, elements, x_rows, y_rows);
            calls.push_back(std::make_unique<ExchangeCall>(p, ++seed));
          }
        }
      }
    }
  }
  return calls;
}

void Check(int world, const RunOptions& options) {
  const auto calls = AllKinds(world);
  for (const auto& call : calls) {  // they share one channel
    EXPECT_EQ(call->Channel().half_bytes, PacketLayout::kMinHalfBytes);
  }
  PlainHeap heap(world, PacketLayout{PacketLayout::kMinHalfBytes}, options.first_epoch);
  const std::string error = Join(RunRanks(heap, Pointers(calls), options));
  EXPECT(error.empty()) << error;
  for (const auto& call : calls) {
    EXPECT_EQ(call->Wrong(), 0) << "world " << world << " call " << &call - &calls[0];
  }
}

TEST(EqualTheirDefinition) {
  for (int world = 1; world <= kMaxRanks; ++world) Check(world, RunOptions{});
}

TEST(WithLateRanks) {
  RunOptions options;
  options.max_delay_us = 200;
  for (int world : {2, 3, 5}) Check(world, options);
}

TEST(AcrossTheWrapOfEpochs) {
  RunOptions options;
  options.first_epoch = 0xffffff80;
  Check(3, options);
}

TEST(AnAbsentRankIsNamed) {
  for (OpId op : kOps) {
    ExchangeCall call(ParamsFor(op, 3, DType::kF32, 60, 3, 5), 1);
    PlainHeap heap(3, call.Channel());
    RunOptions options;
    options.absent = 1;
    options.deadline_s = 0.05;
    const auto errors = RunRanks(heap, {&call}, options);
    for (int rank : {0, 2}) {
      const std::string start =
          std::string(NameOf(op)) + ": rank " + std::to_string(rank) + " waited";
      EXPECT(errors[rank].find(start) != std::string::npos &&
             errors[rank].find("for rank 1") != std::string::npos)
          << errors[rank];
    }
  }
}

TEST(SignaturesTellCallsApart) {
  std::vector<uint32_t> seen;
  for (OpId op : kOps) {
    for (int64_t rows : {1, 2}) {
      for (int64_t elements : {4, 8}) {
        seen.push_back(ParamsFor(op, 4, DType::kF32, elements, rows, 1).Signature());
        seen.push_back(ParamsFor(op, 4, DType::kF32, elements, 1, 2 * rows).Signature());
      }
    }
  }
  std::sort(seen.begin(), seen.end());
  const auto unique = std::unique(seen.begin(), seen.end()) - seen.begin();
  EXPECT_EQ(unique, static_cast<int64_t>(seen.size()));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
