// nvshmem/node_exchange.h: whole exchanges on the CPU, through jflux/remote.h's mapped
// references, rank by rank and slice by slice as the kernel does them; and the arena of
// runtime/nvshmem.h.
#include "nvshmem/node_exchange.h"

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "runtime/nvshmem.h"
#include "testing.h"

namespace jflux {
namespace {

using Bytes = std::vector<char>;

struct Rank {
  Bytes x, y, workspace;
};

char Byte(int32_t rank, int64_t i) { return static_cast<char>(31 * rank + 7 * i + i / 251 + 1); }

SymmetricView ViewOf(std::vector<Rank>* ranks, int32_t rank) {
  SymmetricView view{};
  view.rank = rank;
  view.world = static_cast<int32_t>(ranks->size());
  for (int32_t r = 0; r < view.world; ++r) view.base[r] = (*ranks)[r].workspace.data();
  return view;
}

// What one rank sends in call `epoch`; each place of each peer at most once.
void Send(const NodeExchange& e, std::vector<Rank>* ranks, int32_t me, uint64_t epoch,
          std::set<std::string>* written) {
  const auto layout = e.Layout();
  const SymmetricView view = ViewOf(ranks, me);
  const Signal value = MakeSignal(epoch, 7);
  for (int32_t slice = 0; slice < e.slices; ++slice) {
    for (int32_t to = 0; to < e.world; ++to) {
      if (!e.Sends(me, to)) continue;
      char* staged = view.At(me, layout.DataOffset(epoch) + e.InStaging(to, slice));
      std::memcpy(staged, (*ranks)[me].x.data() + e.InX(to) + e.SliceBegin(slice),
                  e.BytesOf(slice));
      const shmem::RemoteRef peer{view.base[to]};
      const int64_t word = layout.SignalOffset(epoch) + 8 * e.SignalOf(me, slice);
      EXPECT(word + 8 <= layout.SignalOffset(epoch) + layout.SignalBytes());
      EXPECT(written->insert(std::to_string(to) + "/" + std::to_string(word)).second);
      shmem::put_signal<shmem::Thread>(peer.At(layout.DataOffset(epoch) + e.InSlots(me, slice)),
                                       staged, e.BytesOf(slice), peer.At(word), value);
    }
  }
}

void Receive(const NodeExchange& e, std::vector<Rank>* ranks, int32_t me, uint64_t epoch) {
  const auto layout = e.Layout();
  const SymmetricView view = ViewOf(ranks, me);
  Rank& own = (*ranks)[me];
  for (int32_t slice = 0; slice < e.slices; ++slice) {
    const int64_t begin = e.SliceBegin(slice), bytes = e.BytesOf(slice);
    EXPECT(bytes > 0);
    if (e.KeepsOne()) {
      std::memcpy(own.y.data() + e.InY(me) + begin, own.x.data() + e.InX(me) + begin, bytes);
    }
    for (int32_t from = 0; from < e.world; ++from) {
      if (!e.Sends(from, me)) continue;
      const auto* word =
          view.At<Signal>(me, layout.SignalOffset(epoch) + 8 * e.SignalOf(from, slice));
      EXPECT_EQ(*word, MakeSignal(epoch, 7));
      std::memcpy(own.y.data() + e.InY(from) + begin,
                  view.At(me, layout.DataOffset(epoch) + e.InSlots(from, slice)), bytes);
    }
  }
}

// Where byte i of y is from: (rank, place in its x).
std::pair<int32_t, int64_t> SourceOf(const NodeExchange& e, int32_t me, int64_t i) {
  const auto block = static_cast<int32_t>(i / e.block_bytes);
  switch (e.kind) {
    case NodeExchangeKind::kExchange:
      return {block, me * e.block_bytes + i % e.block_bytes};
    case NodeExchangeKind::kGather:
      return {block, i % e.block_bytes};
    default:
      return {(me + e.steps) % e.world, i};
  }
}

void Check(NodeExchangeKind kind, int32_t world, int32_t steps, int64_t block_bytes) {
  const auto e = NodeExchange::For(kind, world, steps, block_bytes);
  EXPECT(e.slices >= 1 && e.slices <= NodeExchange::kMostSlices) << block_bytes;
  EXPECT_EQ(e.SliceBegin(e.slices - 1) + e.BytesOf(e.slices - 1), block_bytes);
  const int64_t staging = e.InStaging(world - 1, 0) + e.Stride();
  EXPECT(e.InStaging(0, 0) >= e.Slots() * e.Stride());
  EXPECT(staging <= e.Layout().data_bytes) << block_bytes;
  std::vector<Rank> ranks(world);
  for (int32_t r = 0; r < world; ++r) {
    ranks[r].x.resize(e.BytesOfX());
    for (int64_t i = 0; i < e.BytesOfX(); ++i) ranks[r].x[i] = Byte(r, i);
    ranks[r].y.assign(e.BytesOfY(), '\0');
    ranks[r].workspace.assign(e.Layout().TotalBytes(), '\0');
  }
  for (uint64_t epoch : {uint64_t{1}, uint64_t{2}}) {
    std::set<std::string> written;
    for (int32_t r = 0; r < world; ++r) Send(e, &ranks, r, epoch, &written);
    for (int32_t r = 0; r < world; ++r) Receive(e, &ranks, r, epoch);
    for (int32_t r = 0; r < world; ++r) {
      int64_t wrong = 0;
      for (int64_t i = 0; i < e.BytesOfY(); ++i) {
        const auto [from, place] = SourceOf(e, r, i);
        wrong += ranks[r].y[i] != Byte(from, place);
      }
      EXPECT_EQ(wrong, 0) << static_cast<int>(kind) << " " << world << " " << block_bytes;
      ranks[r].y.assign(e.BytesOfY(), '\0');
    }
  }
}

TEST(EveryBlockArrivesWhereItBelongs) {
  for (int32_t world = 2; world <= kMaxRanks; ++world) {
    for (int64_t bytes : {1, 15, 16, 17, 4096, 16384, 16385, 100003}) {
      Check(NodeExchangeKind::kExchange, world, 0, bytes);
      Check(NodeExchangeKind::kGather, world, 0, bytes);
      for (int32_t s = 1; s < world; ++s) Check(NodeExchangeKind::kShift, world, s, bytes);
    }
  }
  Check(NodeExchangeKind::kExchange, 3, 0, (1 << 20) + 5);
}

TEST(AShiftHasOneSenderAndOneReceiver) {
  for (int32_t world = 2; world <= kMaxRanks; ++world) {
    for (int32_t s = 1; s < world; ++s) {
      const auto e = NodeExchange::For(NodeExchangeKind::kShift, world, s, 8);
      for (int32_t r = 0; r < world; ++r) {
        int32_t sends = 0, receives = 0;
        for (int32_t p = 0; p < world; ++p) {
          sends += e.Sends(r, p);
          receives += e.Sends(p, r);
        }
        EXPECT_EQ(sends, 1);
        EXPECT_EQ(receives, 1);
        EXPECT(e.Sends((r + s) % world, r));
      }
    }
  }
}

TEST(ArenaGivesDisjointPlacesAndTakesThemBack) {
  constexpr int64_t kUnit = Arena::kAlign;
  Arena arena(8 * kUnit);
  const int64_t a = arena.Take(1), b = arena.Take(3 * kUnit), c = arena.Take(kUnit + 1);
  EXPECT_EQ(a, 0);
  EXPECT_EQ(b, kUnit);
  EXPECT_EQ(c, 4 * kUnit);
  EXPECT_EQ(arena.free_bytes(), 2 * kUnit);
  EXPECT_EQ(arena.Take(3 * kUnit), -1);
  arena.Give(b);
  EXPECT_EQ(arena.Take(4 * kUnit), -1);
  EXPECT_EQ(arena.Take(3 * kUnit), b);  // exactly fills the gap
  EXPECT_EQ(arena.Take(2 * kUnit), 6 * kUnit);
  EXPECT_EQ(arena.free_bytes(), 0);
  arena.Give(a);
  EXPECT_EQ(arena.Take(kUnit), a);
  EXPECT_EQ(Arena(0).Take(1), -1);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
