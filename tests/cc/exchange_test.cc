// The exchanges' bodies, which the CPU back end and the kernels share, on 1 to 8 ranks.
#include "ops/exchange/exchange.h"

#include <algorithm>
#include <atomic>

#include "exchange_call.h"
#include "expect_right.h"
#include "ops/exchange/exchange_body.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr OpId kOps[] = {kAllGatherId, kAllToAllId, kReduceScatterId};
constexpr DType kDtypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

// A shard in rows of different lengths in x and in y: multiples of a unit and not.
ExchangeParams ParamsFor(OpId op, int world, DType dtype, int64_t elements, int64_t x_rows,
                         int64_t y_rows, bool chunked = false) {
  const int64_t bytes = elements * SizeOf(dtype);
  const bool gathers = op == kAllGatherId, sums = op == kReduceScatterId;
  return ExchangeParams{op,
                        world,
                        dtype,
                        Shards{gathers ? 1 : world, x_rows, bytes / x_rows},
                        Shards{sums ? 1 : world, y_rows, bytes / y_rows},
                        chunked};
}

PlainHeap HeapFor(const ExchangeParams& p, uint64_t first_epoch = 1) {
  if (p.chunked) return PlainHeap(p.world, p.Slots().Workspace(), first_epoch);
  return PlainHeap(p.world, p.Workspace(), first_epoch);
}

void Check(int world, const RunOptions& options) {
  for (bool chunked : {false, true}) {
    std::vector<std::unique_ptr<ExchangeCall>> calls;
    uint32_t seed = 100 * world;
    const auto smallest = ParamsFor(kAllGatherId, world, DType::kF16, 1, 1, 1, chunked);
    for (OpId op : kOps) {
      for (DType dtype : kDtypes) {
        for (int64_t elements : {1, 6, 60, 360}) {
          for (int64_t x_rows : {1, 3, 4, 12}) {
            for (int64_t y_rows : {1, 2, 5}) {
              if (elements % x_rows != 0 || elements % y_rows != 0) continue;
              const auto p = ParamsFor(op, world, dtype, elements, x_rows, y_rows, chunked);
              EXPECT_EQ(p.WorkspaceBytes(), smallest.WorkspaceBytes());  // they share one workspace
              calls.push_back(std::make_unique<ExchangeCall>(p, ++seed));
            }
          }
        }
      }
    }
    ExpectRight(calls, HeapFor(smallest, options.first_epoch), options);
  }
}

TEST(EqualTheirDefinition) { OnEverySchedule(Check); }

// Several chunks, the last one partial. Rows that are multiples of 16 bytes, of 8, and of neither.
TEST(LongShards) {
  for (int world : {2, 3, 8}) {
    for (OpId op : kOps) {
      for (DType dtype : {DType::kBF16, DType::kF64}) {
        for (int64_t elements : {12288, 12300}) {
          for (int64_t x_rows : {1, 4, 12}) {
            for (int64_t y_rows : {1, 6}) {
              const auto p = ParamsFor(op, world, dtype, elements, x_rows, y_rows, true);
              EXPECT(p.Slots().Chunks() > 5);
              std::vector<std::unique_ptr<ExchangeCall>> calls;
              for (uint32_t i : {1, 2, 3}) calls.push_back(std::make_unique<ExchangeCall>(p, i));
              ExpectRight(calls, HeapFor(p));
            }
          }
        }
      }
    }
  }
}

// Several threads share a rank's chunks.
class SharedExchange : public ExchangeCall {
 public:
  SharedExchange(const ExchangeParams& p, int places, int running, uint32_t seed)
      : ExchangeCall(p, seed), places_(places), running_(running) {}
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(p_.op);
    const ExchangeArrays arrays = ArraysOf(view.rank);
    const auto at = [&](int place) {
      return shmem::Context{view,   p_.Slots().Workspace(), epoch, p_.Signature(), ctx, place,
                            places_};
    };
    std::atomic<int> failed{0};
    return shmem::internal::RunCall(at(0), [&](const shmem::Context&) {
      InTurn(places_, running_, [&](int place) {
        const shmem::Context mine = at(place);
        failed += !ChunkedExchangeBody<float>{p_, arrays, mine}.Run();
      });
      return failed == 0;
    });
  }

 private:
  int places_, running_;
};

TEST(ThreadsShareARanksPart) {
  for (int world : {2, 3, 5}) {
    for (OpId op : kOps) {
      for (int running : {1, 2, 4}) {
        // 21 chunks of 4 KiB: some CTAs have more chunks than they send ahead, some fewer.
        const auto p = ParamsFor(op, world, DType::kF32, 21'000, 3, 5, true);
        for (int places : {1, 3, 8}) {
          std::vector<std::unique_ptr<SharedExchange>> calls;
          for (uint32_t i : {1, 2, 3}) {
            calls.push_back(std::make_unique<SharedExchange>(p, places, running, i));
          }
          RunOptions options;
          options.max_delay_us = 200;
          options.deadline_s = 20;
          ExpectRight(calls, HeapFor(p), options);
        }
      }
    }
  }
}

// No two slots or signals overlap, and all fit.
TEST(SlotsArePlaces) {
  for (int32_t world = 2; world <= kMaxRanks; ++world) {
    for (int64_t bytes : {1, 17, 4096, 4097, 1 << 20, (1 << 20) + 1, 3'000'000}) {
      const ShardSlots slots = ShardSlots::For(world, bytes);
      EXPECT_EQ(slots.chunk_bytes, bytes > (1 << 20) ? 16384 : 4096);
      int64_t covered = 0;
      for (int64_t c = 0; c < slots.Chunks(); ++c) {
        EXPECT(slots.BytesOf(c) > 0);
        covered += slots.BytesOf(c);
      }
      EXPECT_EQ(covered, bytes);
      std::vector<int64_t> offsets, signals;
      for (int from = 1; from < world; ++from) {
        offsets.push_back(slots.SlotOffset(from, 0));
        signals.push_back(slots.SignalIndex(from, 0, 0));
        EXPECT(offsets.back() % 16 == 0);
        EXPECT_EQ(slots.SlotOffset((from + 1) % world, 1), offsets.back());  // the same on all
                                                                             // ranks
      }
      std::sort(offsets.begin(), offsets.end());
      std::sort(signals.begin(), signals.end());
      for (size_t i = 1; i < offsets.size(); ++i) {
        EXPECT(offsets[i] - offsets[i - 1] >= bytes);
        EXPECT_EQ(signals[i] - signals[i - 1], slots.Chunks());
      }
      EXPECT(offsets.back() + bytes <= slots.Workspace().data_bytes);
      EXPECT((kMaxRanks + signals.back() + slots.Chunks()) * 8 <= slots.Workspace().SignalBytes());
    }
  }
}

TEST(AnAbsentRankIsNamed) {
  for (OpId op : kOps) {
    for (bool chunked : {false, true}) {
      ExchangeCall call(ParamsFor(op, 3, DType::kF32, 60, 3, 5, chunked), 1);
      ExpectAbsentRankIsNamed(NameOf(op), call,
                              HeapFor(ParamsFor(op, 3, DType::kF32, 60, 3, 5, chunked)),
                              /*absent=*/1);
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
        seen.push_back(ParamsFor(op, 4, DType::kF32, elements, rows, 1, true).Signature());
      }
    }
  }
  std::sort(seen.begin(), seen.end());
  const auto unique = std::unique(seen.begin(), seen.end()) - seen.begin();
  EXPECT_EQ(unique, static_cast<int64_t>(seen.size()));
}

TEST(Plans) {
  const struct {
    int64_t world, shard_bytes, chunked, workspace_bytes;
  } table[] = {
      {2, 2, 0, 132096},         {2, 2, 1, 140288},          {2, 4096, 0, 132096},
      {2, 4096, 1, 140288},      {2, 100000, 0, 1049600},    {2, 100000, 1, 271360},
      {2, 3145728, 0, 33555456}, {2, 3145728, 1, 8406016},   {4, 2, 0, 132096},
      {4, 2, 1, 140288},         {4, 4096, 0, 132096},       {4, 4096, 1, 140288},
      {4, 100000, 0, 2098176},   {4, 100000, 1, 1057792},    {4, 3145728, 0, 67109888},
      {4, 3145728, 1, 33620992}, {8, 2, 0, 132096},          {8, 2, 1, 140288},
      {8, 4096, 0, 132096},      {8, 4096, 1, 140288},       {8, 100000, 0, 4195328},
      {8, 100000, 1, 2106368},   {8, 3145728, 0, 134218752}, {8, 3145728, 1, 67240960},
  };
  for (const char* name : {"all_gather", "all_to_all", "reduce_scatter"}) {
    for (const auto& row : table) {
      const Fields call{
          {"world", row.world}, {"shard_bytes", row.shard_bytes}, {"chunked", row.chunked}};
      for (const Machine& machine : {Machine{0}, Machine{132}}) {
        const Fields plan = PlanOf(*FindOp(name), call, machine);
        EXPECT(plan == (Fields{{"workspace_bytes", row.workspace_bytes}})) << InWords(call);
      }
    }
    ExpectRefusals(name, {{"world", 2}, {"shard_bytes", 64}, {"chunked", 0}});
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
