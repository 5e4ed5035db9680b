// Packets: small data that carry their own signal.
//
//   memory   A packet is two 64-bit words in the reader's part of the symmetric heap, each with
//            four bytes of payload and a flag: 16 bytes for 8.
//   writer   Stores each word at once. There is no fence and no signal: whoever sees a word's flag
//            has its payload, so data are one link's latency away.
//   reader   Polls both words until their flags are the call's.
//   flag     The epoch of the call, as signals have it (core/signal.h): it only grows, so nothing
//            is reset, and what an earlier call left is older. It is never 0, fresh memory's. In a
//            packet's place there must never have been anything but packets; that is why they have
//            workspaces of their own.
//   hello    A packet says nothing of what the ranks run. So in every call each rank also sends
//            each peer one signal, with the call's signature, and waits for theirs. That, too, is
//            how every rank hears from every peer, on which the reuse of the two halves rests.
//
//   workspace for packets
//   +---------------+---------+---------+-----------+-----------+
//   | WorkspaceHeader | hello 0 | hello 1 | packets 0 | packets 1 |
//   +---------------+---------+---------+-----------+-----------+
#ifndef JFLUX_CORE_PACKET_H_
#define JFLUX_CORE_PACKET_H_

#include <cstdint>
#include <optional>

#include "core/atomic.h"
#include "core/layout.h"
#include "core/platform.h"
#include "core/signal.h"

namespace jflux {

struct alignas(16) Packet {
  uint64_t word[2];  // flag << 32 | payload
};

inline constexpr int64_t kPacketPayload = 8;  // bytes
inline constexpr char kPacketPoison = 0x7f;   // what tests fill packets with: no near call's flag

JFLUX_HD void StorePacket(Packet* p, uint64_t payload, uint32_t flag) {
  const uint64_t high = static_cast<uint64_t>(flag) << 32;
  StoreRelaxed2(p->word, high | (payload & 0xffffffff), high | (payload >> 32));
}

// False: not there yet.
JFLUX_HD bool LoadPacket(const Packet* p, uint32_t flag, uint64_t* payload) {
  uint64_t a, b;
  LoadRelaxed2(p->word, &a, &b);
  *payload = (a & 0xffffffff) | (b << 32);
  return static_cast<uint32_t>(a >> 32) == flag && static_cast<uint32_t>(b >> 32) == flag;
}

// A workspace that holds packets alone. Its sizes are none of WorkspaceLayout's, which always has
// room for signals.
struct PacketLayout {
  int64_t half_bytes;  // a power of two

  JFLUX_HD static PacketLayout For(int64_t packets) {
    int64_t size = kMinHalfBytes;
    while (size < packets * static_cast<int64_t>(sizeof(Packet))) size *= 2;
    return PacketLayout{size};
  }
  // That whose TotalBytes() is `total`, unless it is a workspace of signals and data.
  static std::optional<PacketLayout> OfTotal(int64_t total) {
    for (int64_t size = kMinHalfBytes; PacketLayout{size}.TotalBytes() <= total; size *= 2) {
      if (PacketLayout{size}.TotalBytes() == total) return PacketLayout{size};
    }
    return std::nullopt;
  }

  JFLUX_HD int64_t HelloOffset(uint32_t epoch, int src) const {
    return 512 + ((epoch & 1) * kMaxRanks + src) * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t PacketOffset(uint32_t epoch) const {
    return kHeapAlign + (epoch & 1) * half_bytes;
  }
  JFLUX_HD int64_t TotalBytes() const { return kHeapAlign + 2 * half_bytes; }

  static constexpr int64_t kMinHalfBytes = 64 << 10;
};

// The packets of one call, as a rank sees them.
struct PacketCall {
  const SymmetricView& view;
  PacketLayout layout;
  uint32_t epoch, signature;
  WaitContext wait;
  uint64_t timeout_ns;  // of a wait, from when it begins; 0: wait.deadline_ns is set already

  JFLUX_HD Packet* At(int rank, int64_t index) const {
    return view.At<Packet>(rank, layout.PacketOffset(epoch)) + index;
  }

  JFLUX_HD void SendHello(int peer) const {
    StoreRelaxed(HelloOf(peer, view.rank), MakeSignal(epoch, signature));  // announces no data
  }
  JFLUX_HD bool AwaitHello(int peer) const {
    const Signal* word = HelloOf(view.rank, peer);
    const Signal expected = MakeSignal(epoch, signature);
    return LoadRelaxed(word) == expected || WaitSignal(word, expected, peer, -1, Deadline());
  }

  JFLUX_HD void Send(int peer, int64_t index, uint64_t payload) const {
    StorePacket(At(peer, index), payload, epoch);
  }

  // Waits for packet index_of(src) from each source that `has` one, but this rank; nothing else of
  // `payload` is written. False if a wait failed.
  template <typename Has, typename IndexOf>
  JFLUX_HD bool Await(uint64_t (&payload)[kMaxRanks], Has&& has, IndexOf&& index_of) const {
    return Poll([&](int* missing, int64_t* unit) {
      JFLUX_UNROLL  // loads that are on their way at the same time
          for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= view.world || src == view.rank || !has(src)) continue;
        const int64_t index = index_of(src);
        if (!LoadPacket(At(view.rank, index), epoch, &payload[src])) {
          *missing = src;
          *unit = index;
        }
      }
    });
  }
  // One packet, from one peer.
  JFLUX_HD bool AwaitFrom(int peer, int64_t index, uint64_t* payload) const {
    *payload = 0;
    return Poll([&](int* missing, int64_t* unit) {
      *unit = index;
      if (!LoadPacket(At(view.rank, index), epoch, payload)) *missing = peer;
    });
  }

 private:
  // Calls look(&missing, &unit) until it leaves `missing` alone; else they are whose packet has not
  // come, and which.
  template <typename Look>
  JFLUX_HD bool Poll(Look&& look) const {
    if (wait.skip) return true;
    WaitContext ctx{};
    for (uint32_t turn = 0;; ++turn) {
      int missing = -1;
      int64_t unit = 0;
      look(&missing, &unit);
      if (missing < 0) return true;
      if ((turn & 63) == 63) {
        if (turn == 63) ctx = Deadline();
        if (Faulted(ctx)) return false;
        // A peer that runs another call sends other packets, or none.
        const Signal expected = MakeSignal(epoch, signature);
        const Signal hello = LoadAcquire(HelloOf(view.rank, missing));
        const bool mismatch = Classify(hello, expected) == SignalState::kMismatch;
        if (mismatch || NowNs() > ctx.deadline_ns) {
          ReportFault(ctx, mismatch ? FaultKind::kMismatch : FaultKind::kTimeout, missing, unit,
                      expected, hello);
          return false;
        }
      }
      PollPause(turn);
    }
  }
  // Where `src` greets `rank`.
  JFLUX_HD Signal* HelloOf(int rank, int src) const {
    return view.At<Signal>(rank, layout.HelloOffset(epoch, src));
  }
  JFLUX_HD WaitContext Deadline() const {
    WaitContext ctx = wait;
    if (timeout_ns != 0) ctx.deadline_ns = NowNs() + timeout_ns;
    return ctx;
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_PACKET_H_
