// ragged_all_to_all of large data. What a rank sends another one, its slices one after the other,
// is cut into chunks. The sender writes a chunk's rows to their places in the image of y in the
// receiver's workspace, followed by a signal. The receiver copies them to y.
//
// A CTA (shmem::Block; on the CPU the only thread) takes every ctx.blocks-th chunk, and the CTA
// with the same number has the same chunks on every rank. It sends two chunks ahead of the chunk
// that it waits for, and copies its share of the rank's own rows while the first two travel. How
// many chunks come from a rank, recv_sizes says.
//
//   headers  three signals for each slice, which carry a SliceHeader. Block 0 sends them first.
//   writes   the peers' images and signals
//   waits    for the headers of all peers, and for the CTA with the same number on each peer
//   order    data, CTA barrier, signal with release. Headers are relaxed: they announce nothing.
//            The hello of the same peer has the signature.
//   reset    never: core/signal.h
//   faults   as in ragged_packets_body.h
//
// Deadlock: block 0 of every rank sends its headers before it waits, and starts before the rank's
// other blocks. A CTA waits for a chunk only after it has sent its own chunk of the same number.
#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_CHUNKED_BODY_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_CHUNKED_BODY_H_

#include <cstdint>

#include "jflux/shmem.h"
#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "ops/ragged_all_to_all/ragged_table.h"

namespace jflux {

struct RaggedChunkedBody {
  using Block = shmem::Block;
  const RaggedParams& p;
  const RaggedArrays& arrays;
  const shmem::Context& ctx;
  const RaggedTables tables;

  // False if the call failed.
  JFLUX_HD bool Run() const {
    constexpr int kAhead = 2;  // chunks
    const RaggedSlices slices{p, arrays};
    tables.Fill();
    const BadValue bad = tables.FirstBad();
    if (ctx.block == 0) SendHeaders(bad);
    if (bad.Found()) {
      slices.Report(bad, ctx.wait);
      return false;
    }
    const int64_t step = ctx.blocks;
    const int rank = ctx.view.rank;
    int64_t sent = 0, to_come = 0;  // chunks, of the peer with most
    for (int d = 1; d < p.world; ++d) sent = Max(sent, ChunksFor((rank + d) % p.world));
    for (int i = 0; i < kAhead; ++i) Send(ctx.block + i * step);
    const int64_t share = RoundUp<int64_t>(CeilDiv(BytesFor(rank), step), 16);
    CopyTo(rank, static_cast<char*>(arrays.y), ctx.block * share, share);
    bool fits[kMaxRanks];
    if (!AwaitHeaders(fits)) return false;
    for (int src = 0; src < p.world; ++src) {
      if (src != rank && fits[src]) to_come = Max(to_come, ChunksFrom(src));
    }
    for (int64_t c = ctx.block; c < Max(sent, to_come); c += step) {
      Send(c + kAhead * step);
      if (!Receive(c, fits)) return false;
    }
    return ReportMisfits(fits);
  }

 private:
  // Signals of what comes from `src`, on rank `to`.
  JFLUX_HD int64_t FirstSignal(int src, int to) const {
    return ((src - to + p.world) % p.world - 1) * p.SignalsPerRank();
  }
  JFLUX_HD Signal* HeaderWord(int src, int to, int32_t t, int word) const {
    return ctx.signal(FirstSignal(src, to) + t * RaggedParams::kHeaderWords + word);
  }
  JFLUX_HD Signal* ChunkSignal(int src, int to, int64_t c) const {
    return ctx.signal(FirstSignal(src, to) + RaggedParams::kHeaderWords * p.PerRank() + c);
  }

  JFLUX_HD int64_t BytesFor(int to) const { return tables.Sends().Rows(to) * p.row_bytes; }
  JFLUX_HD int64_t ChunksFor(int to) const { return CeilDiv(BytesFor(to), p.ChunkBytes()); }
  JFLUX_HD int64_t ChunksFrom(int src) const {
    return CeilDiv(tables.Receives().Rows(src) * p.row_bytes, p.ChunkBytes());
  }

  JFLUX_HD void SendHeaders(const BadValue& bad) const {
    const RaggedSlices slices{p, arrays};
    const int rank = ctx.view.rank;
    for (int d = 1; d < p.world; ++d) {
      const int peer = (rank + d) % p.world;
      for (int32_t t = Block::rank(); t < p.PerRank(); t += Block::size()) {
        const SliceHeader header = bad.Found()
                                       ? SliceHeader::Refusal(bad.argument, bad.index, bad.value)
                                       : slices.Header(peer, t);
        for (int w = 0; w < RaggedParams::kHeaderWords; ++w) {
          const auto bits = static_cast<uint32_t>(header.Word() >> (kSignatureBits * w));
          StoreRelaxed(shmem::ptr(ctx, HeaderWord(rank, peer, t, w), peer),
                       MakeSignal(ctx.epoch, bits));
        }
      }
    }
  }

  // The header of a peer's slice, which has arrived. All its words are loaded at once.
  JFLUX_HD SliceHeader Header(int src, int32_t t) const {
    uint64_t word = 0;
    JFLUX_UNROLL
    for (int w = 0; w < RaggedParams::kHeaderWords; ++w) {
      const Signal seen = LoadRelaxed(HeaderWord(src, ctx.view.rank, t, w));
      word |= static_cast<uint64_t>(SignatureOf(seen)) << (kSignatureBits * w);
    }
    return SliceHeader::Of(word);
  }

  // Waits for the header of a peer's slice. False if the wait failed.
  JFLUX_HD bool AwaitHeader(int src, int32_t t, SliceHeader* header) const {
    uint64_t word = 0;
    for (int w = 0; w < RaggedParams::kHeaderWords; ++w) {
      uint32_t bits;
      const Signal* from = HeaderWord(src, ctx.view.rank, t, w);
      if (!AwaitPayload(from, ctx.SignalValue(), src, t, ctx.wait, &bits)) return false;
      word |= static_cast<uint64_t>(bits) << (kSignatureBits * w);
    }
    *header = SliceHeader::Of(word);
    return true;
  }

  // Whether all slices of each rank fit. False if a wait failed.
  JFLUX_HD bool AwaitHeaders(bool (&fits)[kMaxRanks]) const {
    const RaggedSlices slices{p, arrays};
    const int rank = ctx.view.rank;
    for (int d = 0; d < p.world; ++d) {
      const int src = (rank + d) % p.world;
      bool came = true, fit = true;
      for (int32_t t = Block::rank(); t < p.PerRank() && came; t += Block::size()) {
        SliceHeader header{};
        if (src == rank) {
          header = slices.Header(src, t);
        } else {
          came =
              shmem::internal::Await(ctx, ctx.hello(src), src, -1) && AwaitHeader(src, t, &header);
        }
        fit &= came && slices.Fits(header, src, t);
      }
      if (!Block::all(came)) return false;
      fits[src] = Block::all(fit) && ChunksFrom(src) <= p.MostChunks();
    }
    return true;
  }

  // After the last wait: whatever others need of this rank has been sent.
  JFLUX_HD bool ReportMisfits(const bool (&fits)[kMaxRanks]) const {
    const RaggedSlices slices{p, arrays};
    const int rank = ctx.view.rank;
    bool ok = true;
    for (int src = 0; src < p.world; ++src) {
      ok &= fits[src];
      for (int32_t t = 0; t < p.PerRank() && !fits[src]; ++t) {
        SliceHeader header = slices.Header(src, t);  // of an own slice
        if (src != rank && !AwaitHeader(src, t, &header)) return false;
        if (!slices.Fits(header, src, t)) slices.Report(header, src, t, ctx.wait);
      }
    }
    return ok;
  }

  // visit(slice, first byte, bytes) for each part of the bytes [first, end) of a peer's slices, one
  // after the other.
  template <typename Visit>
  JFLUX_HD void ForParts(const SizeTable& sizes, int peer, int64_t first, int64_t end,
                         Visit&& visit) const {
    const SizeTable::Place place = sizes.Find(peer, first, p.row_bytes);
    int64_t begin = place.rows * p.row_bytes;  // of slice t
    for (int32_t t = place.t; t < p.PerRank() && begin < end; ++t) {
      const int64_t bytes = sizes.RowsOf(peer, t) * p.row_bytes;
      const int64_t low = Max(first, begin), high = Min(end, begin + bytes);
      if (low < high) visit(t, low - begin, high - low);
      begin += bytes;
    }
  }

  JFLUX_HD void Send(int64_t c) const {
    const int rank = ctx.view.rank;
    for (int d = 1; d < p.world; ++d) {
      const int peer = (rank + d) % p.world;
      CopyTo(peer, ImageOf(peer), c * p.ChunkBytes(), p.ChunkBytes());
    }
    Block::sync();
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int peer = (rank + d) % p.world;
      if (c < ChunksFor(peer)) shmem::signal_set(ctx, ChunkSignal(rank, peer, c), peer);
    }
  }

  // Bytes from `begin` on of what goes to `peer`, to their places in y or in an image of it.
  JFLUX_HD void CopyTo(int peer, char* y, int64_t begin, int64_t count) const {
    const RaggedSlices slices{p, arrays};
    ForParts(
        tables.Sends(), peer, begin, begin + count, [&](int32_t t, int64_t first, int64_t bytes) {
          const char* from = static_cast<const char*>(arrays.operand);
          shmem::internal::Copy<Block>(y + slices.Header(peer, t).to * p.row_bytes + first,
                                       from + slices.From(peer, t) * p.row_bytes + first, bytes);
        });
  }

  JFLUX_HD bool Receive(int64_t c, const bool (&fits)[kMaxRanks]) const {
    const int rank = ctx.view.rank;
    bool ok = true;
    for (int d = 1 + Block::rank(); d < p.world; d += Block::size()) {
      const int src = (rank + d) % p.world;
      if (!fits[src] || c >= ChunksFrom(src)) continue;
      ok &= shmem::signal_wait_until(ctx, ChunkSignal(src, rank, c), src);
    }
    if (!Block::all(ok)) return false;
    for (int d = 1; d < p.world; ++d) {
      const int src = (rank + d) % p.world;
      if (!fits[src]) continue;
      const int64_t begin = c * p.ChunkBytes();
      ForParts(tables.Receives(), src, begin, begin + p.ChunkBytes(),
               [&](int32_t t, int64_t first, int64_t bytes) {
                 const int64_t at = Header(src, t).to * p.row_bytes + first;
                 shmem::internal::Copy<Block>(static_cast<char*>(arrays.y) + at, ImageOf(rank) + at,
                                              bytes);
               });
    }
    return true;
  }

  JFLUX_HD char* ImageOf(int rank) const { return shmem::ptr(ctx, ctx.data(), rank); }
};

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_CHUNKED_BODY_H_
