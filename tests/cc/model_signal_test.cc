// core/signal.h in the model checker: signals, epochs and the two halves, in all schedules of two
// and three ranks, and each part of the protocol left out.
#include "model/atomics.h"

namespace jflux {
namespace {

enum class Announce { kRelease, kFence };  // StoreRelease, or FenceRelease and relaxed stores

struct Calls {
  int world, calls;
  int words = 1;  // of data for each peer
  Announce announce = Announce::kRelease;
  Epoch first_epoch = 1;
  bool ring = false;  // data to the next rank only, and a hello to the others
  // What is left out.
  bool skips_wait = false;     // rank 0's waits for rank 1
  bool signals_first = false;  // the signal is stored before the data
  bool single_half = false;    // of data
  bool wrong_half = false;     // the writer takes the other half of data
  bool single_half_of_signals = false;
  bool no_hello = false;
  bool one_then_two = false;  // epochs wrap from the last to 1
  bool no_epoch = false;      // the reader takes any word that is not 0
  int other_op = -1;          // this rank makes another call
};

struct Program {
  Calls c;
  Fault faults[3]{};

  uint64_t Data(int call, int src, int dst, int word) const {
    return ((call + 1) * 10 + src) * 100 + dst * 10 + word;
  }
  Epoch Next(Epoch epoch) const {
    if (c.one_then_two && epoch == EpochOf(~Signal{0})) return 1;
    return NextEpoch(epoch);
  }
  bool HasData(int src, int dst) const { return !c.ring || (src + 1) % c.world == dst; }

  void operator()(int rank, int call) {
    const SymmetricView view = ModelView(rank, c.world);
    const WorkspaceLayout layout = WorkspaceLayout::For(64, 512);
    const auto signal = [&](int on, int src, Epoch e) {
      return view.At<Signal>(on, layout.SignalOffset(c.single_half_of_signals ? 0 : e)) + src;
    };
    const auto data = [&](int on, int src, Epoch e) {
      return view.At<uint64_t>(on, layout.DataOffset(c.single_half ? 0 : e)) + src * c.words;
    };
    Epoch epoch = c.first_epoch;
    for (int before = 0; before < call; ++before) epoch = Next(epoch);
    const Signal mine = MakeSignal(epoch, 7 + (rank == c.other_op));
    const auto announce = [&](int peer) {
      Signal* word = signal(peer, rank, epoch);
      c.announce == Announce::kRelease ? StoreRelease(word, mine) : StoreRelaxed(word, mine);
    };
    const auto write = [&](int peer) {
      for (int i = 0; i < c.words && HasData(rank, peer); ++i) {
        StoreRelaxed(data(peer, rank, epoch + c.wrong_half) + i, Data(call, rank, peer, i));
      }
    };
    for (int d = 1; d < c.world; ++d) {
      const int peer = (rank + d) % c.world;
      if (c.no_hello && !HasData(rank, peer)) continue;
      if (c.signals_first) announce(peer);
      write(peer);
      if (!c.signals_first && c.announce == Announce::kRelease) announce(peer);
    }
    if (c.announce == Announce::kFence) {
      FenceRelease();
      for (int d = 1; d < c.world; ++d) announce((rank + d) % c.world);
    }
    for (int d = 1; d < c.world; ++d) {
      const int peer = (rank + d) % c.world;
      if (c.no_hello && !HasData(peer, rank)) continue;
      if (!Wait(signal(rank, peer, epoch), mine, rank, peer)) {
        if (c.other_op < 0) model::Fail("a fault, and all ranks make the same call");
        return;  // what it does afterwards is nobody's concern
      }
      if (c.other_op >= 0 && (peer == c.other_op || rank == c.other_op)) {
        model::Fail("another call was not noticed");
      }
      for (int i = 0; i < c.words && HasData(peer, rank); ++i) {
        const uint64_t got = LoadRelaxed(data(rank, peer, epoch) + i);
        if (got != Data(call, peer, rank, i)) {
          model::Fail("call " + std::to_string(call) + " read " + std::to_string(got));
        }
      }
    }
  }

  bool Wait(const Signal* word, Signal expected, int rank, int peer) {
    WaitContext ctx = ModelWait(rank, &faults[rank]);
    if (c.no_epoch) {
      for (uint32_t attempt = 0; LoadAcquire(word) == 0; ++attempt) PollPause(attempt);
      return true;
    }
    ctx.skip = c.skips_wait && rank == 0 && peer == 1;
    return WaitSignal(word, expected, peer, 0, ctx);
  }
};

void Check(const Calls& c, const char* broken = nullptr, model::Weakened weakened = {}) {
  Program program{c, {}};
  model::Checker checker(c.world, c.calls, program, weakened);
  if (c.first_epoch != 1) {  // calls of earlier epochs were there
    for (int rank = 0; rank < c.world; ++rank) {
      const SymmetricView view = ModelView(rank, c.world);
      const WorkspaceLayout layout = WorkspaceLayout::For(64, 512);
      for (Epoch e : {c.first_epoch, Epoch(c.first_epoch + 1)}) {
        for (int src = 0; src < c.world; ++src) {
          checker.Initialize(view.At<Signal>(rank, layout.SignalOffset(e)) + src,
                             MakeSignal(e - 2, 7));
        }
      }
    }
  }
  Explore("signals, " + std::to_string(c.world) + " ranks, " + std::to_string(c.calls) + " calls",
          checker, broken);
}

Calls Of(int world, int calls) {
  Calls c{};
  c.world = world;
  c.calls = calls;
  return c;
}
Calls With(int world, int calls, bool Calls::* broken) {
  Calls c = Of(world, calls);
  c.*broken = true;
  return c;
}

TEST(TwoRanks) {
  for (int calls : {1, 2, 3, 4}) Check(Of(2, calls));
  for (int words : {2, 3}) {
    for (Announce announce : {Announce::kRelease, Announce::kFence}) {
      Calls c = Of(2, 3);
      c.words = words;
      c.announce = announce;
      Check(c);
    }
  }
}

TEST(ThreeRanks) {
  for (int calls : {1, 2, 3}) Check(Of(3, calls));
  Calls c = Of(3, 3);
  c.announce = Announce::kFence;
  Check(c);
}

TEST(DataForSomePeersAndHellosForTheOthers) {
  Calls c = Of(3, 3);
  c.ring = true;
  Check(c);
  c.no_hello = true;
  Check(c, "no hello");
}

TEST(TheWrapOfTheEpoch) {
  Calls c = Of(2, 4);
  c.first_epoch = BeforeTheWrap();
  Check(c);
  c.one_then_two = true;
  Check(c, "two calls in one half at the wrap");
}

TEST(AnotherCallIsNoticed) {
  Calls c = Of(2, 2);
  c.other_op = 1;
  Check(c);
}

TEST(BrokenProtocols) {
  Check(With(2, 1, &Calls::skips_wait), "a dropped wait");
  Check(With(2, 1, &Calls::signals_first), "the signal before the data");
  Check(With(2, 2, &Calls::wrong_half), "the writer takes the other half");
  Check(With(2, 2, &Calls::single_half), "one half of data");
  Check(With(2, 3, &Calls::single_half_of_signals), "one half of signals");
  Check(With(2, 3, &Calls::no_epoch), "words without epochs");
}

TEST(WeakenedOrders) {
  for (Announce announce : {Announce::kRelease, Announce::kFence}) {
    Calls c = Of(2, 1);
    c.announce = announce;
    Check(c, "relaxed in place of release", model::Weakened{true, false});
    Check(c, "relaxed in place of acquire", model::Weakened{false, true});
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
