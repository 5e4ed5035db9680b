// The kernel, and the handler on CUDA GPUs.
#include "every_primitive.h"
#include "jflux/kernel.cuh"

namespace ffi = xla::ffi;
namespace shmem = jflux::shmem;

// Each block has two shards of a level: for two threads of a warp, for two warps of three, and two
// for itself.
constexpr int kBlocks = 2, kThreads = 96;

__global__ void __launch_bounds__(kThreads)
    EveryPrimitiveKernel(const __grid_constant__ shmem::CallArgs args, int64_t count,
                         const int32_t* x, int32_t* y) {
  const shmem::Context ctx = shmem::begin_call(args);
  const bool ok = every_primitive::EveryPrimitive(ctx, count, x, y);
  shmem::end_call(args, ctx, ok);
}

extern "C" const char* EveryPrimitiveLoadKernels(int ordinal) {
  return shmem::LoadKernels(ordinal, {reinterpret_cast<const void*>(&EveryPrimitiveKernel)});
}

static ffi::Error Cuda(ffi::Context context, cudaStream_t stream, ffi::Dictionary attrs,
                       ffi::Buffer<ffi::S32> x, ffi::Result<ffi::Buffer<ffi::S32>> y) {
  const auto count = every_primitive::CountOf(x, *y);
  if (!count.has_value()) return count.error();
  shmem::CallArgs args;
  if (auto error = shmem::BeginCall(context, attrs, kBlocks, &args); error.failure()) return error;
  EveryPrimitiveKernel<<<kBlocks, kThreads, 0, stream>>>(args, *count, x.typed_data(),
                                                         y->typed_data());
  const cudaError_t launched = cudaGetLastError();
  if (launched != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(launched));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(EveryPrimitiveCuda, Cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::Context>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attrs()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
