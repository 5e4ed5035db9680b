// The kernels of the exchanges: all threads of a grid share what the *_body.h do.
#include "gpu/packet_call.cuh"
#include "jflux/kernel.cuh"
#include "ops/exchange/exchange.h"
#include "ops/exchange/exchange_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 2;  // of chunks

using ExchangeArgs = PacketKernelArgs<ExchangeParams, ExchangeArrays>;
using ChunkedArgs = ChunkKernelArgs<ExchangeParams, ExchangeArrays>;

template <typename T>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    ExchangeKernel(const __grid_constant__ ExchangeArgs args) {
  const PacketCta cta = BeginPackets(args.packets);
  const ExchangeBody<T> body{args.params, args.arrays, cta.call};
  const bool ok = body.Run(static_cast<int64_t>(cta.cluster_id) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, cta, ok);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    ExchangeChunkedKernel(const __grid_constant__ ChunkedArgs args) {
  const shmem::Context ctx = shmem::begin_call(args.call);
  const bool ok = ChunkedExchangeBody<T>{args.params, args.arrays, ctx}.Run();
  shmem::end_call(args.call, ctx, ok);
}

const void* KernelOf(DType dtype, bool chunked) {
  return WithFormat(dtype, [&](auto format) {
    using T = Number<format>;
    return chunked ? reinterpret_cast<const void*>(&ExchangeChunkedKernel<T>)
                   : reinterpret_cast<const void*>(&ExchangeKernel<T>);
  });
}

bool LaunchChunked(const ExchangeParams& p, const ExchangeArrays& arrays, int64_t site,
                   const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                   std::string* error) {
  const ShardSlots slots = p.Slots();
  const int64_t blocks = Min<int64_t>(slots.Chunks(), kCtasPerSm * device.sm_count);
  ChunkedArgs args = ChunkArgsFor(p, arrays, p.op, site, blocks, slots.Workspace(), device, view);
  return LaunchKernel(KernelOf(p.dtype, true), &args, static_cast<int>(blocks), /*ctas=*/1,
                      kThreads, /*smem_bytes=*/0, stream, error);
}

}  // namespace

bool LoadExchangeKernels(std::string* error) {
  return ForFormats(kExchangeFormats.operands, [&](DType dtype) {
    return LoadKernel(KernelOf(dtype, false), 0, error) &&
           LoadKernel(KernelOf(dtype, true), 0, error);
  });
}

bool LaunchExchange(const ExchangeParams& p, const ExchangeArrays& arrays, int64_t site,
                    const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                    std::string* error) {
  if (p.chunked) return LaunchChunked(p, arrays, site, device, view, stream, error);
  const int64_t blocks = PacketCtas(p.Units(), kThreads, device.sm_count);
  ExchangeArgs args{};
  args.packets = PacketArgsFor(p, p.op, site, blocks, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(KernelOf(p.dtype, false), &args, static_cast<int>(blocks), /*ctas=*/1,
                      kThreads, /*smem_bytes=*/0, stream, error);
}

}  // namespace jflux
