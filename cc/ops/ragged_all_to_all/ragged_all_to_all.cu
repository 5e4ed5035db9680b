// The kernels of ragged_all_to_all: all threads of a grid share what the *_body.h do.
#include "gpu/packet_call.cuh"
#include "jflux/kernel.cuh"
#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "ops/ragged_all_to_all/ragged_chunked_body.h"
#include "ops/ragged_all_to_all/ragged_packets_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 2;  // of chunks

using PacketsArgs = PacketKernelArgs<RaggedParams, RaggedArrays>;
using ChunkedArgs = ChunkKernelArgs<RaggedParams, RaggedArrays>;

// kTables: p.HasTables(). Kernels without them are smaller, and begin up to a microsecond earlier.
template <bool kTables>
__global__ void __launch_bounds__(kThreads, kPacketCtasPerSm)
    RaggedPacketsKernel(const __grid_constant__ PacketsArgs args) {
  JFLUX_DYNAMIC_SHARED(uint32_t, 16, memory);
  const PacketCta cta = BeginPackets(args.packets);
  const RaggedPacketsBody body{
      args.params, args.arrays, cta.call,
      RaggedTables::In(kTables ? memory : nullptr, args.params, args.arrays)};
  const bool ok = body.Run(static_cast<int64_t>(cta.cluster_id) * kThreads + threadIdx.x,
                           static_cast<int64_t>(gridDim.x) * kThreads);
  EndPackets(args.packets, cta, ok);
}

template <bool kTables>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    RaggedChunkedKernel(const __grid_constant__ ChunkedArgs args) {
  JFLUX_DYNAMIC_SHARED(uint32_t, 16, memory);
  const shmem::Context ctx = shmem::begin_call(args.call);
  const RaggedChunkedBody body{
      args.params, args.arrays, ctx,
      RaggedTables::In(kTables ? memory : nullptr, args.params, args.arrays)};
  const bool ok = body.Run();
  shmem::end_call(args.call, ctx, ok);
}

// Dynamic shared memory.
int TableBytes(const RaggedParams& p) {
  return static_cast<int>(p.TableWords(kThreads) * sizeof(uint32_t));
}
constexpr int kMostTableBytes = (2 * (RaggedParams::kMostEntries + 1) + kThreads) * 4;
static_assert(kMostTableBytes <= 48 << 10);

template <bool kTables>
const void* KernelOf(bool chunked) {
  return chunked ? reinterpret_cast<const void*>(&RaggedChunkedKernel<kTables>)
                 : reinterpret_cast<const void*>(&RaggedPacketsKernel<kTables>);
}
const void* KernelOf(const RaggedParams& p) {
  return p.HasTables() ? KernelOf<true>(p.chunked) : KernelOf<false>(p.chunked);
}

bool LaunchChunked(const RaggedParams& p, const RaggedArrays& arrays, int64_t site,
                   const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                   std::string* error) {
  const int64_t blocks = Min<int64_t>(p.MostChunks(), kCtasPerSm * device.sm_count);
  ChunkedArgs args =
      ChunkArgsFor(p, arrays, kRaggedAllToAllId, site, blocks, p.ChunkedWorkspace(), device, view);
  return LaunchKernel(KernelOf(p), &args, static_cast<int>(blocks), /*ctas=*/1, kThreads,
                      TableBytes(p), stream, error);
}

}  // namespace

bool LoadRaggedAllToAllKernels(std::string* error) {
  for (bool chunked : {false, true}) {
    if (!LoadKernel(KernelOf<true>(chunked), kMostTableBytes, error)) return false;
    if (!LoadKernel(KernelOf<false>(chunked), 0, error)) return false;
  }
  return true;
}

bool LaunchRaggedAllToAll(const RaggedParams& p, const RaggedArrays& arrays, int64_t site,
                          const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                          std::string* error) {
  if (p.chunked) return LaunchChunked(p, arrays, site, device, view, stream, error);
  // Enough CTAs for the most units that may arrive.
  const int64_t blocks = PacketCtas(p.ImageRows() * p.RowUnits(), kThreads, device.sm_count);
  PacketsArgs args{};
  args.packets = PacketArgsFor(p, kRaggedAllToAllId, site, blocks, device, view);
  args.params = p;
  args.arrays = arrays;
  return LaunchKernel(KernelOf(p), &args, static_cast<int>(blocks), /*ctas=*/1, kThreads,
                      TableBytes(p), stream, error);
}

}  // namespace jflux
