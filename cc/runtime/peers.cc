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
      // A GPU that does not answer, which the heap may have no use for, has neither.
      const auto has = [&](cudaDeviceP2PAttr what) {
        int value = 0;
        const bool ok = cudaDeviceGetP2PAttribute(&value, what, from, to) == cudaSuccess;
        if (!ok) cudaGetLastError();
        return ok && value != 0;
      };
      peers->push_back(
          {from, to, has(cudaDevP2PAttrAccessSupported), has(cudaDevP2PAttrNativeAtomicSupported)});
    }
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
