// What the kernels of the backward pass share (arXiv 2307.08691, algorithm 2): one for dk and dv,
// one for dq. With p = exp(score - log-sum-exp) and the slope of the score:
//
//   dv = p^T do     ds = p (do v^T - delta) slope     dk = ds^T q     dq = ds k
//
// The kernel of dk and dv computes transposed scores, k q^T: p^T and ds^T are accumulators there,
// and so operands in registers of the sums over queries. That of dq has them the other way round.
// Both compute scores and do v^T: seven products where five would do, for sums without atomics.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_CUH_

#include "ops/flash_attention/attention.cuh"

namespace jflux::attention {

// Two floats from shared memory.
__device__ __forceinline__ float2 LoadFloats(uint32_t smem) {
  const int2 v = LoadPair(smem);
  return make_float2(__int_as_float(v.x), __int_as_float(v.y));
}

// Computes p from the products `s` of queries and keys. base(j) has the bases of the queries of
// accumulators 4 j to 4 j + 3. With a softcap `s` becomes x (Args::factor).
template <bool kSoftcap, int kCount, typename Base>
__device__ __forceinline__ void Probabilities(const Args& args, float (&s)[kCount],
                                              float (&p)[kCount], Base&& base) {
  if constexpr (kSoftcap) Cap(s, args.inner);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 b = base(j);
    p[4 * j] = ptx::Exp2(fmaf(s[4 * j], args.factor, -b.x));
    p[4 * j + 1] = ptx::Exp2(fmaf(s[4 * j + 1], args.factor, -b.y));
    p[4 * j + 2] = ptx::Exp2(fmaf(s[4 * j + 2], args.factor, -b.z));
    p[4 * j + 3] = ptx::Exp2(fmaf(s[4 * j + 3], args.factor, -b.w));
  }
}

// From `s` as Probabilities left it: p times the slope of the score, without the factor `scale`.
template <bool kSoftcap, int kCount>
__device__ __forceinline__ void Slopes(float (&s)[kCount], const float (&p)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = kSoftcap ? p[i] * (1.0f - s[i] * s[i]) : p[i];
}

// do v^T in `dp`, and Slopes -> ds in `dp`. `delta` as `base` above.
template <int kCount, typename Delta>
__device__ __forceinline__ void ScoreGradients(const float (&slopes)[kCount], float (&dp)[kCount],
                                               Delta&& delta) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 d = delta(j);
    dp[4 * j] = slopes[4 * j] * (dp[4 * j] - d.x);
    dp[4 * j + 1] = slopes[4 * j + 1] * (dp[4 * j + 1] - d.y);
    dp[4 * j + 2] = slopes[4 * j + 2] * (dp[4 * j + 2] - d.z);
    dp[4 * j + 3] = slopes[4 * j + 3] * (dp[4 * j + 3] - d.w);
  }
}

// Writes a thread's two rows, `head` of [B, rows, heads, D].
template <int kWidth>
__device__ __forceinline__ void StoreGradient(float* to, const float (&d)[kWidth / 2], float scale,
                                              int32_t batch, int32_t rows, int32_t first,
                                              int32_t heads, int32_t head, int32_t width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = first + 8 * h;
    if (row >= rows) continue;
    float* at = to + ((static_cast<int64_t>(batch) * rows + row) * heads + head) * width;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      const int column = 8 * j + threadIdx.x % 4 * 2;
      if (column >= width) break;
      *reinterpret_cast<float2*>(at + column) =
          make_float2(d[4 * j + 2 * h] * scale, d[4 * j + 2 * h + 1] * scale);
    }
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_BACKWARD_CUH_
