// runtime/peers.h: which GPUs can share a heap, of machines that are not here.
#include "runtime/peers.h"

#include "testing.h"

namespace jflux {
namespace {

// `islands`: of each GPU. GPUs of one island are joined.
std::vector<PeerAccess> MachineOf(const std::vector<int>& islands, bool atomics) {
  std::vector<PeerAccess> peers;
  const int count = static_cast<int>(islands.size());
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      const bool joined = islands[from] == islands[to];
      if (from != to) peers.push_back({from, to, joined, joined && atomics});
    }
  }
  return peers;
}

TEST(GpusWithPeerAccessShareAHeap) {
  EXPECT_EQ(WhyNoPeers(MachineOf({0, 0, 0, 0}, true), {0, 1, 2, 3}), "");
  EXPECT_EQ(WhyNoPeers({}, {0}), "");
}

TEST(PcieWithoutAtomicsWillDo) { EXPECT_EQ(WhyNoPeers(MachineOf({0, 0}, false), {0, 1}), ""); }

// Two sockets, whose GPUs reach those of their own socket alone.
TEST(GpusWithoutPeerAccessAreRefusedByName) {
  const auto sockets = MachineOf({0, 0, 1, 1}, false);
  const std::string why = WhyNoPeers(sockets, {0, 1, 2, 3});
  EXPECT(why.find("GPU 0 cannot access GPU 2") == 0) << why;
  EXPECT(why.find("CUDA_VISIBLE_DEVICES") != std::string::npos) << why;
  // Those that the job does not use do not count.
  EXPECT_EQ(WhyNoPeers(sockets, {0, 1}), "");
  EXPECT_EQ(WhyNoPeers(sockets, {2, 3}), "");
  EXPECT(WhyNoPeers(sockets, {3, 1}).find("GPU 1 cannot access GPU 3") == 0);
}

TEST(OneDirectionIsNotEnough) {
  const std::vector<PeerAccess> peers = {{0, 1, true, true}, {1, 0, false, false}};
  EXPECT(WhyNoPeers(peers, {0, 1}).find("GPU 1 cannot access GPU 0") == 0);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
