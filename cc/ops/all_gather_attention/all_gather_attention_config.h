// Pure functions for the plan of an all_gather_attention on GPUs.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CONFIG_H_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CONFIG_H_

#include <string>

#include "gpu/senders.h"
#include "ops/all_gather_attention/all_gather_attention.h"
#include "runtime/op.h"

namespace jflux {

// A chunk passes through a send warp's shared memory in four boxes. That many bytes are left beside
// the stages of the widest heads.
inline constexpr int32_t kKeyBoxes = 4, kKeyBoxBytes = 8192;
inline constexpr int32_t kLogKeyChunk = 15;
static_assert(kKeyBoxes * kKeyBoxBytes == 1 << kLogKeyChunk);

inline KeyLayout CudaLayoutOf(const AllGatherAttentionParams& p) {
  return KeyLayout::Make(p, kLogKeyChunk);
}

// The number of CTAs that may send. All CTAs meet blocks of keys at the same pace, so the first
// items of a call need a rank's keys at the rate at which one item meets them. Own keys come first,
// which gives the peers 1 / world of the time as a lead.
inline int32_t KeySenders(const AllGatherAttentionParams& p, const Machine& machine) {
  // Operations of a multiprocessor in a microsecond. Bytes of a send warp in a microsecond, as in
  // SendingCtas.
  constexpr double kOperations = 4.2e6, kOfSender = 3.3e3;
  constexpr double kQueries = 128;  // of an item
  const auto width = static_cast<double>(p.attention.width);
  const double keys = kOperations / (4 * kQueries * width);  // that an item meets in a microsecond
  const double bytes = 2 * static_cast<double>(p.attention.groups) * width * 2;  // of a key
  const double rate = keys * bytes * (p.world - 1) / p.world;
  const double least = CeilDiv(machine.sm_count, 3), most = CeilDiv(2 * machine.sm_count, 3);
  return static_cast<int32_t>(Max(least, Min(most, rate / kOfSender)));
}

// Why no kernel takes the call; empty if one does.
inline std::string WhyNoKernel(const AllGatherAttentionParams& p) {
  const FlashAttentionParams& a = p.attention;
  if (a.dtype != DType::kF16 && a.dtype != DType::kBF16) {
    return "the GPU kernels take float16 and bfloat16";
  }
  if (WidthFor(a.width) == 0) {
    return "the GPU kernels take heads of a multiple of 8 elements, up to 256";
  }
  // Positions of all ranks, and chunks, are counted in 32 bits.
  const double chunks = 2.0 * a.batch * (CudaLayoutOf(p).sequence_bytes >> kLogKeyChunk);
  return p.PaddedKeys() > kFurthest || chunks * p.world > 1 << 29 ? "a dimension is too large" : "";
}

bool PlanAllGatherAttention(const Fields& call, const Machine& machine, Fields* plan,
                            std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_CONFIG_H_
