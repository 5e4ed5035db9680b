// What ranks must report if one of them is absent, or makes another call, for tests (ranks.h).
#ifndef JFLUX_TESTS_CC_RANK_ERRORS_H_
#define JFLUX_TESTS_CC_RANK_ERRORS_H_

#include <string>
#include <utility>

#include "ranks.h"
#include "testing.h"

namespace jflux {

// The errors of all other ranks name the op, the rank and the absent one.
inline void ExpectAbsentRankIsNamed(const std::string& op, AnyCall& call, PlainHeap heap,
                                    int absent) {
  RunOptions options;
  options.absent = absent;
  options.deadline_s = 0.05;
  const auto errors = RunRanks(heap, {&call}, options);
  for (int rank = 0; rank < heap.world(); ++rank) {
    if (rank == absent) continue;
    const std::string start = op + ": rank " + std::to_string(rank) + " waited";
    EXPECT(errors[rank].find(start) != std::string::npos &&
           errors[rank].find("for rank " + std::to_string(absent) + " ") != std::string::npos)
        << errors[rank];
  }
}
inline void ExpectAbsentRankIsNamed(const std::string& op, Call& call, int world, int absent) {
  ExpectAbsentRankIsNamed(op, call, PlainHeap(world, call.Workspace()), absent);
}

// Rank 1 makes a call of another shape with the same layout.
class Disagreeing : public Call {
 public:
  Disagreeing(Call& rank1s, Call& others) : calls_{&others, &rank1s} {}
  WorkspaceLayout Workspace() const override { return calls_[1]->Workspace(); }
  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    return calls_[view.rank == 1]->Run(view, epoch, ctx);
  }
  int64_t Wrong() const override { return 0; }

 private:
  Call* calls_[2];
};

// Every rank's error says that the ranks run different calls.
inline void ExpectDisagreementIsTold(Call& rank1s, Call& others, int world) {
  Disagreeing call(rank1s, others);
  PlainHeap heap(world, call.Workspace());
  const auto errors = RunRanks(heap, {&call});
  for (const std::string& error : errors) {
    EXPECT(error.find("The ranks run different calls") != std::string::npos) << error;
  }
}

// make(): a call of experts' rows, whose offsets can be changed.
template <typename Make>
void ExpectBadOffsetsAreRefused(const Make& make, int world) {
  for (const auto& [at, value] : {std::pair{1, -1}, std::pair{2, 1000}, std::pair{1, 49}}) {
    auto call = make();
    call.offsets()[at] = value;
    PlainHeap heap(world, call.Workspace());
    for (const std::string& error : RunRanks(heap, {&call})) {
      EXPECT(error.find("group_sizes") != std::string::npos) << error;
    }
  }
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_RANK_ERRORS_H_
