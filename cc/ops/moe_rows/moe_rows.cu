// moe_rows on GPUs. All three forms are limited by memory: each row is read once for each use, in
// vectors of 16 bytes.
//
//   combine, spread  a team of threads, a power of two up to a CTA, has a row of the result; a
//                    thread has every team-th vector of it
//   dots             a warp has a number of the result
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/platform.h"
#include "gpu/machine.h"
#include "gpu/vector.cuh"
#include "ops/moe_rows/moe_rows.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 8 * kMostSms;

struct MoeRowsArgs {
  MoeRowsArrays arrays;
  int64_t rows, tokens;
  int32_t slots, vectors;  // of a row of y or g
  int32_t team;            // threads
};

// Vector i of a row.
template <typename T>
__device__ Vector<T> LoadVector(const void* rows, int64_t row, int32_t vectors, int32_t i) {
  return Vector<T>::Of(__ldg(static_cast<const uint4*>(rows) + row * vectors + i));
}

// Stores it as Out, T or float.
template <typename Out, typename T>
__device__ void StoreVector(const Vector<T>& x, void* rows, int64_t row, int32_t vectors,
                            int32_t i) {
  if constexpr (std::is_same_v<Out, T>) {
    static_cast<uint4*>(rows)[row * vectors + i] = x.Rounded();
  } else {
    static_assert(std::is_same_v<Out, float>);
    float4* to = static_cast<float4*>(rows) + (row * vectors + i) * (Vector<T>::kSize / 4);
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize / 4; ++j) {
      to[j] = make_float4(x.v[4 * j], x.v[4 * j + 1], x.v[4 * j + 2], x.v[4 * j + 3]);
    }
  }
}

// Calls visit(row, i) for this thread's vectors of all rows of the result.
template <typename Visit>
__device__ void ForEachVector(const MoeRowsArgs& args, int64_t rows, Visit&& visit) {
  const int teams = kThreads / args.team, team = threadIdx.x / args.team;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * teams + team; row < rows;
       row += static_cast<int64_t>(gridDim.x) * teams) {
    for (int32_t i = threadIdx.x % args.team; i < args.vectors; i += args.team) visit(row, i);
  }
}

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ MoeRowsArgs args) {
  constexpr int kBatch = 4;  // rows that are loaded together
  ForEachVector(args, args.tokens, [&](int64_t token, int32_t i) {
    Vector<T> sum{};
    const int64_t first = token * args.slots;
    for (int32_t j0 = 0; j0 < args.slots; j0 += kBatch) {
      Vector<T> rows[kBatch];
      float weights[kBatch];
      bool is_there[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int32_t row =
            j0 + b < args.slots ? __ldg(args.arrays.destination + first + j0 + b) : -1;
        is_there[b] = row >= 0 && row < args.rows;
        if (!is_there[b]) continue;
        weights[b] = __ldg(args.arrays.w + first + j0 + b);
        rows[b] = LoadVector<T>(args.arrays.y, row, args.vectors, i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (is_there[b]) sum.AddTimes(weights[b], rows[b]);
      }
    }
    StoreVector<Out>(sum, args.arrays.out, token, args.vectors, i);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) SpreadKernel(const __grid_constant__ MoeRowsArgs args) {
  const int64_t slots = args.tokens * args.slots;
  ForEachVector(args, args.rows, [&](int64_t row, int32_t i) {
    const int32_t slot = __ldg(args.arrays.source + row);
    Vector<T> out{};
    if (slot >= 0 && slot < slots) {
      const float weight = __ldg(args.arrays.w + slot);
      out = LoadVector<T>(args.arrays.g, slot / args.slots, args.vectors, i);
#pragma unroll
      for (int c = 0; c < Vector<T>::kSize; ++c) out.v[c] *= weight;
    }
    StoreVector<T>(out, args.arrays.out, row, args.vectors, i);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) DotsKernel(const __grid_constant__ MoeRowsArgs args) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t slots = args.tokens * args.slots;
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; slot < slots;
       slot += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int32_t row = __ldg(args.arrays.destination + slot);
    float sum = 0;
    if (row >= 0 && row < args.rows) {
#pragma unroll 4
      for (int32_t i = lane; i < args.vectors; i += 32) {
        const auto y = LoadVector<T>(args.arrays.y, row, args.vectors, i);
        const auto g = LoadVector<T>(args.arrays.g, slot / args.slots, args.vectors, i);
#pragma unroll
        for (int c = 0; c < Vector<T>::kSize; ++c) sum = fmaf(y.v[c], g.v[c], sum);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0) static_cast<float*>(args.arrays.out)[slot] = sum;
  }
}

template <typename T>
const void* KernelFor(MoeRowsForm form, bool out_f32) {
  switch (form) {
    case MoeRowsForm::kCombine:
      return out_f32 ? reinterpret_cast<const void*>(&CombineKernel<T, float>)
                     : reinterpret_cast<const void*>(&CombineKernel<T, T>);
    case MoeRowsForm::kSpread:
      return reinterpret_cast<const void*>(&SpreadKernel<T>);
    case MoeRowsForm::kDots:
      return reinterpret_cast<const void*>(&DotsKernel<T>);
  }
  return nullptr;
}

const void* KernelOf(DType dtype, MoeRowsForm form, bool out_f32) {
  return WithFormat<kMoeRowsFormats.operands>(
      dtype, [&](auto format) { return KernelFor<CudaType<format>>(form, out_f32); });
}

}  // namespace

bool LoadMoeRowsKernels(std::string* error) {
  return ForFormats(kMoeRowsFormats.operands, [&](DType dtype) {
    for (const auto form : {MoeRowsForm::kCombine, MoeRowsForm::kSpread, MoeRowsForm::kDots}) {
      for (const bool out_f32 : {false, true}) {
        if (!LoadKernel(KernelOf(dtype, form, out_f32), 0, error)) return false;
      }
    }
    return true;
  });
}

bool LaunchMoeRows(const MoeRowsParams& p, const MoeRowsArrays& arrays, cudaStream_t stream,
                   std::string* error) {
  const int64_t row_bytes = p.columns * SizeOf(p.dtype);
  *error = WhyNotFormats(kMoeRowsFormats, kAllFormats, p.dtype, p.out_dtype);
  if (!error->empty()) return false;
  if (row_bytes % kVectorBytes != 0 || p.slots > INT32_MAX ||
      row_bytes / kVectorBytes > INT32_MAX) {
    *error = "the kernel takes rows of whole vectors of 16 bytes";
    return false;
  }
  const void* kernel = KernelOf(p.dtype, p.form, p.out_dtype == DType::kF32);
  MoeRowsArgs args{arrays,
                   p.rows,
                   p.tokens,
                   static_cast<int32_t>(p.slots),
                   static_cast<int32_t>(row_bytes / kVectorBytes),
                   1};
  while (args.team < kThreads && args.team < args.vectors) args.team *= 2;
  const int64_t results = p.form == MoeRowsForm::kCombine  ? p.tokens
                          : p.form == MoeRowsForm::kSpread ? p.rows
                                                           : p.tokens * p.slots;
  const int teams = p.form == MoeRowsForm::kDots ? kThreads / 32 : kThreads / args.team;
  const int64_t ctas = Min(CeilDiv<int64_t>(results, teams), kMostCtas);
  return LoadOnce(LoadMoeRowsKernels, error) &&
         LaunchKernel(kernel, &args, static_cast<int>(ctas), 1, kThreads, 0, stream, error);
}

}  // namespace jflux
