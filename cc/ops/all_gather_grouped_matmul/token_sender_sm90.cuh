// What the send warp of all_gather_grouped_matmul's kernel copies: this rank's tokens, in their
// order. The protocol is that of gpu/copy_sender.cuh.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_

#include "gpu/copy_sender.cuh"
#include "gpu/gemm_smem.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_args.cuh"

namespace jflux {

template <typename Config>
struct TokenCopies {
  using Args = AllGatherGroupedMatmulArgs;
  using Smem = GemmSmem<Config>;
  static constexpr int32_t kBoxBytes = kTokenBoxBytes;

  // Boxes are smaller than what the main loop sets aside for them, and lie close together.
  static __device__ uint32_t BoxAt(const Smem& smem, int i) {
    return smem.SendBox(0) + i * kBoxBytes;
  }
  static __device__ int32_t ChunksOf(const Args& args) { return args.layout.chunks; }
  static __device__ CopiedChunk ChunkOf(const Args& args, int32_t peer, int32_t chunk) {
    return CopiedChunk{peer, chunk, static_cast<int32_t>(args.layout.ChunkSize(chunk)),
                       args.x_data + chunk * args.layout.chunk_bytes,
                       args.layout.ChunkOffset(args.view.rank, chunk)};
  }
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int32_t peer,
                                     int32_t chunk) {
    return ChunkSignal(args, call, peer, args.view.rank, chunk);
  }
};

template <typename Config>
using TokenSender = CopySender<TokenCopies<Config>>;

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_
