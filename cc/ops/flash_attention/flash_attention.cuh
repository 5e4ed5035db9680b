// What the kernels of the forward pass share: the softmax, and the results of a thread's rows.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUH_

#include "ops/flash_attention/attention.cuh"

namespace jflux::attention {

// A thread's two rows.
struct Running {
  float highest[2];  // x so far (Args::factor); minus infinity: none
  float total[2];    // of this thread's probabilities
};

// Turns x into probabilities, relative to the highest x so far. `before`: what sums of earlier
// blocks are to be multiplied with.
template <int kCount>
__device__ __forceinline__ void Softmax(float (&x)[kCount], float factor, Running& run,
                                        float (&before)[2]) {
  float highest[2] = {run.highest[0], run.highest[1]};
#pragma unroll
  for (int i = 0; i < kCount; ++i) highest[HalfOf(i)] = fmaxf(highest[HalfOf(i)], x[i]);
  float base[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffff, highest[h], 1));
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffff, highest[h], 2));
    base[h] = highest[h] == -INFINITY ? 0.0f : highest[h] * factor;
    before[h] = ptx::Exp2(fmaf(run.highest[h], factor, -base[h]));
    run.highest[h] = highest[h];
    run.total[h] *= before[h];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = ptx::Exp2(fmaf(x[i], factor, -base[HalfOf(i)]));
    run.total[HalfOf(i)] += x[i];
  }
}

// Writes a thread's two rows of the result.
template <typename Shape>
__device__ __forceinline__ void StoreRows(const Args& args, const Item& item, int row,
                                          const float (&out)[Shape::kWidth / 2],
                                          const Running& run) {
  using T = typename Shape::T;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = run.total[h];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const int32_t query = item.block * Shape::kQueries + row + 8 * h;
    if (query >= args.queries) continue;
    const float inverse = total == 0 ? 0.0f : 1.0f / total;  // NaN is not 0
    const int64_t at =
        (static_cast<int64_t>(item.batch) * args.queries + query) * args.heads + item.head;
    if (threadIdx.x % 4 == 0) {
      args.arrays.lse[at] =
          total == 0 ? -INFINITY : kLn2 * (run.highest[h] * args.factor + log2f(total));
    }
#pragma unroll
    for (int j = 0; j < Shape::kWidth / 8; ++j) {
      const int column = 8 * j + threadIdx.x % 4 * 2;
      if (column >= args.width) break;
      const float a = out[4 * j + 2 * h] * inverse, b = out[4 * j + 2 * h + 1] * inverse;
      if (args.wide_out) {
        *reinterpret_cast<float2*>(static_cast<float*>(args.arrays.out) + at * args.width +
                                   column) = make_float2(a, b);
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<T*>(args.arrays.out) + at * args.width + column) =
            Pack<T>(a, b);
      }
    }
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_CUH_
