// moe_dispatch: one block's part of a rank's work. On the CPU the only thread is the block, and its
// only warp.
//
// Block 0 sends its rank's choices to all ranks. Some warps of each block send the rows of its
// items, the others receive. When the choices of all ranks are there, a block marks them in tables
// of its own (expert_marks.h), and from then on knows where every row goes: a warp waits for the
// rows of an item from all ranks and copies them to their experts' rows. So the link is busy while
// memory is.
//
//   data     of a rank, by source: choices, weights, an image of the source's tokens
//   writes   the source, its own places alone
//   waits    for the choices of all peers; for the rows that have an expert here. Each row has a
//            signal, set by a warp of the peer's block with the same number
//   order    data, barrier of the warp (of choices: of the block), signal with release
//   reset    never: core/signal.h. A place that no row comes to keeps old data, which nobody reads
//
// Deadlock: block 0 starts before the rank's other blocks and sends the choices before it waits.
// Once the tables are there, warps that send wait for nothing. On a host the only warp sends all
// items first.
#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_

#include <cstdint>

#include "ops/moe_dispatch/moe_dispatch.h"

namespace jflux {

struct MoeDispatchBody {
  using Block = shmem::Block;
  using Warp = shmem::Warp;
  using Vector = shmem::internal::Vector;
  const MoeDispatchParams& p;
  const MoeDispatchArrays& arrays;
  const shmem::Context& ctx;
  void* scratch;  // p.ScratchBytes(), the block's

  // False if the call failed.
  JFLUX_HD bool Run() const {
    if (ctx.block == 0) SendChoices();
    const int warps = WarpsOfBlock(), senders = Min(kMoeDispatchSenders, warps);
    const bool sends = WarpOfBlock() < senders;
    const auto sent = WarpShare::Of(ctx, WarpOfBlock(), senders);
    if (sends) Send(sent.first);  // while choices arrive
    if (!AwaitChoices()) return false;
    const ExpertMarks marks = ExpertMarks::At(scratch, p.experts, p.AllTokens());
    Mark(marks);
    if (ctx.block == 0) {
      for (int32_t e = Block::rank(); e < p.experts; e += Block::size()) {
        arrays.sizes[e] = marks.sizes[e];
      }
    }
    const int64_t items = p.items.Items();
    if (sends) {
      for (int64_t item = sent.first + sent.step; item < items; item += sent.step) Send(item);
      if (senders < warps) return true;
    }
    const int receivers = Max(warps - senders, 1);
    const auto received = WarpShare::Of(ctx, WarpOfBlock() - (warps - receivers), receivers);
    for (int64_t item = received.first; item < items; item += received.step) {
      FillFreeRows(item, marks);  // while rows arrive
      if (!Receive(item, marks)) return false;
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
  // Whether a token of this rank has an expert on rank `to`.
  JFLUX_HD bool Goes(int64_t token, int to) const {
    const int32_t* choices = arrays.indices + token * p.slots;
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
      constexpr int kInFlight = 8;  // choices that are loaded together
      for (int src = 0; src < p.world; ++src) {
        const int32_t* choices = ChoicesOf(src);
        const auto first = static_cast<int32_t>(src * p.items.tokens);
        JFLUX_NO_UNROLL
        for (int64_t i = Block::rank(); i < p.Choices(); i += kInFlight * Block::size()) {
          int32_t loaded[kInFlight];
          JFLUX_UNROLL
          for (int b = 0; b < kInFlight; ++b) {
            const int64_t at = i + b * Block::size();
            loaded[b] = at < p.Choices() ? choices[at] : ExpertMarks::kNone;
          }
          JFLUX_UNROLL
          for (int b = 0; b < kInFlight; ++b) {
            if (RankOf(loaded[b]) != Rank()) continue;
            const auto token = static_cast<int32_t>(Quotient(i + b * Block::size(), p.slots));
            mark(loaded[b] - Rank() * p.experts, first + token);
          }
        }
      }
    });
  }

  // Sends an item to the ranks of its experts. Called by a warp.
  JFLUX_HD void Send(int64_t item) const {
    if (item >= p.items.Items()) return;  // the first one, of a rank with few
    const int64_t token = p.items.Token(item);
    const int32_t part = p.items.Part(item);
    for (int d = 1; d < p.world; ++d) {
      const int peer = (Rank() + d) % p.world;
      if (!Goes(token, peer)) continue;
      CopyTo(shmem::ptr(ctx, ctx.data<Vector>(p.RowOffset(Rank(), token)), peer), token, part);
    }
    Warp::sync();
    for (int d = 1 + Warp::rank(); d < p.world; d += Warp::size()) {
      const int peer = (Rank() + d) % p.world;
      if (Goes(token, peer)) {
        shmem::signal_set(ctx, ctx.signal(p.ItemSignal(Rank(), item)), peer);
      }
    }
    Warp::sync();
  }

  // A part of a row of x to its image in a workspace. Called by a warp.
  JFLUX_HD void CopyTo(Vector* image, int64_t token, int32_t part) const {
    const int64_t first = p.items.First(part), end = p.items.First(part + 1);
    const int64_t values = p.ValueVectors(), middle = Max(first, Min(end, values));
    const Vector* row = Values() + token * values;
    shmem::internal::Copy<Warp>(image + first, row + first, 16 * (middle - first));
    if (middle == end) return;
    const Vector* scales = Scales() + token * p.scale_vectors;
    shmem::internal::Copy<Warp>(image + middle, scales + (middle - values), 16 * (end - middle));
  }
  JFLUX_HD const Vector* Values() const { return static_cast<const Vector*>(arrays.x); }
  JFLUX_HD const Vector* Scales() const { return static_cast<const Vector*>(arrays.scale); }

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
  // The sum of the weights of the token's slots that share slot j's row.
  JFLUX_HD float WeightOf(int src, int64_t token, int32_t j) const {
    const int32_t* choices = ChoicesOf(src) + token * p.slots;
    const float* weights = WeightsOf(src) + token * p.slots;
    float sum = weights[j];
    for (int32_t i = j + 1; i < p.slots; ++i) {
      if (choices[i] == choices[j]) sum += weights[i];
    }
    return sum;
  }

  // Waits for an item of all ranks' tokens, and copies it to its rows. Called by a warp. False if a
  // wait failed.
  JFLUX_HD bool Receive(int64_t item, const ExpertMarks& marks) const {
    const int64_t token = p.items.Token(item);
    const int32_t part = p.items.Part(item);
    int32_t* to = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + p.MarkBytes()) +
                  WarpOfBlock() * p.world * p.slots;
    for (int32_t i = Warp::rank(); i < p.world * p.slots; i += Warp::size()) {
      const int32_t src = i / p.slots, j = i % p.slots;
      to[i] = RowOf(marks, src, token, j);
      if (part != 0) continue;
      const int64_t slot = (src * p.items.tokens + token) * p.slots + j;
      arrays.there[slot] = to[i];
      if (to[i] < 0) continue;
      arrays.slot[to[i]] = static_cast<int32_t>(slot);
      arrays.row_weights[to[i]] = WeightOf(src, token, j);
    }
    Warp::sync();
    for (int d = 0; d < p.world; ++d) {  // the own row first
      const int src = (Rank() + d) % p.world;
      if (d == 0) {
        CopyToRows([&](int64_t v) { return OwnVector(token, v); }, to + src * p.slots, part);
        continue;
      }
      if (!Came(to + src * p.slots)) continue;
      const auto* arrived = ctx.signal(p.ItemSignal(src, item));
      if (!shmem::signal_wait_until_warp(ctx, arrived, src)) return false;
      const Vector* image = ctx.data<Vector>(p.RowOffset(src, token));
      CopyToRows([&](int64_t v) { return image[v]; }, to + src * p.slots, part);
    }
    Warp::sync();  // `to` is written again
    return true;
  }

  // Whether a token came here whose slots have the rows to[0 ... slots - 1]. Its choices would say
  // it too, but if a wait was skipped (TestHooks::skip_waits) they change, and lanes of a warp
  // would go separate ways.
  JFLUX_HD bool Came(const int32_t* to) const {
    bool came = false;
    for (int32_t j = 0; j < p.slots; ++j) came |= to[j] != ExpertMarks::kNone;
    return came;
  }

  // A part of a row, of vectors from(v), to the rows to[0 ... slots - 1] that are none of the
  // negative numbers.
  template <typename From>
  JFLUX_HD void CopyToRows(From&& from, const int32_t* to, int32_t part) const {
    constexpr int kInFlight = 4;  // loads in flight
    bool is_here = false;
    for (int32_t j = 0; j < p.slots; ++j) is_here |= to[j] >= 0;
    if (!is_here) return;
    const int64_t end = p.items.First(part + 1);
    JFLUX_NO_UNROLL
    for (int64_t v0 = p.items.First(part) + Warp::rank(); v0 < end;
         v0 += kInFlight * Warp::size()) {
      Vector loaded[kInFlight];
      JFLUX_UNROLL
      for (int b = 0; b < kInFlight; ++b) {
        const int64_t v = v0 + b * Warp::size();
        if (v < end) loaded[b] = from(v);
      }
      for (int32_t j = 0; j < p.slots; ++j) {
        if (to[j] < 0) continue;
        JFLUX_UNROLL
        for (int b = 0; b < kInFlight; ++b) {
          const int64_t v = v0 + b * Warp::size();
          if (v < end) VectorOfRow(to[j], v) = loaded[b];
        }
      }
    }
  }

  // Zeroes the item's share of the rows that no token has, those past the last expert's only if
  // they are wanted. Called by a warp.
  JFLUX_HD void FillFreeRows(int64_t item, const ExpertMarks& marks) const {
    for (int64_t row = item; row < p.rows; row += p.items.Items()) {
      if (!marks.IsFree(static_cast<int32_t>(row))) continue;
      const int64_t written = p.fill || row < marks.starts[p.experts] ? p.items.vectors : 0;
      for (int64_t v = Warp::rank(); v < written; v += Warp::size()) {
        VectorOfRow(row, v) = Vector{};
      }
      if (Warp::rank() == 0) {
        arrays.slot[row] = ExpertMarks::kNone;
        arrays.row_weights[row] = 0;
      }
    }
  }
  // Vector v of a row: of x, and of the result.
  JFLUX_HD Vector OwnVector(int64_t token, int64_t v) const {
    const int64_t values = p.ValueVectors();
    return v < values ? Values()[token * values + v]
                      : Scales()[token * p.scale_vectors + (v - values)];
  }
  JFLUX_HD Vector& VectorOfRow(int64_t row, int64_t v) const {
    const int64_t values = p.ValueVectors();
    return v < values ? static_cast<Vector*>(arrays.rows)[row * values + v]
                      : static_cast<Vector*>(arrays.row_scale)[row * p.scale_vectors + v - values];
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_BODY_H_
