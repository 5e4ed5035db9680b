#include "runtime/peers.h"

#ifdef JFLUX_WITH_CUDA

#include <cuda_runtime.h>

#include "runtime/cuda_check.h"

namespace jflux {

bool ReadPeers(std::vector<PeerAccess>* peers, std::string* error) {
  int count = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDeviceCount(&count), error);
  peers->clear();
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      int access = 0, atomics = 0;
      JFLUX_CUDA_OR_FALSE(
          cudaDeviceGetP2PAttribute(&access, cudaDevP2PAttrAccessSupported, from, to), error);
      JFLUX_CUDA_OR_FALSE(
          cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to),
          error);
      peers->push_back({from, to, access != 0, atomics != 0});
    }
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
