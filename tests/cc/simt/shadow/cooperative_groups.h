// What kernels take of cooperative groups, in place of CUDA's header: clusters.
#ifndef JFLUX_TESTS_CC_SIMT_SHADOW_COOPERATIVE_GROUPS_H_
#define JFLUX_TESTS_CC_SIMT_SHADOW_COOPERATIVE_GROUPS_H_

#include "simt/machine.h"

namespace cooperative_groups {

struct cluster_group {
  static unsigned block_rank() { return jflux::simt::current->cta->rank; }
  static unsigned num_blocks() {
    return static_cast<unsigned>(jflux::simt::current->cta->cluster->ctas.size());
  }
  static void sync() { jflux::simt::SyncCluster(); }
  template <typename T>
  static T* map_shared_rank(T* p, unsigned rank) {
    const auto* own = jflux::simt::current->cta;
    const auto* cta = own->cluster->ctas[rank].get();
    if (cta->ended)
      jflux::simt::Fail("CTA %u, whose shared memory is read, has ended", cta->block.x);
    return reinterpret_cast<T*>(cta->smem + (reinterpret_cast<char*>(p) - own->smem));
  }
};
inline cluster_group this_cluster() {
  jflux::simt::Point();
  return {};
}

}  // namespace cooperative_groups

#endif  // JFLUX_TESTS_CC_SIMT_SHADOW_COOPERATIVE_GROUPS_H_
