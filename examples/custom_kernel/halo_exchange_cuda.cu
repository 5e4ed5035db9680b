// The kernel, and the handler on CUDA GPUs.
#include "halo_exchange_ffi.h"
#include "jflux/kernel.cuh"

namespace shmem = jflux::shmem;

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    HaloExchangeKernel(const __grid_constant__ shmem::CallArgs args,
                       const __grid_constant__ HaloParams p, const char* x, char* y) {
  const shmem::Context ctx = shmem::begin_call(args);
  const bool ok = HaloExchange(ctx, p, x, y);
  shmem::end_call(args, ctx, ok);
}

// For jflux.register_custom_call.
extern "C" const char* HaloExchangeLoadKernels(int ordinal) {
  return shmem::LoadKernels(ordinal, {reinterpret_cast<const void*>(&HaloExchangeKernel)});
}

static ffi::Error Cuda(ffi::Context context, cudaStream_t stream, ffi::Dictionary attrs,
                       ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(attrs, x, *y);
  if (!p.has_value()) return p.error();
  const int blocks = BlocksFor(*p);
  shmem::CallArgs args;
  if (auto error = shmem::BeginCall(context, attrs, blocks, &args); error.failure()) return error;
  HaloExchangeKernel<<<blocks, kThreads, 0, stream>>>(
      args, *p, static_cast<const char*>(x.untyped_data()), static_cast<char*>(y->untyped_data()));
  const cudaError_t launched = cudaGetLastError();
  if (launched != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(launched));
  return ffi::Error::Success();
}

// Declared as fit for CUDA graphs: it only enqueues, and what counts calls is on the device.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HaloExchangeCuda, Cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::Context>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
