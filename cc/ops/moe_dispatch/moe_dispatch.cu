// The kernels of moe_dispatch and moe_combine: warps share the items as the *_body.h say.
#include <cuda_fp16.h>

#include "gpu/wire.cuh"
#include "jflux/kernel.cuh"
#include "ops/moe_dispatch/moe_combine_body.h"
#include "ops/moe_dispatch/moe_dispatch.h"
#include "ops/moe_dispatch/moe_dispatch_body.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

struct DispatchArgs {
  shmem::CallArgs call;
  MoeDispatchParams params;
  MoeDispatchArrays arrays;
};

__global__ void __launch_bounds__(32 * kMoeDispatchWarps, kMoeDispatchCtasPerSm)
    MoeDispatchKernel(const __grid_constant__ DispatchArgs args) {
  JFLUX_DYNAMIC_SHARED(int32_t, 4, smem);
  const shmem::Context ctx = shmem::begin_call(args.call);
  const bool ok = MoeDispatchBody{args.params, args.arrays, ctx, smem}.Run();
  shmem::end_call(args.call, ctx, ok);
}

// The same as VectorNumbers, by the GPU's own conversions. The conversions of core/numbers.h take
// far more instructions for float16.
struct HalfNumbers {
  using Vector = shmem::internal::Vector;
  static constexpr int kSize = 8;

  static __device__ void Unpack(const Vector& vector, float (&numbers)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const auto bits = static_cast<uint16_t>(vector.word[i / 2] >> (16 * (i % 2)));
      numbers[i] = __half2float(__ushort_as_half(bits));
    }
  }
  static __device__ Vector Pack(const float (&numbers)[kSize]) {
    Vector vector{};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const uint32_t bits = __half_as_ushort(__float2half_rn(numbers[i]));
      vector.word[i / 2] |= bits << (16 * (i % 2));
    }
    return vector;
  }
};

struct CombineArgs {
  shmem::CallArgs call;
  MoeCombineParams params;
  MoeCombineArrays arrays;
};

template <typename Numbers, typename Codec>
__global__ void __launch_bounds__(32 * kMoeCombineWarps,
                                  MoeCombineCtasPerSm(!std::is_same_v<Codec, NoCodec>))
    MoeCombineKernel(const __grid_constant__ CombineArgs args) {
  JFLUX_DYNAMIC_SHARED(int32_t, 4, smem);
  const shmem::Context ctx = shmem::begin_call(args.call);
  const bool ok = MoeCombineBody<Numbers, Codec>{args.params, args.arrays, ctx, smem}.Run();
  shmem::end_call(args.call, ctx, ok);
}

// A type's kernels: without a wire, and of float8_e4m3fn and of int8.
struct CombineKernels {
  const void *exact, *wire[2];
};

CombineKernels CombineKernelsOf(DType dtype) {
  return WithFormat<kMoeCombineFormats.operands>(dtype, [](auto format) {
    using T = Number<format>;
    using Numbers = std::conditional_t<std::is_same_v<T, F16>, HalfNumbers, VectorNumbers<T>>;
    const auto of = [](auto codec) {
      return reinterpret_cast<const void*>(&MoeCombineKernel<Numbers, decltype(codec)>);
    };
    return CombineKernels{
        of(NoCodec{}),
        {of(quantize::EightLanes<DType::kF8E4M3FN>{}), of(quantize::EightLanes<DType::kS8>{})}};
  });
}

template <typename Params>
shmem::CallArgs CallArgsFor(const Params& p, OpId op, int64_t site, int64_t blocks,
                            const CudaDevice& device, const SymmetricView& view) {
  shmem::CallArgs call{};
  call.state = device.state;
  call.view = view;
  call.layout = p.Workspace();
  call.signature = SignatureBuilder().Add(p.Signature()).Add(site).Add(blocks).Get();
  call.op = static_cast<uint32_t>(op);
  return call;
}

int64_t BlocksFor(const TokenParts& items, int ctas_per_sm, const CudaDevice& device) {
  return Min<int64_t>(items.Items(), int64_t{ctas_per_sm} * device.sm_count);
}

}  // namespace

bool LoadMoeDispatchKernels(std::string* error) {
  const auto* dispatch = reinterpret_cast<const void*>(&MoeDispatchKernel);
  if (!LoadKernel(dispatch, MostMoeDispatchScratch(kHopperArch), error)) return false;
  return ForFormats(kMoeCombineFormats.operands, [&](DType dtype) {
    const CombineKernels kernels = CombineKernelsOf(dtype);
    const auto load = [&](const void* kernel) {
      return LoadKernel(kernel, kMostMoeCombineScratch, error);
    };
    return load(kernels.exact) && load(kernels.wire[0]) && load(kernels.wire[1]);
  });
}

bool LaunchMoeDispatch(const MoeDispatchParams& p, const MoeDispatchArrays& arrays, int64_t site,
                       const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                       std::string* error) {
  const int64_t blocks = BlocksFor(p.items, kMoeDispatchCtasPerSm, device);
  DispatchArgs args{CallArgsFor(p, kMoeDispatchId, site, blocks, device, view), p, arrays};
  return LaunchKernel(reinterpret_cast<const void*>(&MoeDispatchKernel), &args,
                      static_cast<int>(blocks), /*ctas=*/1, 32 * kMoeDispatchWarps,
                      static_cast<int>(p.ScratchBytes()), stream, error);
}

bool LaunchMoeCombine(const MoeCombineParams& p, const MoeCombineArrays& arrays, int64_t site,
                      const CudaDevice& device, const SymmetricView& view, cudaStream_t stream,
                      std::string* error) {
  const int64_t blocks = BlocksFor(p.items, MoeCombineCtasPerSm(p.wire_blocks != 0), device);
  CombineArgs args{CallArgsFor(p, kMoeCombineId, site, blocks, device, view), p, arrays};
  const CombineKernels kernels = CombineKernelsOf(p.dtype);
  const void* kernel = p.wire_blocks == 0 ? kernels.exact : kernels.wire[p.wire == DType::kS8];
  return LaunchKernel(kernel, &args, static_cast<int>(blocks), /*ctas=*/1, 32 * kMoeCombineWarps,
                      static_cast<int>(p.ScratchBytes()), stream, error);
}

}  // namespace jflux
