// moe_rows on GPUs. All three forms are limited by memory. Each goes through the tokens and, for a
// token, through batches of its slots: a row that no slot has is not touched, unless it is to be
// zeros, and a token's own row is read once for each batch. Rows are read in vectors of 16 bytes.
//
//   combine, spread  a team of threads, a power of two up to a CTA, has a token; a thread has every
//                    team-th vector of its rows
//   dots             a warp has a token
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
constexpr int kBatch = 8;  // slots of a token whose rows are loaded together
// Far more than run at a time, so that the last ones to end are small.
constexpr int64_t kMostCtas = 64 * kMostSms;
// Vectors of a row that a thread has, where a row has enough for a warp.
constexpr int kVectorsOfThread = 4;

struct MoeRowsArgs {
  MoeRowsArrays arrays;
  int64_t rows, tokens;
  int32_t slots, vectors;  // of a row of y or g
  int32_t team;            // threads
  bool fill;
};

// Vector i of a row.
__device__ __forceinline__ uint4 Load(const void* rows, int64_t row, int32_t vectors, int32_t i) {
  return __ldg(static_cast<const uint4*>(rows) + row * vectors + i);
}

// Stores x as vector i of a row, of Out: T or float.
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

// The share of a team in `count` rows or tokens: first, first + step, ...
struct Share {
  int64_t first, step;
  static __device__ __forceinline__ Share Of(int team) {
    const int teams = kThreads / team, own = static_cast<int>(threadIdx.x) / team;
    return {static_cast<int64_t>(blockIdx.x) * teams + own,
            static_cast<int64_t>(gridDim.x) * teams};
  }
};

// Rows of a token's slots j0 ... j0 + kBatch - 1; -1: none.
struct SlotRows {
  int32_t row[kBatch];
  __device__ __forceinline__ SlotRows(const MoeRowsArgs& args, int64_t token, int32_t j0) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool is_there = j0 + b < args.slots;
      const int32_t found =
          is_there ? __ldg(args.arrays.destination + token * args.slots + j0 + b) : -1;
      row[b] = found < args.rows ? found : -1;
    }
  }
  __device__ __forceinline__ bool Any() const {
    int32_t most = -1;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) most = Max(most, row[b]);
    return most >= 0;
  }
};

// The weight of a token's slot.
__device__ __forceinline__ float WeightOf(const MoeRowsArgs& args, int64_t token, int32_t j) {
  return __ldg(args.arrays.w + token * args.slots + j);
}

// Few registers, for as many CTAs of an SM: a third faster where most slots have no row.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, 4)
    CombineKernel(const __grid_constant__ MoeRowsArgs args) {
  const Share share = Share::Of(args.team);
  const auto member = static_cast<int32_t>(threadIdx.x) % args.team;
  for (int64_t token = share.first; token < args.tokens; token += share.step) {
    SlotRows slots(args, token, 0);
#pragma unroll 1
    for (int32_t i = member; i < args.vectors; i += args.team) {
      Vector<T> sum{};
      for (int32_t j0 = 0; j0 < args.slots; j0 += kBatch) {
        if (args.slots > kBatch) slots = SlotRows(args, token, j0);
        uint4 loaded[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (slots.row[b] >= 0) loaded[b] = Load(args.arrays.y, slots.row[b], args.vectors, i);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (slots.row[b] < 0) continue;
          sum.AddTimes(WeightOf(args, token, j0 + b), Vector<T>::Of(loaded[b]));
        }
      }
      StoreVector<Out>(sum, args.arrays.out, token, args.vectors, i);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) SpreadKernel(const __grid_constant__ MoeRowsArgs args) {
  const Share share = Share::Of(args.team);
  const auto member = static_cast<int32_t>(threadIdx.x) % args.team;
  for (int64_t token = share.first; token < args.tokens; token += share.step) {
    for (int32_t j0 = 0; j0 < args.slots; j0 += kBatch) {
      const SlotRows slots(args, token, j0);
      if (!slots.Any()) continue;
      float weights[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        weights[b] = slots.row[b] >= 0 ? WeightOf(args, token, j0 + b) : 0.0f;
      }
#pragma unroll 4
      for (int32_t i = member; i < args.vectors; i += args.team) {
        const auto g = Vector<T>::Of(Load(args.arrays.g, token, args.vectors, i));
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (slots.row[b] < 0) continue;
          Vector<T> out;
#pragma unroll
          for (int c = 0; c < Vector<T>::kSize; ++c) out.v[c] = weights[b] * g.v[c];
          StoreVector<T>(out, args.arrays.out, slots.row[b], args.vectors, i);
        }
      }
    }
  }
  if (!args.fill) return;
  for (int64_t row = share.first; row < args.rows; row += share.step) {
    if (__ldg(args.arrays.source + row) >= 0) continue;
    for (int32_t i = member; i < args.vectors; i += args.team) {
      StoreVector<T>(Vector<T>{}, args.arrays.out, row, args.vectors, i);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3)
    DotsKernel(const __grid_constant__ MoeRowsArgs args) {
  const Share share = Share::Of(32);
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  for (int64_t token = share.first; token < args.tokens; token += share.step) {
    for (int32_t j0 = 0; j0 < args.slots; j0 += kBatch) {
      const SlotRows slots(args, token, j0);
      float sums[kBatch] = {};
      for (int32_t i = slots.Any() ? lane : args.vectors; i < args.vectors; i += 32) {
        const uint4 of_token = Load(args.arrays.g, token, args.vectors, i);
        uint4 loaded[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (slots.row[b] >= 0) loaded[b] = Load(args.arrays.y, slots.row[b], args.vectors, i);
        }
        const auto g = Vector<T>::Of(of_token);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (slots.row[b] < 0) continue;
          const auto y = Vector<T>::Of(loaded[b]);
#pragma unroll
          for (int c = 0; c < Vector<T>::kSize; ++c) sums[b] = fmaf(y.v[c], g.v[c], sums[b]);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          sums[b] += __shfl_xor_sync(0xffffffff, sums[b], step);
        }
        if (lane == b && j0 + b < args.slots) {
          static_cast<float*>(args.arrays.out)[token * args.slots + j0 + b] = sums[b];
        }
      }
    }
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
                   1,
                   p.fill};
  const int32_t most = Max(32, args.vectors / kVectorsOfThread);
  while (args.team < kThreads && args.team < Min(args.vectors, most)) args.team *= 2;
  const int teams = kThreads / (p.form == MoeRowsForm::kDots ? 32 : args.team);
  const int64_t shared =
      p.form == MoeRowsForm::kSpread && p.fill ? Max(p.tokens, p.rows) : p.tokens;
  const int64_t ctas = Min(CeilDiv<int64_t>(shared, teams), kMostCtas);
  return LoadOnce(LoadMoeRowsKernels, error) &&
         LaunchKernel(kernel, &args, static_cast<int>(ctas), 1, kThreads, 0, stream, error);
}

}  // namespace jflux
