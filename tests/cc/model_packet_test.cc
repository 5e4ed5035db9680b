// core/packet.h in the model checker: the CPU bodies of the exchanges and of all_reduce, in all
// schedules of two and three ranks, and each part of the protocol left out.
#include <cstring>
#include <vector>

#include "model/atomics.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/butterfly_body.h"
#include "ops/exchange/exchange_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {
namespace {

enum class Broken {
  kNothing,
  kNoHello,     // neither sent nor awaited
  kSingleHalf,  // of packets
  kWrongHalf,   // rank 0 sends into the other one
  kNoFlags,     // a reader takes whatever is there
  kOneFlag,     // a reader looks at the first word alone
  kDroppedWait,
};

// The flag of a call's packets.
uint64_t FlagOf(Epoch epoch) { return static_cast<uint32_t>(epoch); }

struct Checked {
  int world, calls;
  Epoch first_epoch = 1;
  Broken broken = Broken::kNothing;
  const char* what = nullptr;
  int other_op = -1;  // this rank makes another call
};

// `body(packet call, call)` runs a rank's part of a call, and fails if its results are wrong.
template <typename Body>
void Check(const std::string& name, const Checked& c, Body&& body) {
  Fault faults[3]{};
  const PacketLayout layout = PacketLayout::For(16);
  const auto program = [&](int rank, int call) {
    const SymmetricView view = ModelView(rank, c.world);
    Epoch epoch = c.first_epoch;
    for (int before = 0; before < call; ++before) epoch = NextEpoch(epoch);
    WaitContext wait = ModelWait(rank, &faults[rank]);
    wait.skip = c.broken == Broken::kDroppedWait && rank == 1;
    const PacketCall packets{view, layout, epoch, 7u + (rank == c.other_op), wait};
    const bool greets = c.broken != Broken::kNoHello;
    for (int d = 1; d < c.world && greets; ++d) packets.SendHello((rank + d) % c.world);
    const bool ok = body(packets, call);
    for (int d = 1; ok && d < c.world && greets; ++d) {
      if (packets.AwaitHello((rank + d) % c.world)) {
        if (c.other_op >= 0) model::Fail("another call was not noticed");
        continue;
      }
      if (c.other_op < 0) model::Fail("a fault, and all ranks make the same call");
      return;
    }
    if (!ok) model::Fail("a fault, and all ranks make the same call");
  };
  model::Checker checker(c.world, c.calls, program);
  if (c.first_epoch != 1) {
    for (int rank = 0; rank < c.world; ++rank) {
      const SymmetricView view = ModelView(rank, c.world);
      for (Epoch e : {c.first_epoch, Epoch(c.first_epoch + 1)}) {
        for (int src = 0; src < c.world; ++src) {
          checker.Initialize(view.At<Signal>(rank, layout.HelloOffset(e, src)),
                             MakeSignal(e - 2, 7));
          for (int w : {0, 1}) {
            checker.Initialize(&view.At<Packet>(rank, layout.PacketOffset(e))[src].word[w],
                               FlagOf(e - 2) << 32 | 99);
          }
        }
      }
    }
  }
  Explore(name + ", " + std::to_string(c.world) + " ranks, " + std::to_string(c.calls) + " calls",
          checker, c.what);
}

uint64_t PayloadOf(int call, int src, int dst) {
  const auto number = static_cast<uint64_t>((call + 1) * 100 + src * 10 + dst);
  return number << 32 | (number + 5);
}

// Where a packet of this rank's call lies, if the call took that half.
Packet* InHalf(const PacketCall& call, int rank, int64_t index, Epoch half) {
  return call.view.At<Packet>(rank, call.layout.PacketOffset(half)) + index;
}

// Waits for a packet, as PacketCall does not.
uint64_t AwaitBroken(const PacketCall& call, int src, Broken broken) {
  const Packet* p =
      InHalf(call, call.view.rank, src, broken == Broken::kSingleHalf ? 0 : call.epoch);
  for (uint32_t attempt = 0;; ++attempt) {
    uint64_t a, b;
    LoadRelaxed2(p->word, &a, &b);
    const bool first = a >> 32 == FlagOf(call.epoch);
    const bool second = b >> 32 == FlagOf(call.epoch);
    if (broken == Broken::kNoFlags || (first && (second || broken == Broken::kOneFlag))) {
      return (a & 0xffffffff) | (b << 32);
    }
    PollPause(attempt);
  }
}

// A packet to each peer, or to the next rank alone.
void CheckPackets(const Checked& c, bool ring = false) {
  Check(ring ? "packets to the next rank" : "packets", c, [&](const PacketCall& call, int n) {
    const int rank = call.view.rank;
    const auto has = [&](int src, int dst) { return !ring || (src + 1) % c.world == dst; };
    for (int d = 1; d < c.world; ++d) {
      const int peer = (rank + d) % c.world;
      if (!has(rank, peer)) continue;
      const Epoch half = c.broken == Broken::kSingleHalf               ? 0
                         : c.broken == Broken::kWrongHalf && rank == 0 ? call.epoch + 1
                                                                       : call.epoch;
      StorePacket(InHalf(call, peer, rank, half), PayloadOf(n, rank, peer), call.epoch);
    }
    for (int d = 1; d < c.world; ++d) {
      const int src = (rank + d) % c.world;
      if (!has(src, rank)) continue;
      uint64_t payload = 0;
      if (c.broken == Broken::kNoFlags || c.broken == Broken::kOneFlag ||
          c.broken == Broken::kSingleHalf) {
        payload = AwaitBroken(call, src, c.broken);
      } else if (!call.AwaitFrom(src, src, &payload)) {
        return false;
      }
      if (payload != PayloadOf(n, src, rank)) {
        model::Fail("call " + std::to_string(n) + " read " + std::to_string(payload));
      }
    }
    return true;
  });
}

Checked Of(int world, int calls, Broken broken = Broken::kNothing, const char* what = nullptr) {
  Checked c{};
  c.world = world;
  c.calls = calls;
  c.broken = broken;
  c.what = what;
  return c;
}

// The body that CPU and GPU run, of one unit from each rank to each.
void CheckExchange(OpId op, int world, int calls) {
  const bool gathers = op == kAllGatherId;
  const Shards one{1, 1, 8}, several{world, 1, 8};
  const ExchangeParams p{op, world, DType::kF32, gathers ? one : several,
                         op == kReduceScatterId ? one : several};
  Check("exchange " + std::to_string(static_cast<int>(op)), Of(world, calls),
        [&](const PacketCall& call, int n) {
          const int rank = call.view.rank;
          const auto number = [&](int src, int dst, int i) {
            return static_cast<float>((n + 1) * 100 + src * 10 + (gathers ? 0 : dst) + 1000 * i);
          };
          std::vector<float> x, y(2 * p.y.world);
          for (int dst = 0; dst < p.x.world; ++dst) {
            for (int i : {0, 1}) x.push_back(number(rank, dst, i));
          }
          const ExchangeArrays arrays{x.data(), y.data()};
          if (!ExchangeBody<float>{p, arrays, call}.Run(0, 1)) return false;
          for (int i : {0, 1}) {
            float sum = 0;
            for (int src = 0; src < world; ++src) sum += number(src, rank, i);
            for (int src = 0; src < p.y.world; ++src) {
              const float want = p.Sums() ? sum : number(src, rank, i);
              if (y[2 * src + i] != want) model::Fail("call " + std::to_string(n) + " is wrong");
            }
          }
          return true;
        });
}

template <typename Body>
void CheckAllReduce(AllReduceAlgorithm algorithm, int world, int calls, int64_t count) {
  const AllReduceParams p{world, count, DType::kF32, algorithm};
  Check("all_reduce " + std::to_string(static_cast<int>(algorithm)), Of(world, calls),
        [&](const PacketCall& call, int n) {
          const auto number = [&](int src, int64_t i) {
            return static_cast<float>((n + 1) * 100 + src * 10 + 1000 * i);
          };
          std::vector<float> x, y(count + count % 2);
          for (int64_t i = 0; i < count + count % 2; ++i) x.push_back(number(call.view.rank, i));
          const AllReduceArrays arrays{x.data(), y.data()};
          if (!Body{p, arrays, call}.Run(0, 1)) return false;
          for (int64_t i = 0; i < count; ++i) {
            float sum = 0;
            for (int src = 0; src < world; ++src) sum += number(src, i);
            if (y[i] != sum) model::Fail("call " + std::to_string(n) + " is wrong");
          }
          return true;
        });
}

TEST(Packets) {
  for (int calls : {1, 2, 3}) CheckPackets(Of(2, calls));
  for (int calls : {1, 2}) CheckPackets(Of(3, calls));
}

TEST(PacketsToSomePeersAndHellosToAll) {
  CheckPackets(Of(2, 3), /*ring=*/true);
  CheckPackets(Of(3, 3, Broken::kNoHello, "no hello"), /*ring=*/true);
}

TEST(TheWrapOfTheEpoch) {
  Checked c = Of(2, 3);
  c.first_epoch = BeforeTheWrap();
  CheckPackets(c);
}

TEST(AnotherCallIsNoticed) {
  Checked c = Of(2, 2);
  c.other_op = 1;
  CheckPackets(c);
}

TEST(BodiesOfTheExchanges) {
  for (OpId op : {kAllGatherId, kAllToAllId, kReduceScatterId}) CheckExchange(op, 2, 2);
  for (int calls : {1, 2}) CheckExchange(kAllToAllId, 3, calls);
}

TEST(BodiesOfAllReduce) {
  CheckAllReduce<AllReduceBody<float>>(AllReduceAlgorithm::kOneShot, 2, 3, 2);
  CheckAllReduce<AllReduceBody<float>>(AllReduceAlgorithm::kOneShot, 3, 1, 2);
  CheckAllReduce<AllReduceBody<float>>(AllReduceAlgorithm::kTwoShot, 2, 2, 3);
  CheckAllReduce<ButterflyBody<float, 1>>(AllReduceAlgorithm::kHalfButterfly, 2, 2, 2);
}

TEST(BrokenProtocols) {
  CheckPackets(Of(2, 1, Broken::kDroppedWait, "a dropped wait"));
  CheckPackets(Of(2, 1, Broken::kNoFlags, "no flags"));
  CheckPackets(Of(2, 1, Broken::kOneFlag, "one flag of two"));
  CheckPackets(Of(2, 3, Broken::kSingleHalf, "one half of packets"));
  CheckPackets(Of(2, 2, Broken::kWrongHalf, "the writer takes the other half"));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
