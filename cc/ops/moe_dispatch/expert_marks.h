// Where the rows of a rank's experts lie, from the choices of all ranks' tokens: a counting sort
// for which each block of a kernel has the tables in its shared memory.
//
//   marks    A bit for each (local expert, token of any rank), set if the token chose the expert. A
//            token that names an expert twice has one bit, so one row.
//   order    Bits are set in any order; a row's number is how many bits of its expert come before
//            it. So rows lie in the order of (rank, token), whatever the threads do.
//   before   For each expert and group of kGroupWords words, the bits in the groups before.
//
// Tokens are numbered over all ranks: rank * tokens + token.
#ifndef JFLUX_OPS_MOE_DISPATCH_EXPERT_MARKS_H_
#define JFLUX_OPS_MOE_DISPATCH_EXPERT_MARKS_H_

#include <cstdint>

#include "core/atomic.h"
#include "core/platform.h"
#include "jflux/scope.h"

namespace jflux {

// How an expert's rows begin and end.
struct ExpertRows {
  int32_t capacity;   // most rows of an expert; -1: any number
  int32_t alignment;  // of an expert's first row, where experts follow each other
  int32_t stride;     // rows from one expert's first to the next one's; 0: they follow each other

  JFLUX_HD int32_t Kept(int32_t chosen) const {
    return capacity < 0 ? chosen : Min(chosen, capacity);
  }
  JFLUX_HD int32_t Padded(int32_t kept) const {
    return stride > 0 ? stride : RoundUp(kept, alignment);
  }
};

struct ExpertMarks {
  static constexpr int32_t kGroupWords = 4, kGroupTokens = 32 * kGroupWords;

  int32_t experts, groups;
  uint32_t* bits;   // [experts][groups * kGroupWords]
  int32_t* before;  // [experts][groups]
  int32_t* sizes;   // [experts], rows that each expert keeps
  int32_t* padded;  // [experts], rows from each expert's first to the next one's
  int32_t* starts;  // [experts + 1], first row of each

  static JFLUX_HD int64_t Groups(int64_t tokens) { return CeilDiv<int64_t>(tokens, kGroupTokens); }
  // What the tables take.
  static JFLUX_HD int64_t Bytes(int64_t experts, int64_t tokens) {
    return 4 * (experts * Groups(tokens) * (kGroupWords + 1) + 3 * experts + 1);
  }
  static JFLUX_HD ExpertMarks At(void* memory, int32_t experts, int64_t tokens) {
    const auto groups = static_cast<int32_t>(Groups(tokens));
    auto* bits = static_cast<uint32_t*>(memory);
    auto* before = reinterpret_cast<int32_t*>(bits + experts * groups * kGroupWords);
    int32_t* sizes = before + experts * groups;
    return ExpertMarks{experts, groups, bits, before, sizes, sizes + experts, sizes + 2 * experts};
  }

  // Called by all threads of a block. for_choices(mark) calls mark(local expert, token) for a
  // thread's share of the choices; it leaves other ranks' experts out.
  template <typename Block, typename ForChoices>
  JFLUX_HD void Build(const ExpertRows& rows, ForChoices&& for_choices) const {
    const int32_t words = groups * kGroupWords;
    for (int32_t i = Block::rank(); i < experts * words; i += Block::size()) bits[i] = 0;
    Block::sync();
    for_choices([&](int32_t expert, int32_t token) {
      OrInBlock(&bits[expert * words + token / 32], uint32_t{1} << (token % 32));
    });
    Block::sync();
    for (int32_t i = Block::rank(); i < experts * groups; i += Block::size()) {
      int32_t count = 0;
      JFLUX_UNROLL
      for (int32_t w = 0; w < kGroupWords; ++w) count += PopCount(bits[i * kGroupWords + w]);
      before[i] = count;
    }
    Block::sync();
    for (int32_t e = Block::rank(); e < experts; e += Block::size()) {
      int32_t sum = 0;
      for (int32_t g = 0; g < groups; ++g) {
        const int32_t count = before[e * groups + g];
        before[e * groups + g] = sum;
        sum += count;
      }
      sizes[e] = rows.Kept(sum);
      padded[e] = rows.Padded(sizes[e]);
    }
    Block::sync();
    // Each thread sums by itself: with a few hundred experts a scan's barriers would cost more.
    for (int32_t e = Block::rank(); e <= experts; e += Block::size()) {
      int32_t start = 0;
      for (int32_t i = 0; i < e; ++i) start += padded[i];
      starts[e] = start;
    }
    Block::sync();
  }

  // The row of a token that chose the expert; kDropped: it finds no place.
  JFLUX_HD int32_t Row(int32_t expert, int32_t token) const {
    const int32_t word = token / 32, group = word / kGroupWords;
    const uint32_t* own = bits + expert * groups * kGroupWords;
    int32_t number = before[expert * groups + group];
    for (int32_t w = group * kGroupWords; w < word; ++w) number += PopCount(own[w]);
    number += PopCount(own[word] & ((uint32_t{1} << (token % 32)) - 1));
    return number < sizes[expert] ? starts[expert] + number : kDropped;
  }

  // Whether no token has the row.
  JFLUX_HD bool IsFree(int32_t row) const {
    if (row >= starts[experts]) return true;
    int32_t low = 0, high = experts;  // starts[low] <= row < starts[high]
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (starts[middle] <= row ? low : high) = middle;
    }
    return row - starts[low] >= sizes[low];
  }

  static constexpr int32_t kNone = -1, kDropped = -2;  // in place of a row
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_EXPERT_MARKS_H_
