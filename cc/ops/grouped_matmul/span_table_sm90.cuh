// The table of spans (span_table.cuh) in a kernel with roles: consumers write it, scheduler and
// send warps wait for it.
#ifndef JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_SM90_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_SM90_CUH_

#include <cstdint>

#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "ops/grouped_matmul/span_table.cuh"

namespace jflux {

template <typename Config>
class SpanTable : public Spans {
 public:
  using Spans::Spans;

  // Called by all consumers of the CTA. `leads`: its scheduler warp waits for the table (Await).
  template <typename Args>
  __device__ void Make(const Args& args, bool leads) const {
    Fill(args, threadIdx.x - 128, kThreads);
    Sync(leads ? kThreads + 32 : kThreads);
  }
  // Called by the scheduler warp that reads it.
  __device__ void Await() const { Sync(kThreads + 32); }

 private:
  static constexpr int kThreads = 128 * Config::kConsumers;
  // The consumers' other barriers have lower numbers (gpu/gemm_sm90.cuh).
  static __device__ void Sync(int threads) { ptx::BarrierSync(2 + Config::kConsumers, threads); }
};

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_SM90_CUH_
