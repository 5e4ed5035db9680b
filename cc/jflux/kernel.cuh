// How a kernel begins and ends a call. See jflux/shmem.h for what it does in between.
//
//   __global__ void Kernel(const __grid_constant__ jflux::shmem::CallArgs args, ...) {
//     const jflux::shmem::Context ctx = jflux::shmem::begin_call(args);
//     const bool ok = ...;  // every wait's result
//     jflux::shmem::end_call(args, ctx, ok);
//   }
//
// The grid has one dimension, and as many blocks as jflux_cuda_begin_call was told, on every rank.
// Blocks go by ctx.block and not by blockIdx: not all of them may run at once, and a block that
// waits for the one with its number on another rank then waits for one that runs, or is next to.
#ifndef JFLUX_KERNEL_CUH_
#define JFLUX_KERNEL_CUH_

#include <cuda_runtime.h>

#include <initializer_list>

#include "../gpu/call.cuh"
#include "call.h"
#include "shmem.h"

namespace jflux::shmem {

// All threads of the grid, first.
__device__ __forceinline__ Context begin_call(const CallArgs& args) {
  const DeviceState state = *args.state;  // on its way together with the turn
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const Turn turn = TakeTurn(header);
  const WaitContext wait{state.fault, &header->stop,  0,
                         args.op,     args.view.rank, state.hooks.skip_waits != 0};
  DelayCall(state, turn.epoch, args.view.rank);
  const Context ctx{args.view,
                    args.layout,
                    turn.epoch,
                    args.signature,
                    wait,
                    /*timeout_ns=*/state.deadline_ns,
                    static_cast<int32_t>(turn.place),
                    static_cast<int32_t>(gridDim.x)};
  if (ctx.block == 0) internal::Greet<Block>(ctx);
  return ctx;
}

// All threads of the grid, last; `ok`: no wait of this thread failed. If one did, the kernel traps
// once its reason has been printed, and the launch fails.
__device__ __forceinline__ void end_call(const CallArgs& args, const Context& ctx, bool ok) {
  if (ctx.block == 0) ok &= internal::AwaitGreetings<Block>(ctx);
  if (!Block::all(ok) && Block::rank() == 0) EndOfWaits(args);
}

// A KernelLoader's work. A kernel that is loaded when it is first launched could wait for one that
// spins; so jflux has loaders called when it makes the heap.
inline const char* LoadKernels(int ordinal, std::initializer_list<const void*> kernels) {
  cudaError_t result = cudaSetDevice(ordinal);
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, kernel);
  }
  return result == cudaSuccess ? nullptr : cudaGetErrorString(result);
}

}  // namespace jflux::shmem

#endif  // JFLUX_KERNEL_CUH_
