// decode_merge: attention over the keys of all ranks, from each rank's attention over its own
// (flash decoding), by LL packets.
//
//   x    f32 [rows][width + 1] of each rank: the outputs of a row, then their log-sum-exp l
//   y    [rows][width]: the same over all ranks' keys, the sum of exp(l_r - l) o_r, in rank order
//   l    f32 [rows]
//
// A rank without keys has l = -infinity, and does not count, whatever its outputs are. Where no
// rank has any, y is 0 and l -infinity. It means jflux.merge_attention of what an all-gather
// brings.
//
//   to all     each rank sends its rows to all ranks, which all merge them: one latency
//   by owner   each rank sends them to the row's owner, which sends y to all: two latencies, and
//              for N ranks 1 / (N - 1) of the float32 numbers
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
inline constexpr OpFormats kDecodeMergeFormats{SetOf(DType::kF32), kHalves | SetOf(DType::kF32)};

struct DecodeMergeParams {
  int32_t world;
  int64_t rows, width;
  bool by_owner = false;
  DType dtype = DType::kF32;  // of y

  // A thread's share of a row: so many outputs, of columns that are Quads() apart, so that threads
  // side by side load and send what lies side by side. A packet holds two of them, in float32.
  static constexpr int kOutputs = 4;
  JFLUX_HD int64_t Quads() const { return CeilDiv<int64_t>(width, kOutputs); }
  JFLUX_HD int64_t ColumnOf(int64_t quad, int i) const { return i * Quads() + quad; }
  JFLUX_HD int64_t Units() const { return rows * Quads(); }
  JFLUX_HD int Owner(int64_t row) const { return static_cast<int>(Remainder(row, world)); }

  // Packets of a row of rank `src`: the log-sum-exp, then the first of each quad, then the second.
  JFLUX_HD int64_t PacketOf(int src, int64_t row) const {
    const int64_t own_rows = by_owner ? CeilDiv<int64_t>(rows, world) : rows;
    const int64_t place = src * own_rows + (by_owner ? Quotient(row, world) : row);
    return place * (1 + 2 * Quads());
  }
  // Packets of a row of y: the log-sum-exp, then those of each quad in the same order.
  JFLUX_HD int64_t ResultOf(int64_t row) const {
    return PacketOf(world, 0) + row * (1 + Quads() * QuadPackets());
  }
  JFLUX_HD int QuadPackets() const { return dtype == DType::kF32 ? 2 : 1; }
  PacketLayout Workspace() const {
    return PacketLayout::For(by_owner ? ResultOf(rows) : PacketOf(world, 0));
  }

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kDecodeMergeId))
        .Add(world)
        .Add(rows)
        .Add(width)
        .Add(by_owner)
        .Add(static_cast<int64_t>(dtype))
        .Get();
  }
};

struct DecodeMergeArrays {
  const float* x;
  void* y;
  float* l;
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
