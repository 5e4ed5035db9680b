// The kernel of the exchanges: all threads of a grid share what exchange_body.h does.
#include "gpu/packet_call.cuh"
#include "ops/exchange/exchange_body.h"
#include "ops/exchange/exchange_cuda.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;

struct ExchangeArgs {
  PacketArgs packets;
  ExchangeParams params;
  ExchangeArrays arrays;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ExchangeKernel(const __grid_constant__ ExchangeArgs args) {
  const PacketTurn turn = BeginPackets(args.packets);
  const ExchangeBody<T> body{args.params, args.arrays, turn.call};
  const bool ok = body.Run(static_cast<int64_t>(turn.block) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, turn, ok);
}

const void* KernelOf(DType dtype) {
  return WithNumbers(dtype, [](auto number) {
    return reinterpret_cast<const void*>(&ExchangeKernel<decltype(number)>);
  });
}

}  // namespace

bool LoadExchangeKernels(std::string* error) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (!LoadKernel(KernelOf(dtype), 0, error)) return false;
  }
  return true;
}

bool LaunchExchange(const ExchangeParams& p, const ExchangeArrays& arrays, int64_t site,
                    const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                    std::string* error) {
  const int64_t blocks = PacketBlocks(p.Units(), kThreads, device.sm_count);
  ExchangeArgs args{};
  args.packets = PacketArgsFor(p, p.op, site, blocks, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(KernelOf(p.dtype), &args, static_cast<int>(blocks), /*ctas=*/1, kThreads,
                      /*smem_bytes=*/0, stream, error);
}

}  // namespace jflux
