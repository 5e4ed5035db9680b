// LL packets: 8 bytes of data and two flags in one 16-byte store, as in NCCL's LL protocol.
//
//   memory   A packet is two 64-bit words, each with 4 bytes of payload and a 4-byte flag, in the
//            reader's part of the symmetric heap.
//   writer   The peer stores both words, each atomically, relaxed. No fence, no signal.
//   reader   Polls both words until both flags equal the call's epoch. A word's flag and payload
//            arrive together, so the payload is then valid after one link latency.
//   flag     The low 32 bits of the call's epoch (core/signal.h), never 0, which is fresh memory.
//            Memory that holds packets must never hold anything else: data could look like a flag.
//            Packets therefore have workspaces of their own.
//   reset    A flag is used again after 2^32 calls, and a packet may stay for as long as no call
//            uses its place. So after every 2^31 calls each rank clears its packets, a slice in
//            each call: call e clears a slice of the half that it does not use, then fences, then
//            sends its hellos.
//              - Nobody reads that half: this rank's call e-1 has read it and is over, and call e
//                uses the other one.
//              - Nobody writes it: the packets of call e-1 have all been awaited, in that call. A
//                peer sends packets of call e+1 after its own call e, which has waited for this
//                rank's hello of call e, which follows the clearing.
//              - Every flag is gone in time: a flag comes again after 2^32 calls, and in any 2^32
//                calls all packets are cleared.
//   hello    Packets carry no signature. In every call each rank also sends each peer one signal
//            with the call's signature, and waits for the peer's. The hello detects ranks that run
//            different calls, and makes every rank hear from every peer, which the reuse of the two
//            halves requires (core/signal.h).
//
//   workspace for packets
//   +-----------------+---------+---------+-----------+-----------+
//   | WorkspaceHeader | hello 0 | hello 1 | packets 0 | packets 1 |
//   +-----------------+---------+---------+-----------+-----------+
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

inline constexpr int64_t kPacketPayload = 8;      // bytes
inline constexpr char kPacketPoison = 0x7f;       // tests fill packets with it: no epoch of a test
inline constexpr int64_t kScrubBytes = 16 << 10;  // that a call clears
inline constexpr int kScrubPeriodBits = 31;       // calls between two clearings

JFLUX_HD void StorePacket(Packet* p, uint64_t payload, uint32_t flag) {
  const uint64_t high = static_cast<uint64_t>(flag) << 32;
  StoreRelaxed2(p->word, high | (payload & 0xffffffff), high | (payload >> 32));
}

// False: the packet has not arrived.
JFLUX_HD bool LoadPacket(const Packet* p, uint32_t flag, uint64_t* payload) {
  uint64_t a, b;
  LoadRelaxed2(p->word, &a, &b);
  *payload = (a & 0xffffffff) | (b << 32);
  return static_cast<uint32_t>(a >> 32) == flag && static_cast<uint32_t>(b >> 32) == flag;
}

// A workspace of packets. TotalBytes() never equals one of WorkspaceLayout's, so the size tells the
// two kinds apart.
struct PacketLayout {
  int64_t half_bytes;  // a power of two

  JFLUX_HD static PacketLayout For(int64_t packets) {
    int64_t size = kMinHalfBytes;
    while (size < packets * static_cast<int64_t>(sizeof(Packet))) size *= 2;
    return PacketLayout{size};
  }
  // The layout whose TotalBytes() is `total`; nothing if `total` is the size of a workspace of
  // signals.
  static std::optional<PacketLayout> OfTotal(int64_t total) {
    for (int64_t size = kMinHalfBytes; PacketLayout{size}.TotalBytes() <= total; size *= 2) {
      if (PacketLayout{size}.TotalBytes() == total) return PacketLayout{size};
    }
    return std::nullopt;
  }

  JFLUX_HD int64_t HelloOffset(uint64_t epoch, int src) const {
    return 512 + ((epoch & 1) * kMaxRanks + src) * static_cast<int64_t>(sizeof(Signal));
  }
  JFLUX_HD int64_t PacketOffset(uint64_t epoch) const {
    return kHeapAlign + (epoch & 1) * half_bytes;
  }
  JFLUX_HD int64_t TotalBytes() const { return kHeapAlign + 2 * half_bytes; }

  // The slice that call `epoch` clears; negative: none. Consecutive calls clear slices of alternate
  // halves. Epochs 0 and 1 of a period need not exist (NextEpoch). The first period clears nothing.
  JFLUX_HD int64_t ScrubOffset(uint64_t epoch) const {
    constexpr uint64_t kPeriod = uint64_t{1} << kScrubPeriodBits;
    const uint64_t in_period = epoch & (kPeriod - 1);
    if (epoch < kPeriod || in_period < 2) return -1;
    const auto first = static_cast<int64_t>((in_period - 2) / 2) * kScrubBytes;
    return first < half_bytes ? PacketOffset(epoch + 1) + first : -1;
  }

  static constexpr int64_t kMinHalfBytes = 64 << 10;
  static_assert(kMinHalfBytes % kScrubBytes == 0);
};

// The packets of one call, as one rank sees them.
struct PacketCall {
  const SymmetricView& view;
  PacketLayout layout;
  uint64_t epoch;
  uint32_t signature;
  WaitContext wait;

  JFLUX_HD Packet* At(int rank, int64_t index) const {
    return view.At<Packet>(rank, layout.PacketOffset(epoch)) + index;
  }

  // Before the hellos: whether this call clears a slice, and the part of thread `thread` of
  // `threads`. A fence follows.
  JFLUX_HD bool Scrubs() const { return layout.ScrubOffset(epoch) >= 0; }
  JFLUX_HD void Scrub(int64_t thread, int64_t threads) const {
    auto* slice = view.At<Packet>(view.rank, layout.ScrubOffset(epoch));
    constexpr auto kPackets = kScrubBytes / static_cast<int64_t>(sizeof(Packet));
    for (int64_t i = thread; i < kPackets; i += threads) StoreRelaxed2(slice[i].word, 0, 0);
  }

  JFLUX_HD void SendHello(int peer) const {
    // A hello announces no data, so its store is relaxed.
    StoreRelaxed(HelloOf(peer, view.rank), MakeSignal(epoch, signature));
  }
  JFLUX_HD bool AwaitHello(int peer) const {
    const Signal* word = HelloOf(view.rank, peer);
    const Signal expected = MakeSignal(epoch, signature);
    return LoadRelaxed(word) == expected || WaitSignal(word, expected, peer, -1, wait);
  }

  JFLUX_HD void Send(int peer, int64_t index, uint64_t payload) const {
    StorePacket(At(peer, index), payload, Flag());
  }

  // Waits for packet index_of(src) from every other rank `src` for which has(src). Writes these
  // elements of `payload` only. False if the wait failed.
  template <typename Has, typename IndexOf>
  JFLUX_HD bool Await(uint64_t (&payload)[kMaxRanks], Has&& has, IndexOf&& index_of) const {
    return Poll([&](int* missing, int64_t* packet) {
      JFLUX_UNROLL  // independent loads, all in flight
          for (int src = 0; src < kMaxRanks; ++src) {
        if (src >= view.world || src == view.rank || !has(src)) continue;
        const int64_t index = index_of(src);
        if (!LoadPacket(At(view.rank, index), Flag(), &payload[src])) {
          *missing = src;
          *packet = index;
        }
      }
    });
  }
  // Waits for one packet from one peer.
  JFLUX_HD bool AwaitFrom(int peer, int64_t index, uint64_t* payload) const {
    *payload = 0;
    return Poll([&](int* missing, int64_t* packet) {
      *packet = index;
      if (!LoadPacket(At(view.rank, index), Flag(), payload)) *missing = peer;
    });
  }
  // Waits for several.
  template <int kCount>
  JFLUX_HD bool AwaitFrom(int peer, const int64_t (&indices)[kCount],
                          uint64_t (*payloads)[kCount]) const {
    JFLUX_UNROLL
    for (uint64_t& payload : *payloads) payload = 0;
    return Poll([&](int* missing, int64_t* packet) {
      JFLUX_UNROLL  // independent loads, all in flight
          for (int i = 0; i < kCount; ++i) {
        if (LoadPacket(At(view.rank, indices[i]), Flag(), &(*payloads)[i])) continue;
        *missing = peer;
        *packet = indices[i];
      }
    });
  }

 private:
  JFLUX_HD uint32_t Flag() const { return static_cast<uint32_t>(epoch); }
  // Calls look(&missing, &packet) until it leaves `missing` negative. Otherwise `missing` is a rank
  // whose packet has not arrived, and `packet` its index.
  template <typename Look>
  JFLUX_HD bool Poll(Look&& look) const {
    if (wait.skip) return true;
    Patience patience(wait);
    for (uint32_t attempt = 0;; ++attempt) {
      int missing = -1;
      int64_t packet = 0;
      look(&missing, &packet);
      if (missing < 0) return true;
      if (Patience::Looks(attempt)) {
        // If the peer runs a different call, the packet may never come: its hello tells.
        const Signal expected = MakeSignal(epoch, signature);
        const Signal hello = LoadAcquire(HelloOf(view.rank, missing));
        if (Classify(hello, expected) == SignalState::kMismatch) {
          ReportFault(wait, FaultKind::kMismatch, missing, packet, expected, hello);
          return false;
        }
        if (!patience.Lasts(wait, attempt, FaultKind::kTimeout, missing, packet, expected, hello)) {
          return false;
        }
      }
      PollPause(attempt);
    }
  }
  // The hello of `src`, in the memory of `rank`.
  JFLUX_HD Signal* HelloOf(int rank, int src) const {
    return view.At<Signal>(rank, layout.HelloOffset(epoch, src));
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_PACKET_H_
