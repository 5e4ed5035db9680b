// The CPU back end of moe_dispatch and moe_combine: one thread runs a rank's part.
#include <vector>

#include "ops/moe_dispatch/moe_combine_body.h"
#include "ops/moe_dispatch/moe_dispatch_body.h"

namespace jflux {

bool MoeDispatchCpu(const MoeDispatchParams& p, const MoeDispatchArrays& arrays,
                    const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
  std::vector<int32_t> scratch(CeilDiv<int64_t>(p.ScratchBytes(), 4));
  return shmem::internal::RunCall(view, p.Workspace(), epoch, p.Signature(), ctx,
                                  [&](const shmem::Context& call) {
                                    return MoeDispatchBody{p, arrays, call, scratch.data()}.Run();
                                  });
}

bool MoeCombineCpu(const MoeCombineParams& p, const MoeCombineArrays& arrays,
                   const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
  std::vector<int32_t> scratch(CeilDiv<int64_t>(p.ScratchBytes(), 4));
  return shmem::internal::RunCall(
      view, p.Workspace(), epoch, p.Signature(), ctx, [&](const shmem::Context& call) {
        return WithFormat<kMoeCombineFormats.operands>(p.dtype, [&](auto format) {
          using Numbers = VectorNumbers<Number<format>>;
          if (p.wire_blocks != 0) {
            return MoeCombineBody<Numbers, OneLane>{p, arrays, call, scratch.data()}.Run();
          }
          return MoeCombineBody<Numbers>{p, arrays, call, scratch.data()}.Run();
        });
      });
}

}  // namespace jflux
