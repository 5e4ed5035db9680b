// The CPU back end of all_reduce: one thread runs a rank's part.
#include <vector>

#include "core/wire.h"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/butterfly_body.h"
#include "ops/all_reduce/norm_body.h"
#include "ops/all_reduce/wire_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {
namespace {

struct OneThread {
  int thread() const { return 0; }
  int threads() const { return 1; }
  static constexpr int kLanes = 1;
  template <typename Wide>
  Wide Sum(Wide v) const {
    return v;
  }
  uint32_t Max(uint32_t v) const { return v; }
  uint32_t MaxOfLanes(uint32_t v) const { return v; }
};

template <typename T, bool kQuantizes>
bool RunNorm(const AllReduceParams& p, const AllReduceArrays& arrays, const PacketCall& call) {
  const int64_t units = p.RowUnits();
  std::vector<uint64_t> memory(p.NormBytes(units, arrays.bias != nullptr) / sizeof(uint64_t));
  const auto scratch = NormScratch<T>::In(memory.data(), units);
  using Body = AllReduceNormBody<T, OneThread, kQuantizes>;
  return Body{p, arrays, call, OneThread{}, scratch, 0, 1}.Run(0, 1);
}

template <typename T>
bool Run(const AllReduceParams& p, const AllReduceArrays& arrays, const PacketCall& call) {
  if (p.norm != Norm::kNone) {
    if constexpr (sizeof(T) == 2) {
      if (arrays.quantized.scale != nullptr) return RunNorm<T, true>(p, arrays, call);
    }
    return RunNorm<T, false>(p, arrays, call);
  }
  if (IsButterfly(p.algorithm)) return ButterflyBody<T, 256>{p, arrays, call}.Run(0, 1);
  return AllReduceBody<T>{p, arrays, call}.Run(0, 1);
}

}  // namespace

bool AllReduceCpu(const AllReduceParams& p, const AllReduceArrays& arrays,
                  const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
  if (p.has_wire) {
    const auto run = [&](const shmem::Context& call) {
      return WithFormat<kWireSums>(p.dtype, [&](auto format) {
        return WireBody<Number<format>, OneLane>{p, arrays, call}.Run();
      });
    };
    return shmem::internal::RunCall(view, p.WireChunks().Workspace(), epoch, p.Signature(), ctx,
                                    run);
  }
  if (p.algorithm == AllReduceAlgorithm::kChunked) {
    const auto run = [&](const shmem::Context& call) {
      return WithFormat(
          p.dtype, [&](auto format) { return ChunkedBody<Number<format>>{p, arrays, call}.Run(); });
    };
    return shmem::internal::RunCall(view, p.Chunks().Workspace(), epoch, p.Signature(), ctx, run);
  }
  return RunPackets(p, view, epoch, ctx, [&](const PacketCall& call) {
    return WithFormat(p.dtype, [&](auto format) { return Run<Number<format>>(p, arrays, call); });
  });
}

}  // namespace jflux
