// The exchanges of pieces, each of one latency, small data in packets:
//
//   all_gather      each rank's x to all; y has them side by side
//   all_to_all      piece r of each rank's x to rank r; y has what has come side by side
//   reduce_scatter  piece r of each rank's x to rank r; y is their sum
//
// What is computed (Params), where it lies in the heap, and the CPU back end's body; the CUDA
// launcher is in exchange_cuda.h, and what both run in exchange_body.h. Python:
// jflux/_ops/exchange.py.
#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "core/signal.h"
#include "core/units.h"

namespace jflux {

struct ExchangeParams {
  OpId op;  // kAllGather, kAllToAll or kReduceScatter
  int32_t world;
  DType dtype;  // of what is summed; the others only move bytes
  Pieces x, y;  // of one piece for all of all_gather's x, and reduce_scatter's y
  JFLUX_HD bool Sums() const { return op == OpId::kReduceScatter; }
  JFLUX_HD int64_t Units() const { return CeilDiv(x.Bytes(), kPacketPayload); }

  uint32_t Signature() const {
    SignatureBuilder signature;
    signature.Add(static_cast<int64_t>(op))
        .Add(world)
        .Add(Sums() ? static_cast<int64_t>(dtype) : 0);
    for (const Pieces& pieces : {x, y}) signature.Add(pieces.outer).Add(pieces.inner);
    return signature.Get();
  }
  PacketLayout Channel() const { return PacketLayout::For(world * Units()); }
};

struct ExchangeArrays {
  const void* x;  // 8-byte aligned
  void* y;
};

bool ExchangeCpu(const ExchangeParams& params, const ExchangeArrays& arrays,
                 const SymmetricView& view, uint32_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_H_
