// The CPU back end of decode_merge: one thread runs a rank's part.
#include "ops/decode_merge/decode_merge_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {

bool DecodeMergeCpu(const DecodeMergeParams& p, const DecodeMergeArrays& arrays,
                    const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
  return RunPackets(p, view, epoch, ctx, [&](const PacketCall& call) {
    return DecodeMergeBody{p, arrays, call}.Run(0, 1);
  });
}

}  // namespace jflux
