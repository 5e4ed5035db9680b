// The kernels of all_reduce: all threads of a grid share what the *_body.h do.
#include "gpu/block_team.cuh"
#include "gpu/packet_call.cuh"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/all_reduce_cuda.h"
#include "ops/all_reduce/butterfly_body.h"
#include "ops/all_reduce/norm_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
constexpr int kMostNormThreads = 1024;

struct AllReduceArgs {
  PacketArgs packets;
  AllReduceParams params;
  AllReduceArrays arrays;
};

template <template <typename> class Body, typename T>
__global__ void __launch_bounds__(kThreads)
    AllReduceKernel(const __grid_constant__ AllReduceArgs args) {
  const PacketTurn turn = BeginPackets(args.packets);
  const Body<T> body{args.params, args.arrays, turn.call};
  const bool ok = body.Run(static_cast<int64_t>(turn.block) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, turn, ok);
}

template <typename T>
__global__ void __launch_bounds__(kMostNormThreads)
    AllReduceNormKernel(const __grid_constant__ AllReduceArgs args) {
  extern __shared__ __align__(16) char memory[];
  const PacketTurn turn = BeginPackets(args.packets);
  const auto scratch = NormScratch<T>::In(memory, args.params.RowUnits());
  const BlockTeam team;
  const AllReduceNormBody<T, BlockTeam> body{args.params, args.arrays, turn.call, team, scratch};
  EndPackets(args.packets, turn, body.Run(turn.block, gridDim.x));
}

// Which kernel a call takes, and how it is launched.
struct Plan {
  const void* kernel;
  int threads, smem_bytes;
  int64_t blocks;
};

template <typename T>
Plan PlanFor(const AllReduceParams& p, int sm_count) {
  if (p.norm != Norm::kNone) {
    const auto threads =
        static_cast<int>(Min<int64_t>(kMostNormThreads, RoundUp<int64_t>(p.RowUnits(), 32)));
    return Plan{reinterpret_cast<const void*>(&AllReduceNormKernel<T>), threads,
                static_cast<int>(NormScratch<T>::Bytes(p.RowUnits())),
                Min<int64_t>(p.Work(), sm_count)};
  }
  const void* kernel = IsButterfly(p.algorithm)
                           ? reinterpret_cast<const void*>(&AllReduceKernel<ButterflyBody, T>)
                           : reinterpret_cast<const void*>(&AllReduceKernel<AllReduceBody, T>);
  return Plan{kernel, kThreads, 0,
              Min<int64_t>(CeilDiv<int64_t>(p.Work(), kThreads), 2 * sm_count)};
}

}  // namespace

bool LoadAllReduceKernels(std::string* error) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const bool loaded = WithNumbers(dtype, [&](auto number) {
      using T = decltype(number);
      return LoadKernel(reinterpret_cast<const void*>(&AllReduceKernel<AllReduceBody, T>), 0,
                        error) &&
             LoadKernel(reinterpret_cast<const void*>(&AllReduceKernel<ButterflyBody, T>), 0,
                        error) &&
             LoadKernel(reinterpret_cast<const void*>(&AllReduceNormKernel<T>), kMostNormBytes,
                        error);
    });
    if (!loaded) return false;
  }
  return true;
}

bool LaunchAllReduce(const AllReduceParams& p, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error) {
  const Plan plan = WithNumbers(
      p.dtype, [&](auto number) { return PlanFor<decltype(number)>(p, device.sm_count); });
  AllReduceArgs args{};
  args.packets = PacketArgsFor(p, OpId::kAllReduce, site, plan.blocks, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(plan.kernel, &args, static_cast<int>(plan.blocks), /*cluster_m=*/1,
                      plan.threads, plan.smem_bytes, stream, error);
}

}  // namespace jflux
