// The kernels of all_reduce: all threads of a grid share what the *_body.h do.
#include <type_traits>

#include "gpu/cluster.cuh"
#include "gpu/cluster_team.cuh"
#include "gpu/packet_call.cuh"
#include "gpu/wire.cuh"
#include "jflux/kernel.cuh"
#include "ops/all_reduce/all_reduce.h"
#include "ops/all_reduce/all_reduce_body.h"
#include "ops/all_reduce/butterfly_body.h"
#include "ops/all_reduce/norm_body.h"
#include "ops/all_reduce/wire_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
// CTAs of a cluster, which does a row at a time: many for few rows, so that a row's packets do not
// wait for one SM.
constexpr int kFewRowsCtas = 8, kManyRowsCtas = 2;
constexpr int kMostNormBytes = 40 * kMostNormUnits / kManyRowsCtas;  // NormBytes() at the most

using AllReduceArgs = PacketKernelArgs<AllReduceParams, AllReduceArrays>;
using ChunkedArgs = ChunkKernelArgs<AllReduceParams, AllReduceArrays>;

template <typename Body>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    AllReduceKernel(const __grid_constant__ AllReduceArgs args) {
  const PacketCta cta = BeginPackets(args.packets);
  const Body body{args.params, args.arrays, cta.call};
  const bool ok = body.Run(static_cast<int64_t>(cta.cluster_id) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, cta, ok);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    AllReduceChunkedKernel(const __grid_constant__ ChunkedArgs args) {
  const shmem::Context ctx = shmem::begin_call(args.call);
  const bool ok = ChunkedBody<T>{args.params, args.arrays, ctx}.Run();
  shmem::end_call(args.call, ctx, ok);
}

template <typename T, DType kValues>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    AllReduceWireKernel(const __grid_constant__ ChunkedArgs args) {
  const shmem::Context ctx = shmem::begin_call(args.call);
  const bool ok = WireBody<T, quantize::EightLanes<kValues>>{args.params, args.arrays, ctx}.Run();
  shmem::end_call(args.call, ctx, ok);
}

// Places for a CTA's units of a row.
__host__ __device__ inline int64_t NormPlaces(const AllReduceParams& p, int ctas, int threads) {
  return CeilDiv<int64_t>(p.RowUnits(), ctas * threads) * threads;
}

template <typename T, int kCtas, bool kQuantizes>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    AllReduceNormKernel(const __grid_constant__ AllReduceArgs args) {
#if JFLUX_HAS_CLUSTERS  // else the plan has no norm in the kernel
  JFLUX_DYNAMIC_SHARED(char, 16, memory);
  const PacketCta cta = BeginPackets<kCtas>(args.packets);
  const ClusterTeam<kCtas> team;
  const auto threads = static_cast<int>(blockDim.x);
  const auto scratch = NormScratch<T>::In(memory, NormPlaces(args.params, kCtas, threads));
  const AllReduceNormBody<T, ClusterTeam<kCtas>, kQuantizes> body{
      args.params, args.arrays, cta.call, team, scratch, threadIdx.x, threads};
  const bool ok = body.Run(cta.cluster_id, gridDim.x / kCtas);
  EndPackets<kCtas>(args.packets, cta, ok);
#endif
}

// A type's kernels. `wire`: of e4m3, and of int8. `few` and `many` rows: by large and by small
// clusters; [1] quantises too. `wire` and [1] are null for types that they do not take.
struct Kernels {
  const void *direct, *butterfly, *chunked, *wire[2], *few[2], *many[2];
};

template <typename T, int kCtas>
void FindNormKernels(const void* (&kernels)[2]) {
  kernels[0] = reinterpret_cast<const void*>(&AllReduceNormKernel<T, kCtas, false>);
  if constexpr (sizeof(T) == 2) {
    kernels[1] = reinterpret_cast<const void*>(&AllReduceNormKernel<T, kCtas, true>);
  }
}

Kernels KernelsOf(DType dtype) {
  return WithFormat(dtype, [](auto format) {
    using T = Number<format>;
    Kernels kernels{reinterpret_cast<const void*>(&AllReduceKernel<AllReduceBody<T>>),
                    reinterpret_cast<const void*>(&AllReduceKernel<ButterflyBody<T, 1>>),
                    reinterpret_cast<const void*>(&AllReduceChunkedKernel<T>)};
    if constexpr (Has(kWireSums, decltype(format)::value)) {
      kernels.wire[0] = reinterpret_cast<const void*>(&AllReduceWireKernel<T, DType::kF8E4M3FN>);
      kernels.wire[1] = reinterpret_cast<const void*>(&AllReduceWireKernel<T, DType::kS8>);
    }
    FindNormKernels<T, kFewRowsCtas>(kernels.few);
    FindNormKernels<T, kManyRowsCtas>(kernels.many);
    return kernels;
  });
}

// How a call is launched.
struct Plan {
  const void* kernel;
  int64_t clusters;
  int cluster, threads, smem_bytes;
};

Plan PlanFor(const AllReduceParams& p, const AllReduceArrays& arrays, int sm_count) {
  const Kernels kernels = KernelsOf(p.dtype);
  if (p.norm == Norm::kNone) {
    return Plan{IsButterfly(p.algorithm) ? kernels.butterfly : kernels.direct,
                PacketCtas(p.Work(), kThreads, sm_count), 1, kThreads, 0};
  }
  const bool few = p.Work() * kFewRowsCtas <= kPacketCtasPerSm * sm_count;
  const bool bias = arrays.bias != nullptr, quantizes = arrays.quantized.scale != nullptr;
  const int ctas = few ? kFewRowsCtas : kManyRowsCtas;
  const auto threads = static_cast<int>(
      Min<int64_t>(kThreads, RoundUp<int64_t>(CeilDiv<int64_t>(p.RowUnits(), ctas), 32)));
  return Plan{(few ? kernels.few : kernels.many)[quantizes],
              Min<int64_t>(p.Work(), kPacketCtasPerSm * sm_count / ctas), ctas, threads,
              static_cast<int>(p.NormBytes(NormPlaces(p, ctas, threads), bias))};
}

bool LaunchChunked(const AllReduceParams& p, const AllReduceArrays& arrays, int64_t site,
                   const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                   std::string* error) {
  const int64_t chunks = p.has_wire ? p.WireChunks().chunks : p.Chunks().Chunks();
  const WorkspaceLayout workspace =
      p.has_wire ? p.WireChunks().Workspace() : p.Chunks().Workspace();
  const int64_t blocks = Min<int64_t>(chunks, kPacketCtasPerSm * device.sm_count);
  ChunkedArgs args = ChunkArgsFor(p, arrays, kAllReduceId, site, blocks, workspace, device, view);
  const Kernels kernels = KernelsOf(p.dtype);
  const void* kernel = p.has_wire ? kernels.wire[p.wire == DType::kS8] : kernels.chunked;
  return LaunchKernel(kernel, &args, static_cast<int>(blocks),
                      /*cluster=*/1, kThreads, 0, stream, error);
}

// Those that are there.
bool LoadPair(const void* const (&kernels)[2], int smem_bytes, std::string* error) {
  return (kernels[0] == nullptr || LoadKernel(kernels[0], smem_bytes, error)) &&
         (kernels[1] == nullptr || LoadKernel(kernels[1], smem_bytes, error));
}

}  // namespace

bool LoadAllReduceKernels(std::string* error) {
  return ForFormats(kAllReduceFormats.operands, [&](DType dtype) {
    const Kernels kernels = KernelsOf(dtype);
    return LoadKernel(kernels.direct, 0, error) && LoadKernel(kernels.butterfly, 0, error) &&
           LoadKernel(kernels.chunked, 0, error) && LoadPair(kernels.wire, 0, error) &&
           LoadPair(kernels.few, kMostNormBytes, error) &&
           LoadPair(kernels.many, kMostNormBytes, error);
  });
}

bool LaunchAllReduce(const AllReduceParams& p, const AllReduceArrays& arrays, int64_t site,
                     const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                     std::string* error) {
  if (p.algorithm == AllReduceAlgorithm::kChunked) {
    return LaunchChunked(p, arrays, site, device, view, stream, error);
  }
  const Plan plan = PlanFor(p, arrays, device.sm_count);
  AllReduceArgs args{};
  args.packets = PacketArgsFor(p, kAllReduceId, site, plan.clusters, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(plan.kernel, &args, static_cast<int>(plan.clusters), plan.cluster,
                      plan.threads, plan.smem_bytes, stream, error);
}

}  // namespace jflux
