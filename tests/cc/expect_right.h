// Calls on all ranks (ranks.h) whose results must be those of their definition.
#ifndef JFLUX_TESTS_CC_EXPECT_RIGHT_H_
#define JFLUX_TESTS_CC_EXPECT_RIGHT_H_

#include <memory>
#include <string>
#include <vector>

#include "ranks.h"
#include "testing.h"

namespace jflux {

// Runs the calls in order. The seed tells a failed test's cases apart.
template <typename C>
void ExpectRight(const std::vector<std::unique_ptr<C>>& calls, PlainHeap heap,
                 const RunOptions& options = {}) {
  const std::string error = Join(RunRanks(heap, Pointers(calls), options));
  EXPECT(error.empty()) << error;
  for (const auto& call : calls) {
    EXPECT_EQ(call->Wrong(), 0) << "world " << heap.world() << " first epoch "
                                << options.first_epoch << " seed " << options.seed << " call "
                                << &call - &calls[0];
  }
}

// Several calls, each make(seed) for a seed of its own, on a workspace of their size.
template <typename Make>
void ExpectRight(int world, RunOptions options, uint32_t seed, const Make& make) {
  std::vector<decltype(make(seed))> calls;
  for (uint32_t i = 0; i < 5; ++i) calls.push_back(make(seed * 16 + i));
  options.seed = seed;
  ExpectRight(calls, PlainHeap(world, calls[0]->Workspace(), options.first_epoch), options);
}

// check(world, options) with late ranks, without, and across the wrap of epochs.
template <typename Check>
void OnEverySchedule(const Check& check) {
  RunOptions late, wrap;
  late.max_delay_us = 200;
  wrap.max_delay_us = 100;
  wrap.first_epoch = 0xfffffffd;
  for (int world = 1; world <= kMaxRanks; ++world) check(world, late);
  for (int world : {2, 4, 7}) check(world, RunOptions{});
  check(3, wrap);
}

// The types of products' operands and results.
struct ProductTypes {
  DType in, out;
};
constexpr ProductTypes kProductTypes[] = {
    {DType::kF32, DType::kF32},  {DType::kF64, DType::kF64}, {DType::kBF16, DType::kBF16},
    {DType::kBF16, DType::kF32}, {DType::kF16, DType::kF16}, {DType::kF32, DType::kBF16}};
constexpr ProductTypes kGroupedTypes[] = {{DType::kF32, DType::kF32},
                                          {DType::kF64, DType::kF64},
                                          {DType::kBF16, DType::kBF16},
                                          {DType::kF16, DType::kF32}};

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_EXPECT_RIGHT_H_
