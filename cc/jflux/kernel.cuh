// How a kernel begins and ends a call. jflux/shmem.h has the functions in between.
//
//   __global__ void Kernel(const __grid_constant__ jflux::shmem::CallArgs args, ...) {
//     const jflux::shmem::Context ctx = jflux::shmem::begin_call(args);
//     const bool ok = ...;  // every wait's result
//     jflux::shmem::end_call(args, ctx, ok);
//   }
//
// The grid is one-dimensional, with as many blocks (CTAs) as jflux_cuda_begin_call was told, on
// every rank. Work by ctx.block, not blockIdx: ctx.block numbers blocks in the order in which they
// start. A block that waits for the block with its number on another rank then waits for one that
// is running or next.
#ifndef JFLUX_KERNEL_CUH_
#define JFLUX_KERNEL_CUH_

#include <cuda_runtime.h>

#include <initializer_list>

#include "../gpu/call.cuh"
#include "call.h"
#include "shmem.h"

namespace jflux::shmem {

// Called first, by all threads of the grid.
__device__ __forceinline__ Context begin_call(const CallArgs& args) {
  const DeviceState state = *args.state;  // loaded while the dynamic id is fetched
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const DynamicId taken = TakeDynamicId(args.view);
  const WaitContext wait = WaitOf(args.state, &header->stop, args.op, args.view.rank, state.hooks);
  if (taken.overlaps) TrapOnOverlap(args.view, wait);
  DelayCall(state, taken.epoch, args.view.rank);
  const Context ctx{args.view,
                    args.layout,
                    taken.epoch,
                    args.signature,
                    wait,
                    static_cast<int32_t>(taken.id),
                    static_cast<int32_t>(gridDim.x)};
  if (ctx.block == 0) internal::SendHellos<Block>(ctx);
  return ctx;
}

// Called last, by all threads of the grid. `ok`: no wait of this thread failed. If one did, the
// kernel traps after the host has printed the reason, and the launch fails.
__device__ __forceinline__ void end_call(const CallArgs& args, const Context& ctx, bool ok) {
  if (ctx.block == 0) ok &= internal::AwaitHellos<Block>(ctx);
  if (!Block::all(ok) && Block::rank() == 0) TrapIfFaulted(args.view, ctx.wait);
  LeaveAfterDynamicId(args.view);
}

#if !defined(__CUDACC_RTC__)
// Loads kernels, as a KernelLoader has to. Lazy loading at the first launch can wait for a kernel
// that spins; so jflux calls loaders when it creates the heap.
inline const char* LoadKernels(int ordinal, std::initializer_list<const void*> kernels) {
  cudaError_t result = cudaSetDevice(ordinal);
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, kernel);
  }
  return result == cudaSuccess ? nullptr : cudaGetErrorString(result);
}
#endif

}  // namespace jflux::shmem

#endif  // JFLUX_KERNEL_CUH_
