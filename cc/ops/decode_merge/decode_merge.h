// decode_merge: attention over the keys of all ranks, from each rank's attention over its own
// (flash decoding), in one latency: LL packets.
//
//   x    f32 [rows][width + 1] of each rank: the outputs of a row, then its log-sum-exp l
//   y    the same over all ranks' keys: sum over ranks of exp(l_r - l) o_r, in rank order
//
// A rank without keys has l = -infinity, and does not count, whatever its outputs are. Where no
// rank has any, y is 0 and -infinity. It means jflux.merge_attention of what an all-gather brings.
//
// The call (Params), the CPU back end's body, and the CUDA launcher. The body that CPU and GPU
// share: decode_merge_body.h. Python: jflux/_ops/attention/decode_merge.py.
#ifndef JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_H_
#define JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/packet.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kDecodeMergeId{15};
inline constexpr OpFormats kDecodeMergeFormats{SetOf(DType::kF32)};

struct DecodeMergeParams {
  int32_t world;
  int64_t rows, width;

  // A thread's share of a row: two outputs, which a packet holds.
  JFLUX_HD int64_t Pairs() const { return CeilDiv<int64_t>(width, 2); }
  JFLUX_HD int64_t Units() const { return rows * Pairs(); }
  // Packets of a row of rank `src`: the log-sum-exp, then the pairs.
  JFLUX_HD int64_t PacketOf(int src, int64_t row) const {
    return (src * rows + row) * (Pairs() + 1);
  }
  PacketLayout Workspace() const { return PacketLayout::For(PacketOf(world, 0)); }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kDecodeMergeId))
        .Add(world)
        .Add(rows)
        .Add(width)
        .Get();
  }
};

struct DecodeMergeArrays {
  const float* x;
  float* y;
};

bool DecodeMergeCpu(const DecodeMergeParams& params, const DecodeMergeArrays& arrays,
                    const SymmetricView& view, uint64_t epoch, const WaitContext& ctx);

// Enqueues the call on `stream`.
bool LaunchDecodeMerge(const DecodeMergeParams& params, const DecodeMergeArrays& arrays,
                       int64_t site, const CudaDevice& device, const SymmetricView& view,
                       cudaStream_t stream, std::string* error);

// Loads the kernel on the current device.
bool LoadDecodeMergeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_H_
