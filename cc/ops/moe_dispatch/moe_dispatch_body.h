// moe_dispatch: one block's part of a rank's work. On the CPU the only thread is the block.
//
// Block 0 sends its rank's choices to all ranks. A block sends the rows of its items, marks all
// ranks' choices in tables of its own (expert_marks.h), and from then on knows where every row
// goes: it waits for the rows of its items from all ranks and copies each to its experts' rows.
//
//   data     of a rank, by source: choices, weights, an image of the source's tokens
//   writes   the source, its own places alone
//   waits    for the choices of all peers; for the rows that have an expert here. Each row has a
//            signal, set by the peer's block with the same number
//   order    data, block barrier, signal with release
//   reset    never: core/signal.h. A place that no row comes to keeps old data, which nobody reads
//
// Deadlock: block 0 starts before the rank's other blocks and sends the choices before it waits. A
// block waits for an item only after it has sent its own item of the same number.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_

#include <cstdint>

#include "ops/moe_dispatch/moe_dispatch.h"

namespace jflux {

struct MoeDispatchBody {
  using Block = shmem::Block;
  using Vector = shmem::internal::Vector;
  const MoeDispatchParams& p;
  const MoeDispatchArrays& arrays;
  const shmem::Context& ctx;
  void* scratch;  // p.ScratchBytes(), the block's

  // False if the call failed.
  JFLUX_HD bool Run() const {
    if (ctx.block == 0) SendChoices();
    const int64_t step = ctx.blocks;
    for (int i = 0; i < kItemsAhead; ++i) Send(ctx.block + i * step);
    if (!AwaitChoices()) return false;
    const ExpertMarks marks = ExpertMarks::At(scratch, p.experts, p.AllTokens());
    Mark(marks);
    if (ctx.block == 0) {
      for (int32_t e = Block::rank(); e < p.experts; e += Block::size()) {
        arrays.sizes[e] = marks.sizes[e];
      }
    }
    for (int64_t item = ctx.block; item < p.items.Items(); item += step) {
      Send(item + kItemsAhead * step);
      if (!Receive(item, marks)) return false;
      FillFreeRows(item, marks);
    }
    return true;
  }

 private:
  JFLUX_HD int Rank() const { return ctx.view.rank; }
  JFLUX_HD const int32_t* ChoicesOf(int src) const {
    return src == Rank() ? arrays.indices : ctx.data<int32_t>(p.ChoicesOffset(src));
  }
  JFLUX_HD const float* WeightsOf(int src) const {
    return src == Rank() ? arrays.weights : ctx.data<float>(p.WeightsOffset(src));
  }
  // The rank of an expert; -1: it is none.
  JFLUX_HD int32_t RankOf(int32_t expert) const {
    return expert < 0 || expert >= p.world * p.experts ? -1 : expert / p.experts;
  }
  // Whether a token of rank `src` has an expert on rank `to`.
  JFLUX_HD bool Goes(int src, int64_t token, int to) const {
    const int32_t* choices = ChoicesOf(src) + token * p.slots;
    bool goes = false;
    for (int32_t j = 0; j < p.slots; ++j) goes |= RankOf(choices[j]) == to;
    return goes;
  }

  JFLUX_HD void SendChoices() const {
    for (int d = 1; d < p.world; ++d) {
      const int peer = (Rank() + d) % p.world;
      shmem::internal::Copy<Block>(shmem::ptr(ctx, ctx.data(p.ChoicesOffset(Rank())), peer),
                                   arrays.indices, 4 * p.Choices());
      shmem::internal::Copy<Block>(shmem::ptr(ctx, ctx.data(p.WeightsOffset(Rank())), peer),
                                   arrays.weights, 4 * p.Choices());
    }
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      shmem::signal_set(ctx, ctx.signal(Rank()), (Rank() + d) % p.world);
    }
  }
  JFLUX_HD bool AwaitChoices() const {
    bool ok = true;
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (Rank() + d) % p.world;
      ok &= shmem::signal_wait_until(ctx, ctx.signal(src), src);
    }
    return Block::all(ok);
  }

  JFLUX_HD void Mark(const ExpertMarks& marks) const {
    marks.Build<Block>(p.expert_rows, [&](auto&& mark) {
      for (int src = 0; src < p.world; ++src) {
        const int32_t* choices = ChoicesOf(src);
        const auto first = static_cast<int32_t>(src * p.items.tokens);
        for (int64_t i = Block::rank(); i < p.Choices(); i += Block::size()) {
          if (RankOf(choices[i]) != Rank()) continue;
          mark(choices[i] - Rank() * p.experts, first + static_cast<int32_t>(Quotient(i, p.slots)));
        }
      }
    });
  }

  JFLUX_HD void Send(int64_t item) const {
    if (item >= p.items.Items()) return;
    const int64_t token = p.items.Token(item);
    const int32_t part = p.items.Part(item);
    const int64_t first = 16 * p.items.First(part), end = 16 * p.items.First(part + 1);
    const char* row = static_cast<const char*>(arrays.x) + token * p.RowBytes();
    for (int d = 1; d < p.world; ++d) {
      const int peer = (Rank() + d) % p.world;
      if (!Goes(Rank(), token, peer)) continue;
      char* image = shmem::ptr(ctx, ctx.data(p.RowOffset(Rank(), token)), peer);
      shmem::internal::Copy<Block>(image + first, row + first, end - first);
    }
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int peer = (Rank() + d) % p.world;
      if (Goes(Rank(), token, peer)) {
        shmem::signal_set(ctx, ctx.signal(p.ItemSignal(Rank(), item)), peer);
      }
    }
  }

  // The row of slot j of a token; ExpertMarks::kNone and kDropped.
  JFLUX_HD int32_t RowOf(const ExpertMarks& marks, int src, int64_t token, int32_t j) const {
    const int32_t* choices = ChoicesOf(src) + token * p.slots;
    const int32_t expert = choices[j];
    if (RankOf(expert) != Rank()) return ExpertMarks::kNone;
    for (int32_t i = 0; i < j; ++i) {
      if (choices[i] == expert) return ExpertMarks::kNone;
    }
    const int32_t row =
        marks.Row(expert - Rank() * p.experts, static_cast<int32_t>(src * p.items.tokens + token));
    // Rows fit, unless a wait was skipped (TestHooks::skip_waits).
    return row < p.rows ? row : ExpertMarks::kDropped;
  }
  // Of the slots of the token that share slot j's row.
  JFLUX_HD float WeightOf(int src, int64_t token, int32_t j) const {
    const int32_t* choices = ChoicesOf(src) + token * p.slots;
    const float* weights = WeightsOf(src) + token * p.slots;
    float sum = weights[j];
    for (int32_t i = j + 1; i < p.slots; ++i) {
      if (choices[i] == choices[j]) sum += weights[i];
    }
    return sum;
  }

  JFLUX_HD bool Receive(int64_t item, const ExpertMarks& marks) const {
    const int64_t token = p.items.Token(item);
    const int32_t part = p.items.Part(item);
    auto* to = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + p.MarkBytes());
    for (int32_t i = Block::rank(); i < p.world * p.slots; i += Block::size()) {
      const int32_t src = i / p.slots, j = i % p.slots;
      to[i] = RowOf(marks, src, token, j);
      if (part != 0) continue;
      const int64_t slot = (src * p.items.tokens + token) * p.slots + j;
      arrays.there[slot] = to[i];
      if (to[i] < 0) continue;
      arrays.slot[to[i]] = static_cast<int32_t>(slot);
      arrays.row_weights[to[i]] = WeightOf(src, token, j);
    }
    bool ok = true;
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (Rank() + d) % p.world;
      if (!Goes(src, token, Rank())) continue;
      ok &= shmem::signal_wait_until(ctx, ctx.signal(p.ItemSignal(src, item)), src);
    }
    if (!Block::all(ok)) return false;
    for (int d = 0; d < p.world; ++d) {
      const int src = (Rank() + d) % p.world;
      const char* row = src == Rank() ? static_cast<const char*>(arrays.x) + token * p.RowBytes()
                                      : ctx.data(p.RowOffset(src, token));
      CopyToRows(reinterpret_cast<const Vector*>(row), to + src * p.slots, part);
    }
    Block::sync();  // `to` is written again
    return true;
  }

  // A part of a row of x to the rows to[0 ... slots - 1] that are none of the negative numbers.
  JFLUX_HD void CopyToRows(const Vector* from, const int32_t* to, int32_t part) const {
    bool is_here = false;
    for (int32_t j = 0; j < p.slots; ++j) is_here |= to[j] >= 0;
    if (!is_here) return;
    for (int64_t v = p.items.First(part) + Block::rank(); v < p.items.First(part + 1);
         v += Block::size()) {
      const Vector vector = from[v];
      for (int32_t j = 0; j < p.slots; ++j) {
        if (to[j] >= 0) Rows()[to[j] * p.items.vectors + v] = vector;
      }
    }
  }

  // The item's share of the rows that no token has.
  JFLUX_HD void FillFreeRows(int64_t item, const ExpertMarks& marks) const {
    for (int64_t row = item; row < p.rows; row += p.items.Items()) {
      if (!marks.IsFree(static_cast<int32_t>(row))) continue;
      for (int64_t v = Block::rank(); v < p.items.vectors; v += Block::size()) {
        Rows()[row * p.items.vectors + v] = Vector{};
      }
      if (Block::rank() == 0) {
        arrays.slot[row] = ExpertMarks::kNone;
        arrays.row_weights[row] = 0;
      }
    }
  }
  JFLUX_HD Vector* Rows() const { return static_cast<Vector*>(arrays.rows); }
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_
