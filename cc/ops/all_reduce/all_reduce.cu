// The kernels of all_reduce: all threads of a grid share what the *_body.h do.
#include "gpu/cluster_team.cuh"
#include "gpu/packet_call.cuh"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/all_reduce_cuda.h"
#include "ops/all_reduce/butterfly_body.h"
#include "ops/all_reduce/norm_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
constexpr int kNormCtas = 8;  // of a cluster, which does a row at a time
// Of a thread, at most.
constexpr int kNormPlaces = static_cast<int>(kMostNormUnits) / (kNormCtas * kThreads);
constexpr int kMostNormBytes = kNormPlaces * kThreads * 40;  // NormBytes() of 16-bit types

struct AllReduceArgs {
  PacketArgs packets;
  AllReduceParams params;
  AllReduceArrays arrays;
};

template <typename Body>
__global__ void __launch_bounds__(kThreads)
    AllReduceKernel(const __grid_constant__ AllReduceArgs args) {
  const PacketTurn turn = BeginPackets(args.packets);
  const Body body{args.params, args.arrays, turn.call};
  const bool ok = body.Run(static_cast<int64_t>(turn.block) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, turn, ok);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AllReduceNormKernel(const __grid_constant__ AllReduceArgs args) {
  __shared__ __align__(16) char memory[kMostNormBytes];
  const PacketTurn turn = BeginPackets<kNormCtas>(args.packets);
  const ClusterTeam<kNormCtas> team;
  const auto scratch = NormScratch<T>::In(memory, kNormPlaces * kThreads);
  const AllReduceNormBody<T, ClusterTeam<kNormCtas>> body{args.params, args.arrays, turn.call, team,
                                                          scratch,     threadIdx.x, blockDim.x};
  const bool ok = body.Run(turn.block, gridDim.x / kNormCtas);
  EndPackets(args.packets, turn, ok);
}

// The kernels of a type.
template <typename T>
const void* KernelOf(AllReduceAlgorithm algorithm, Norm norm) {
  if (norm != Norm::kNone) return reinterpret_cast<const void*>(&AllReduceNormKernel<T>);
  return IsButterfly(algorithm) ? reinterpret_cast<const void*>(&AllReduceKernel<ButterflyBody<T>>)
                                : reinterpret_cast<const void*>(&AllReduceKernel<AllReduceBody<T>>);
}

const void* KernelFor(DType dtype, AllReduceAlgorithm algorithm, Norm norm) {
  return WithNumbers(dtype,
                     [&](auto number) { return KernelOf<decltype(number)>(algorithm, norm); });
}

}  // namespace

bool LoadAllReduceKernels(std::string* error) {
  using Algorithm = AllReduceAlgorithm;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (!LoadKernel(KernelFor(dtype, Algorithm::kOneShot, Norm::kNone), 0, error) ||
        !LoadKernel(KernelFor(dtype, Algorithm::kButterfly, Norm::kNone), 0, error) ||
        !LoadKernel(KernelFor(dtype, Algorithm::kOneShot, Norm::kRms), 0, error)) {
      return false;
    }
  }
  return true;
}

bool LaunchAllReduce(const AllReduceParams& p, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error) {
  int cluster = 1, threads = kThreads;
  int64_t clusters = PacketBlocks(p.Work(), kThreads, device.sm_count);
  if (p.norm != Norm::kNone) {
    cluster = kNormCtas;
    threads = static_cast<int>(
        Min<int64_t>(kThreads, RoundUp<int64_t>(CeilDiv<int64_t>(p.RowUnits(), kNormCtas), 32)));
    clusters = Min<int64_t>(p.Work(), 2 * device.sm_count / kNormCtas);
  }
  AllReduceArgs args{};
  args.packets = PacketArgsFor(p, OpId::kAllReduce, site, clusters, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(KernelFor(p.dtype, p.algorithm, p.norm), &args, static_cast<int>(clusters),
                      cluster, threads, /*smem_bytes=*/0, stream, error);
}

}  // namespace jflux
