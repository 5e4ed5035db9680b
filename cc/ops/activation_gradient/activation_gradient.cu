// activation_gradient on GPUs. It is limited by memory. The rows of all groups lie together, so the
// threads of the grid share their vectors of 16 bytes, whatever row these are of.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/platform.h"
#include "gpu/activation.cuh"
#include "gpu/machine.h"
#include "gpu/vector.cuh"
#include "ops/activation_gradient/activation_gradient.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
// More than run at a time, so that the last ones to end are small.
constexpr int64_t kMostCtas = 32 * kMostSms;

struct ActivationGradientArgs {
  ActivationGradientArrays arrays;
  Activation activation;
  int32_t groups;
  int64_t rows;
  int64_t row_vectors;  // of 16 bytes
};

// The rows of all groups; sizes that make no sense count no row that there is not. Called by all
// threads of a CTA.
__device__ __forceinline__ int64_t RowsOfGroups(const ActivationGradientArgs& args) {
  JFLUX_SHARED(uint32_t, sum);
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  uint32_t own = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < args.groups; i += kThreads) {
    own += static_cast<uint32_t>(Max(0, __ldg(args.arrays.group_sizes + i)));
  }
  if (own != 0) atomicAdd(&sum, own);
  __syncthreads();
  return Min<int64_t>(sum, args.rows);
}

template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads)
    ActivationGradientKernel(const __grid_constant__ ActivationGradientArgs args) {
  const ActivationGradientArrays& arrays = args.arrays;
  const int64_t vectors = RowsOfGroups(args) * args.row_vectors;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto load = [](const void* from, int64_t at) {
    return Vector<T>::Of(__ldg(static_cast<const uint4*>(from) + at));
  };
  WithActivation(args.activation, [&](auto activation) {
    using Of = ActivationAt<decltype(activation)::value>;
#pragma unroll 2
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < vectors;
         at += step) {
      Vector<T> dy = load(arrays.dy, at), first = load(arrays.sums[0], at);
      [[maybe_unused]] Vector<T> second;
      if constexpr (kGated) second = load(arrays.sums[1], at);
#pragma unroll
      for (int i = 0; i < Vector<T>::kSize; ++i) {
        const Of of(first.v[i]);
        if constexpr (kGated) {
          first.v[i] = of.Gradient(dy.v[i] * second.v[i]);
          second.v[i] = dy.v[i] * of.value;
        } else {
          first.v[i] = of.Gradient(dy.v[i]);
        }
      }
      static_cast<uint4*>(arrays.gradients[0])[at] = first.Rounded();
      if constexpr (kGated) static_cast<uint4*>(arrays.gradients[1])[at] = second.Rounded();
    }
  });
}

const void* KernelOf(DType dtype, bool gated) {
  return WithFormat<kActivationGradientFormats.operands>(dtype, [&](auto format) -> const void* {
    using T = CudaType<format>;
    return gated ? reinterpret_cast<const void*>(&ActivationGradientKernel<T, true>)
                 : reinterpret_cast<const void*>(&ActivationGradientKernel<T, false>);
  });
}

}  // namespace

bool LoadActivationGradientKernels(std::string* error) {
  return ForFormats(kActivationGradientFormats.operands, [&](DType dtype) {
    return LoadKernel(KernelOf(dtype, false), 0, error) &&
           LoadKernel(KernelOf(dtype, true), 0, error);
  });
}

bool LaunchActivationGradient(const ActivationGradientParams& p,
                              const ActivationGradientArrays& arrays, cudaStream_t stream,
                              std::string* error) {
  *error = WhyNotFormats(kActivationGradientFormats, kAllFormats, p.dtype, p.dtype);
  if (!error->empty()) return false;
  const int64_t row_bytes = p.columns * SizeOf(p.dtype);
  if (row_bytes % kVectorBytes != 0 || p.groups > INT32_MAX || p.rows > INT32_MAX) {
    *error = "the kernel takes rows of whole vectors of 16 bytes";
    return false;
  }
  ActivationGradientArgs args{arrays, p.activation, static_cast<int32_t>(p.groups), p.rows,
                              row_bytes / kVectorBytes};
  const int64_t ctas = Min(CeilDiv<int64_t>(p.rows * args.row_vectors, kThreads), kMostCtas);
  return LoadOnce(LoadActivationGradientKernels, error) &&
         LaunchKernel(KernelOf(p.dtype, p.gated), &args, static_cast<int>(ctas), 1, kThreads, 0,
                      stream, error);
}

}  // namespace jflux
