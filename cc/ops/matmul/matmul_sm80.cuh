// matmul in portable code: all_gather_matmul's tiles and epilogue, without peers and their
// counters.
//
//   waits   for nobody
//   order   a launch after what wrote the operands; tiles of y are disjoint
#ifndef JFLUX_OPS_MATMUL_MATMUL_SM80_CUH_
#define JFLUX_OPS_MATMUL_MATMUL_SM80_CUH_

#include "ops/all_gather_matmul/all_gather_matmul_sm80.cuh"

namespace jflux {

using MatmulArgs80 = AllGatherMatmulArgs80;

template <typename Config_>
struct MatmulSm80 : AllGatherMatmulSm80<Config_, /*kGathers=*/false> {
  using Schedule = OrderedTiles80<Rounds>;
  using Exchange = NoExchange80;
};

JFLUX_GEMM_KERNEL_80(Matmul);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_MATMUL_SM80_CUH_
