// Three ranks with staggered deadlines: rank 2 comes after rank 0 has given up, and before rank 1
// does. Rank 0 must not pass on what it has summed without rank 2: rank 1 would take it for right.
#ifndef JFLUX_TESTS_CC_STAGGERED_H_
#define JFLUX_TESTS_CC_STAGGERED_H_

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

namespace jflux {

struct Staggered {
  std::vector<std::string> errors;   // by rank; empty: it succeeded
  std::vector<int64_t> stale_ranks;  // those that succeeded with wrong numbers
};

// `call`, of three ranks, has WrongOn(rank).
template <typename Call>
Staggered RunStaggered(PlainHeap& heap, Call& call) {
  RunOptions options;
  options.deadline_of_rank_0_s = 0.05;
  options.deadline_s = 1;
  options.poison = false;  // rank 2 may still send to a rank that has finished
  options.before = [](int rank, size_t) {
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  };
  Staggered result{RunRanks(heap, {&call}, options), {}};
  for (int rank = 0; rank < heap.world(); ++rank) {
    if (result.errors[rank].empty() && call.WrongOn(rank) != 0) result.stale_ranks.push_back(rank);
  }
  return result;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_STAGGERED_H_
