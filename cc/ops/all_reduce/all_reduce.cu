// The kernel of all_reduce: all threads of a grid share what all_reduce_body.h does.
#include "gpu/packet_call.cuh"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/all_reduce_cuda.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;

struct AllReduceArgs {
  PacketArgs packets;
  AllReduceParams params;
  AllReduceArrays arrays;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AllReduceKernel(const __grid_constant__ AllReduceArgs args) {
  const PacketTurn turn = BeginPackets(args.packets);
  const AllReduceBody<T> body{args.params, args.arrays, turn.call};
  const bool ok = body.Run(static_cast<int64_t>(turn.block) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, turn, ok);
}

const void* KernelOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return reinterpret_cast<const void*>(&AllReduceKernel<F16>);
    case DType::kBF16:
      return reinterpret_cast<const void*>(&AllReduceKernel<BF16>);
    case DType::kF32:
      return reinterpret_cast<const void*>(&AllReduceKernel<float>);
    case DType::kF64:
      return reinterpret_cast<const void*>(&AllReduceKernel<double>);
  }
  return nullptr;
}

}  // namespace

bool LoadAllReduceKernels(std::string* error) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (!LoadKernel(KernelOf(dtype), 0, error)) return false;
  }
  return true;
}

bool LaunchAllReduce(const AllReduceParams& p, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error) {
  AllReduceArgs args{};
  args.packets.state = reinterpret_cast<DeviceState*>(device.heap);
  args.packets.view = view;
  args.packets.layout = p.Channel();
  const int64_t blocks = Min<int64_t>(CeilDiv<int64_t>(p.Work(), kThreads), 2 * device.sm_count);
  // The order of places (BeginPackets) only helps where all ranks have as many.
  args.packets.signature = SignatureBuilder().Add(p.Signature()).Add(site).Add(blocks).Get();
  args.packets.op = static_cast<uint32_t>(OpId::kAllReduce);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(KernelOf(p.dtype), &args, static_cast<int>(blocks), /*cluster_m=*/1, kThreads,
                      /*smem_bytes=*/0, stream, error);
}

}  // namespace jflux
