// What the GPUs that a process sees may do with each other's memory, as CUDA says.
//
// jflux's kernels load and store peers' memory. None of them has an atomic operation there: over
// PCIe most GPUs have none for a peer. (jflux.triton's signal_add is one; Python refuses it.)
#ifndef JFLUX_RUNTIME_PEERS_H_
#define JFLUX_RUNTIME_PEERS_H_

#include <algorithm>
#include <string>
#include <vector>

namespace jflux {

// What GPU `from` may do with the memory of GPU `to`; ordinals.
struct PeerAccess {
  int from, to;
  bool loads_and_stores;
  bool atomics;
};

// Why these GPUs cannot share a heap; empty if they can.
inline std::string WhyNoPeers(const std::vector<PeerAccess>& peers,
                              const std::vector<int>& ordinals) {
  const auto is_here = [&](int ordinal) {
    return std::find(ordinals.begin(), ordinals.end(), ordinal) != ordinals.end();
  };
  for (const PeerAccess& p : peers) {
    if (p.loads_and_stores || !is_here(p.from) || !is_here(p.to)) continue;
    return "GPU " + std::to_string(p.from) + " cannot access GPU " + std::to_string(p.to) +
           " (no NVLink or peer access between them): hide one of them (CUDA_VISIBLE_DEVICES), or "
           "see `nvidia-smi topo -p2p rw`";
  }
  return "";
}

#ifdef JFLUX_WITH_CUDA
// Of all GPUs that this process sees, each with each other one. Touches no GPU.
bool ReadPeers(std::vector<PeerAccess>* peers, std::string* error);
#endif

}  // namespace jflux

#endif  // JFLUX_RUNTIME_PEERS_H_
