// ragged_all_to_all's bodies, which the CPU back end and the kernels share, on 1 to 8 ranks.
#include "ops/ragged_all_to_all/ragged_all_to_all.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "expect_right.h"
#include "ops/ragged_all_to_all/ragged_chunked_body.h"
#include "ops/ragged_all_to_all/ragged_packets_body.h"
#include "ops/ragged_all_to_all/ragged_table.h"
#include "plans.h"
#include "ragged_all_to_all_call.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

PlainHeap HeapFor(const RaggedParams& p, uint64_t first_epoch = 1) {
  if (p.chunked) return PlainHeap(p.world, p.ChunkedWorkspace(), first_epoch);
  return PlainHeap(p.world, p.Workspace(), first_epoch);
}

// Rows of whole packets, of 16 bytes, and of neither; more slices than one for each rank; batches.
void Check(int world, const RunOptions& options) {
  for (bool chunked : {false, true}) {
    std::vector<std::unique_ptr<RaggedCall>> calls;
    uint32_t seed = 100 * world;
    const auto smallest = RaggedParamsFor(world, 1, 1, 1, 1, 1, chunked);
    for (int32_t slices : {1, 3}) {
      for (int32_t batch : {1, 2}) {
        for (int64_t operand_rows : {1, 17}) {
          for (int64_t output_rows : {1, 23, 60}) {
            for (int64_t row_bytes : {1, 8, 12, 16, 136, 250}) {
              const auto p = RaggedParamsFor(world, slices, batch, operand_rows, output_rows,
                                             row_bytes, chunked);
              // They share one workspace.
              if (p.WorkspaceBytes() != smallest.WorkspaceBytes()) continue;
              calls.push_back(std::make_unique<RaggedCall>(p, 10, ++seed));
            }
          }
        }
      }
    }
    EXPECT(calls.size() > 100);
    ExpectRight(calls, HeapFor(smallest, options.first_epoch), options);
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

// With tables (ragged_table.h), of which the last have an entry for every few slices.
TEST(ManySlices) {
  for (int world : {1, 2, 3, 8}) {
    for (bool chunked : {false, true}) {
      for (int32_t slices : {9, 300, 2100}) {
        if (slices == 2100 && world != 3) continue;
        const auto p =
            RaggedParamsFor(world, slices, slices == 9 ? 2 : 1, 17, 3 * slices, 12, chunked);
        EXPECT(p.HasTables() && (slices < 2100) == (p.TableStep() == 1));
        std::vector<std::unique_ptr<RaggedCall>> calls;
        for (uint32_t i : {1, 2, 3}) calls.push_back(std::make_unique<RaggedCall>(p, 4, i));
        ExpectRight(calls, HeapFor(p));
      }
    }
  }
}

TEST(TablesSayWhatAWalkSays) {
  std::mt19937 random(1);
  for (int32_t slices : {3, 9, 2100}) {
    const auto p = RaggedParamsFor(3, slices, 1, 17, 4 * slices, 12, true);
    std::vector<uint32_t> memory(p.TableWords(1));
    for (int i = 0; i < 50; ++i) {
      RaggedSizes sizes = RandomSizes(p, 4, i)[0];
      const SizeTable walked{p, sizes.send_sizes.data(), nullptr, 0, 0};
      const RaggedArrays arrays{nullptr,
                                nullptr,
                                sizes.input_offsets.data(),
                                sizes.send_sizes.data(),
                                sizes.output_offsets.data(),
                                sizes.recv_sizes.data()};
      const RaggedTables tables = RaggedTables::In(memory.data(), p, arrays);
      tables.Fill();
      EXPECT(!tables.FirstBad().Found());
      for (int peer = 0; peer < p.world; ++peer) {
        const int64_t rows = walked.Rows(peer);
        EXPECT_EQ(tables.Sends().Rows(peer), rows);
        for (int64_t row = 0; row < rows; ++row) {
          const SizeTable::Place want = walked.SliceOf(peer, row);
          const SizeTable::Place got = tables.Sends().SliceOf(peer, row);
          EXPECT(got.t == want.t && got.rows == want.rows) << row;
        }
      }
      for (int bad = i % 3; bad >= 0; --bad) {  // up to three
        const auto at = random() % p.Slices();
        std::vector<int32_t>* arguments[] = {&sizes.input_offsets, &sizes.send_sizes,
                                             &sizes.output_offsets};
        (*arguments[random() % 3])[at] = random() % 2 ? -2147483647 : 2147483647;
      }
      tables.Fill();
      const BadValue want = RaggedSlices{p, arrays}.FirstBad(), got = tables.FirstBad();
      EXPECT(want.Found() && got.argument == want.argument && got.index == want.index &&
             got.value == want.value && got.most == want.most);
    }
  }
}

// Many chunks, and slices that begin and end inside them.
TEST(LongSlices) {
  for (int world : {2, 3, 8}) {
    for (int32_t slices : {1, 4}) {
      for (int64_t row_bytes : {int64_t{16}, int64_t{1030}}) {
        const int64_t rows = 40 * 4096 * world / row_bytes;
        const auto p = RaggedParamsFor(world, slices, 1, rows, rows, row_bytes, true);
        EXPECT_EQ(p.MostChunks(), 20);
        std::vector<std::unique_ptr<RaggedCall>> calls;
        for (uint32_t i : {1, 2, 3, 4}) {
          calls.push_back(std::make_unique<RaggedCall>(
              p, static_cast<int32_t>(i % 2 ? rows : rows / world), i));
        }
        ExpectRight(calls, HeapFor(p));
      }
    }
  }
}

// Several threads share a rank's part, as CTAs or as threads of a kernel.
class SharedRagged : public RaggedCall {
 public:
  SharedRagged(const RaggedParams& p, int places, int running, int32_t most, uint32_t seed)
      : RaggedCall(p, most, seed), places_(places), running_(running) {}

  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kRaggedAllToAllId);
    const RaggedArrays arrays = ArraysOf(view.rank);
    std::atomic<int> failed{0};
    if (p_.chunked) {
      const auto at = [&](int place) {
        return shmem::Context{view,   p_.ChunkedWorkspace(), epoch, p_.Signature(), ctx, place,
                              places_};
      };
      return shmem::internal::RunCall(at(0), [&](const shmem::Context&) {
        InTurn(places_, running_, [&](int place) {
          const shmem::Context mine = at(place);
          std::vector<uint32_t> memory(p_.TableWords(1));
          const RaggedTables tables = RaggedTables::In(memory.data(), p_, arrays);
          failed += !RaggedChunkedBody{p_, arrays, mine, tables}.Run();
        });
        return failed == 0;
      });
    }
    const PacketCall call{view, p_.Workspace(), epoch, p_.Signature(), ctx};
    for (int d = 1; d < p_.world; ++d) call.SendHello((view.rank + d) % p_.world);
    InTurn(places_, running_, [&](int place) {
      std::vector<uint32_t> memory(p_.TableWords(1));
      const RaggedTables tables = RaggedTables::In(memory.data(), p_, arrays);
      failed += !RaggedPacketsBody{p_, arrays, call, tables}.Run(place, places_);
    });
    for (int d = 1; d < p_.world; ++d) failed += !call.AwaitHello((view.rank + d) % p_.world);
    return failed == 0;
  }

 private:
  int places_, running_;
};

TEST(ThreadsShareARanksPart) {
  for (int world : {2, 3, 5}) {
    for (bool chunked : {false, true}) {
      for (int running : {1, 2, 4}) {
        for (int places : {1, 3, 8}) {
          const int32_t slices = running == 1 ? 40 : 2;  // with tables, and without
          const auto p = chunked ? RaggedParamsFor(world, slices, 1, 900, 1800, 72, true)
                                 : RaggedParamsFor(world, slices, 2, 20, 50, 20, false);
          std::vector<std::unique_ptr<SharedRagged>> calls;
          for (uint32_t i : {1, 2, 3}) {
            calls.push_back(std::make_unique<SharedRagged>(p, places, running, 800, i));
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

// ---- What is found when the call runs
// -------------------------------------------------------------

constexpr int kWorld = 3;

// The ranks' errors in a call whose arguments `spoil` has changed.
std::vector<std::string> ErrorsOf(bool chunked, const std::function<void(RaggedCall* call)>& spoil,
                                  int32_t slices = 2) {
  const auto p = RaggedParamsFor(kWorld, slices, 1, 10, 40, 12, chunked);
  RaggedCall call(p, 5, 7);
  spoil(&call);
  PlainHeap heap = HeapFor(p);
  RunOptions options;
  options.deadline_s = 20;  // nobody waits for it
  const uint64_t start = NowNs();
  auto errors = RunRanks(heap, {&call}, options);
  EXPECT(NowNs() - start < uint64_t{10'000'000'000}) << "the ranks waited for each other";
  return errors;
}

void ExpectError(const std::string& error, const std::string& text) {
  EXPECT(error.find(text) != std::string::npos) << "\"" << error << "\" has no \"" << text << "\"";
}

TEST(ABadValueIsNamedByAllRanks) {
  const struct {
    void (*spoil)(RaggedCall* call);
    const char *own, *others;
  } table[] = {
      {[](RaggedCall* c) { c->SizesOf(1).input_offsets[2] = -3; },
       "input_offsets[2] = -3, which must be from 0 to 10", "input_offsets[2] = -3"},
      {[](RaggedCall* c) { c->SizesOf(1).input_offsets[5] = 11; },
       "input_offsets[5] = 11, which must be from 0 to 10", "input_offsets[5] = 11"},
      {[](RaggedCall* c) {
         c->SizesOf(1).input_offsets[0] = 4;
         c->SizesOf(1).send_sizes[0] = 7;
       },
       "send_sizes[0] = 7, which must be from 0 to 6", "send_sizes[0] = 7"},
      {[](RaggedCall* c) { c->SizesOf(1).send_sizes[3] = -1; },
       "send_sizes[3] = -1, which must be from 0 to ", "send_sizes[3] = -1"},
      {[](RaggedCall* c) {
         c->SizesOf(1).send_sizes[4] = 2;
         c->SizesOf(1).input_offsets[4] = 8;
         c->SizesOf(1).output_offsets[4] = 39;
       },
       "output_offsets[4] = 39, which must be from 0 to 38", "output_offsets[4] = 39"},
      {[](RaggedCall* c) { c->SizesOf(1).output_offsets[4] = -2147483647; },
       "output_offsets[4] = -2147483647, which must be from 0 to ",
       "output_offsets[4] = -21474836"},
  };
  for (bool chunked : {false, true}) {
    for (const auto& row : table) {
      const auto errors = ErrorsOf(chunked, row.spoil);
      ExpectError(errors[1], std::string("jflux.ragged_all_to_all: rank 1 was given ") + row.own);
      for (int rank : {0, 2}) {
        ExpectError(errors[rank], "jflux.ragged_all_to_all: rank " + std::to_string(rank) +
                                      " got nothing from rank 1, which was given " + row.others);
      }
    }
  }
}

// By which moe_dispatch tells of slots without a place.
TEST(AFirstOffsetMayBeACount) {
  const auto spoil = [](int element, int32_t value) {
    return [=](RaggedCall* c) { c->SizesOf(1).input_offsets[element] = value; };
  };
  const int32_t least = std::numeric_limits<int32_t>::min();
  for (bool chunked : {false, true}) {
    for (const auto& error : ErrorsOf(chunked, spoil(0, least + 3))) {
      ExpectError(error, "jflux.moe_dispatch: 3 of the slots (token, expert) of rank 1 have no");
    }
    for (const auto& [element, value] :
         {std::pair{0, -3}, std::pair{0, least}, std::pair{1, least + 3}}) {
      for (const auto& error : ErrorsOf(chunked, spoil(element, value))) {
        ExpectError(error, "jflux.ragged_all_to_all: rank");
      }
    }
  }
}

TEST(SizesOfTwoRanksThatDiffer) {
  for (bool chunked : {false, true}) {
    const auto errors = ErrorsOf(chunked, [](RaggedCall* c) {
      c->SizesOf(2).recv_sizes[1] = 9;
      c->SizesOf(0).send_sizes[5] = 4;  // slice 1 for rank 2
      c->SizesOf(0).input_offsets[5] = c->SizesOf(0).output_offsets[5] = 0;
    });
    EXPECT_EQ(errors[0], "");
    EXPECT_EQ(errors[1], "");
    ExpectError(errors[2],
                "jflux.ragged_all_to_all: rank 2 was given recv_sizes[1] = 9, but rank 0 sends it "
                "4");
  }
}

TEST(FaultsAmongManySlices) {
  for (bool chunked : {false, true}) {
    auto errors =
        ErrorsOf(chunked, [](RaggedCall* c) { c->SizesOf(1).input_offsets[70] = -3; }, 30);
    ExpectError(errors[1], "rank 1 was given input_offsets[70] = -3, which must be from 0 to 10");
    ExpectError(errors[0], "got nothing from rank 1, which was given input_offsets[70] = -3");
    errors = ErrorsOf(chunked, [](RaggedCall* c) { c->SizesOf(2).recv_sizes[20] = 99; }, 30);
    EXPECT_EQ(errors[0] + errors[1], "");
    ExpectError(errors[2], "rank 2 was given recv_sizes[20] = 99, but rank 0 sends it ");
  }
}

TEST(SizesOfAnOwnSliceThatDiffer) {
  for (bool chunked : {false, true}) {
    const auto errors = ErrorsOf(chunked, [](RaggedCall* c) { c->SizesOf(1).recv_sizes[2] = -5; });
    ExpectError(errors[1], "rank 1 was given recv_sizes[2] = -5, but rank 1 sends it ");
  }
}

// Slices that cannot all have places of their own.
TEST(MoreRowsThanTheOutputHas) {
  for (bool chunked : {false, true}) {
    const auto p = RaggedParamsFor(2, 2, 1, 8, 10, 4, chunked);
    RaggedCall call(p, 0, 1);
    call.SizesOf(0).send_sizes[2] = call.SizesOf(0).send_sizes[3] = 6;
    call.SizesOf(0).input_offsets[2] = call.SizesOf(0).input_offsets[3] = 0;
    PlainHeap heap = HeapFor(p);
    const auto errors = RunRanks(heap, {&call});
    ExpectError(errors[0], "rank 0 was given send_sizes[3] = 6, which must be from 0 to 4");
  }
}

TEST(AnAbsentRankIsNamed) {
  for (bool chunked : {false, true}) {
    const auto p = RaggedParamsFor(3, 1, 1, 10, 40, 12, chunked);
    RaggedCall call(p, 5, 1);
    ExpectAbsentRankIsNamed("jflux.ragged_all_to_all", call, HeapFor(p), /*absent=*/1);
  }
}

// ---- Layouts and plans
// ----------------------------------------------------------------------------

TEST(HeadersAreWords) {
  for (int32_t to : {0, 1, 0x7fffffff, 0x123456, 0x1000000}) {
    for (int32_t rows : {0, 1, 0x7fffffff, 0xabcdef, -1}) {
      const SliceHeader header = SliceHeader::Of(SliceHeader{to, rows}.Word());
      EXPECT(header.to == to && header.rows == rows && !header.Refuses());
    }
  }
  for (int32_t index : {0, 1, 255, (1 << 28) - 1}) {
    const auto refusal = SliceHeader::Of(
        SliceHeader::Refusal(RaggedArgument::kOutputOffsets, index, -2147483647 - 1).Word());
    EXPECT(refusal.Refuses() && refusal.Index() == index && refusal.Argument() == 3);
    EXPECT_EQ(refusal.rows, -2147483647 - 1);
  }
}

// The signals of an image of any size fit into a workspace that is no larger for them.
TEST(AWorkspaceHoldsTheImageOnce) {
  for (int32_t world = 2; world <= kMaxRanks; ++world) {
    for (int64_t rows = 16; rows <= int64_t{1} << 22; rows *= 2) {
      const auto p = RaggedParamsFor(world, 1, 1, rows, rows, 4096, true);
      EXPECT_EQ(p.ChunkedWorkspace().data_bytes, Max<int64_t>(64 << 10, 4096 * rows)) << world;
      EXPECT((kMaxRanks + (world - 1) * p.SignalsPerRank()) * 8 <=
             p.ChunkedWorkspace().SignalBytes());
    }
  }
}

TEST(SignaturesTellCallsApart) {
  std::vector<uint32_t> seen;
  const RaggedParams p = RaggedParamsFor(4, 2, 2, 8, 8, 16, false);
  for (int field = 0; field < 7; ++field) {
    RaggedParams other = p;
    if (field == 1) other.slices = 4;
    if (field == 2) other.batch = 4;
    if (field == 3) other.operand_rows = 9;
    if (field == 4) other.output_rows = 9;
    if (field == 5) other.row_bytes = 17;
    if (field == 6) other.chunked = true;
    seen.push_back(other.Signature());
  }
  std::sort(seen.begin(), seen.end());
  EXPECT(std::unique(seen.begin(), seen.end()) == seen.end());
}

TEST(Plans) {
  const Fields call{{"world", 2},          {"slices", 1},       {"batch", 1},
                    {"output_rows", 4096}, {"row_bytes", 1024}, {"chunked", 1}};
  for (const Machine& machine : {Machine{0}, Machine{132}}) {
    // Header, two halves of the image, and their signals.
    EXPECT(PlanOf(*FindOp("ragged_all_to_all"), call, machine) ==
           (Fields{{"workspace_bytes", 1024 + 2 * (4096 * 1024 + 4096 * 1024 / 512)}}));
  }
  Fields packets = call;
  packets["chunked"] = 0;
  packets["output_rows"] = 64;
  EXPECT(PlanOf(*FindOp("ragged_all_to_all"), packets, Machine{132}) ==
         (Fields{{"workspace_bytes", 1024 + 2 * (64 * 1024 * 2 * 2)}}));  // headers need a little
  ExpectRefusals("ragged_all_to_all", call);
  Fields large = call;
  large["batch"] = 1 << 20;
  EXPECT(WhyNot(*FindOp("ragged_all_to_all"), large, Machine{132}) ==
         "there are 2^31 rows or more");
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
