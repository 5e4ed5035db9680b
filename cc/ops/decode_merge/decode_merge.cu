// The kernel of decode_merge: all threads of a grid share what decode_merge_body.h does.
#include "gpu/packet_call.cuh"
#include "ops/decode_merge/decode_merge.h"
#include "ops/decode_merge/decode_merge_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;

using DecodeMergeArgs = PacketKernelArgs<DecodeMergeParams, DecodeMergeArrays>;

__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    DecodeMergeKernel(const __grid_constant__ DecodeMergeArgs args) {
  const PacketCta cta = BeginPackets(args.packets);
  const DecodeMergeBody body{args.params, args.arrays, cta.call};
  const bool ok = body.Run(static_cast<int64_t>(cta.cluster_id) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, cta, ok);
}

}  // namespace

bool LoadDecodeMergeKernels(std::string* error) {
  return LoadKernel(reinterpret_cast<const void*>(&DecodeMergeKernel), 0, error);
}

bool LaunchDecodeMerge(const DecodeMergeParams& p, const DecodeMergeArrays& arrays, int64_t site,
                       const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                       std::string* error) {
  const int64_t blocks = PacketCtas(p.Units(), kThreads, device.sm_count);
  DecodeMergeArgs args{};
  args.packets = PacketArgsFor(p, kDecodeMergeId, site, blocks, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(reinterpret_cast<const void*>(&DecodeMergeKernel), &args,
                      static_cast<int>(blocks), /*ctas=*/1, kThreads, /*smem_bytes=*/0, stream,
                      error);
}

}  // namespace jflux
