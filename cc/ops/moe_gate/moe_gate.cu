// moe_gate and its gradient on GPUs. A warp has a batch of consecutive tokens, and a lane one slot
// of one of them, so that a batch's slots are loaded and stored together:
//
//   lanes   0 ... team - 1   team ... 2 team - 1   ...     team: a power of two from k on
//   slots   token 0's        token 1's             ...
//
// The gate goes through the batch token by token. All lanes share a token's experts: lane l has
// experts l, l + 32, ..., sorted, so that the best expert left is at the front of some lane. A
// reduction over the warp finds it, another one the lowest index among equals. k rounds of about
// 20 instructions are, by their count, more than the time of the logits' bytes where tokens are
// many. A threshold that leaves few candidates would take fewer, and a second path for equal
// logits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cmath>

#include "core/platform.h"
#include "gpu/machine.h"
#include "gpu/types.cuh"
#include "ops/moe_gate/moe_gate.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffff;
// CTAs of an SM that are worth more than a larger batch: an estimate.
constexpr int64_t kCtasOfSm = 2;

// How a call's tokens lie on warps, and what both kernels know of it.
struct Shape {
  int64_t tokens;
  int32_t experts, slots;
  int32_t team;   // lanes of a token's slots
  int32_t batch;  // tokens of a warp, at most 32 / team
  bool is_sigmoid, normalize;
  float scale;
  int32_t groups, top_groups;

  explicit Shape(const MoeGateParams& p)
      : tokens(p.tokens),
        experts(static_cast<int32_t>(p.experts)),
        slots(static_cast<int32_t>(p.slots)),
        team(1),
        is_sigmoid(p.score == GateScore::kSigmoid),
        normalize(p.normalize),
        scale(p.scale),
        groups(static_cast<int32_t>(p.groups)),
        top_groups(static_cast<int32_t>(p.top_groups)) {
    while (team < slots) team *= 2;
    const int64_t warps = kMostSms * kCtasOfSm * kWarps;
    batch = static_cast<int32_t>(Min<int64_t>(32 / team, CeilDiv<int64_t>(tokens, warps)));
  }
  int Ctas() const {
    return static_cast<int>(CeilDiv<int64_t>(tokens, static_cast<int64_t>(batch) * kWarps));
  }
};

struct MoeGateArgs {
  Shape shape;
  MoeGateArrays arrays;
};

struct MoeGateGradientArgs {
  Shape shape;
  MoeGateGradientArrays arrays;
};

// This lane's part of its warp's batch.
struct Lane {
  int lane;
  int64_t first;   // token of the batch
  int32_t member;  // of the batch: the token of this lane's slot is first + member
  bool has_slot;
  int64_t slot;  // first token's slots count from first * slots

  __device__ __forceinline__ explicit Lane(const Shape& s) {
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    first = warp * s.batch;
    member = lane / s.team;
    const int32_t j = lane % s.team;
    has_slot = member < s.batch && j < s.slots && first + member < s.tokens;
    slot = (first + member) * s.slots + j;
  }
  __device__ __forceinline__ int64_t Token() const { return first + member; }
};

__device__ __forceinline__ float TeamSum(float value, int32_t team) {
  for (int step = team / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
__device__ __forceinline__ float TeamMax(float value, int32_t team) {
  for (int step = team / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// As exact as XLA's: experts are chosen by it.
__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float LogSigmoid(float x) {
  return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}

template <typename T>
__device__ __forceinline__ float LogitAt(const void* logits, int64_t at) {
  return static_cast<float>(__ldg(static_cast<const T*>(logits) + at));
}

// The order of numbers as that of keys; negative NaN may have key 0.
__device__ __forceinline__ uint32_t KeyOf(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float OfKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// The softmax over all experts of a token is exp(x - most) / total.
struct OverAll {
  float most, total;

  // A lane's logits are logit(i), i < count. Called by a full warp.
  template <typename Logit>
  static __device__ __forceinline__ OverAll Of(int count, Logit&& logit) {
    OverAll all{-INFINITY, 0.0f};
#pragma unroll
    for (int i = 0; i < count; ++i) all.most = fmaxf(all.most, logit(i));
    all.most = TeamMax(all.most, 32);
#pragma unroll
    for (int i = 0; i < count; ++i) all.total += __expf(logit(i) - all.most);
    all.total = TeamSum(all.total, 32);
    return all;
  }
};

// A lane's experts of a token, best first.
template <int kOwn>
struct Sorted {
  static constexpr int32_t kNone = INT_MAX;  // behind all experts, also of the same key
  uint32_t key[kOwn];
  int32_t expert[kOwn];

  // By insertion: equal keys stay in the order of experts.
  __device__ __forceinline__ void Sort() {
#pragma unroll
    for (int end = 1; end < kOwn; ++end) {
#pragma unroll
      for (int i = end; i > 0; --i) {
        const uint32_t left = key[i - 1], right = key[i];
        const int32_t left_expert = expert[i - 1], right_expert = expert[i];
        const bool swaps = right > left;
        key[i - 1] = swaps ? right : left;
        key[i] = swaps ? left : right;
        expert[i - 1] = swaps ? right_expert : left_expert;
        expert[i] = swaps ? left_expert : right_expert;
      }
    }
  }
  __device__ __forceinline__ void DropFirst() {
#pragma unroll
    for (int i = 1; i < kOwn; ++i) {
      key[i - 1] = key[i];
      expert[i - 1] = expert[i];
    }
    key[kOwn - 1] = 0;
    expert[kOwn - 1] = kNone;
  }
};

// Sets keys of experts outside of the best groups to that of -inf. `keys`, in shared memory, are
// those of a token. Called by a full warp, whose lane g has group g.
__device__ __forceinline__ void LimitToGroups(const Shape& s, int lane, uint32_t* keys) {
  const int32_t size = s.experts / s.groups;
  uint32_t* own = keys + lane * size;
  // Each lane begins at another expert of its group, so that lanes' banks differ.
  const auto for_each = [&](auto&& visit) {
    int32_t i = lane % size;
    for (int32_t n = 0; n < size; ++n) {
      visit(own[i]);
      i = i + 1 == size ? 0 : i + 1;
    }
  };
  uint32_t score = 0;
  if (lane < s.groups) {
    uint32_t best = 0, second = 0;
    for_each([&](uint32_t key) {
      second = Max(second, Min(best, key));
      best = Max(best, key);
    });
    score = s.is_sigmoid && size > 1 ? KeyOf(OfKey(best) + OfKey(second)) : best;
  }
  bool is_among = lane >= s.groups;
  for (int32_t n = 0; n < s.top_groups; ++n) {
    const uint32_t best = __reduce_max_sync(kAllLanes, score);
    const int first = __ffs(__ballot_sync(kAllLanes, score == best)) - 1;
    if (lane == first) {
      is_among = true;
      score = 0;
    }
  }
  if (!is_among) {
    for_each([&](uint32_t& key) { key = KeyOf(-INFINITY); });
  }
}

template <typename T, int kOwn, bool kGrouped>
__global__ void __launch_bounds__(kThreads)
    MoeGateKernel(const __grid_constant__ MoeGateArgs args) {
  JFLUX_DYNAMIC_SHARED(uint32_t, 4, shared_keys);  // of groups alone
  const Shape& s = args.shape;
  const MoeGateArrays& arrays = args.arrays;
  const Lane own(s);
  int32_t chosen = -1;      // by this lane's slot
  OverAll all{0.0f, 1.0f};  // of its token
  for (int32_t i = 0; i < s.batch; ++i) {
    const int64_t token = own.first + i;
    if (token >= s.tokens) break;
    if (arrays.mask != nullptr && __ldg(arrays.mask + token) == 0) continue;
    float logits[kOwn];
    Sorted<kOwn> sorted;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int e = r * 32 + own.lane;
      logits[r] = e < s.experts ? LogitAt<T>(arrays.logits, token * s.experts + e) : -INFINITY;
    }
    OverAll of_token{0.0f, 1.0f};
    if (!s.is_sigmoid && (kGrouped || !s.normalize)) {
      of_token = OverAll::Of(kOwn, [&](int r) { return logits[r]; });
      if (own.member == i) all = of_token;
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int e = r * 32 + own.lane;
      const bool is_there = e < s.experts;
      float choice = logits[r];
      if (s.is_sigmoid) {
        choice = Sigmoid(choice);
      } else if constexpr (kGrouped) {
        choice = expf(choice - of_token.most) / of_token.total;
      }
      if (arrays.bias != nullptr && is_there) choice += __ldg(arrays.bias + e);
      sorted.key[r] = is_there ? KeyOf(choice) : 0;
      sorted.expert[r] = is_there ? e : Sorted<kOwn>::kNone;
    }
    if constexpr (kGrouped) {
      uint32_t* keys = shared_keys + threadIdx.x / 32 * s.experts;
      // Each lane writes and reads its own experts' keys, the lanes of groups those of all.
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        if (r * 32 + own.lane < s.experts) keys[r * 32 + own.lane] = sorted.key[r];
      }
      __syncwarp();
      LimitToGroups(s, own.lane, keys);
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        if (r * 32 + own.lane < s.experts) sorted.key[r] = keys[r * 32 + own.lane];
      }
    }
    sorted.Sort();
    for (int32_t j = 0; j < s.slots; ++j) {
      const uint32_t best = __reduce_max_sync(kAllLanes, sorted.key[0]);
      const int32_t expert = __reduce_min_sync(
          kAllLanes, sorted.key[0] == best ? sorted.expert[0] : Sorted<kOwn>::kNone);
      if (sorted.expert[0] == expert) sorted.DropFirst();
      if (own.lane == i * s.team + j) chosen = expert;
    }
  }

  const bool is_chosen = own.has_slot && chosen >= 0;
  const float x =
      is_chosen ? LogitAt<T>(arrays.logits, own.Token() * s.experts + chosen) : -INFINITY;
  float weight;
  if (s.normalize) {
    // Scores over their sum are the softmax of their logarithms, which do not vanish.
    const float score = is_chosen && s.is_sigmoid ? LogSigmoid(x) : x;
    const float most = TeamMax(score, s.team);
    const float part = is_chosen ? expf(score - most) : 0.0f;
    weight = part / TeamSum(part, s.team);
  } else {
    weight = s.is_sigmoid ? Sigmoid(x) : expf(x - all.most) / all.total;
  }
  if (!own.has_slot) return;
  arrays.indices[own.slot] = chosen;
  arrays.weights[own.slot] = is_chosen ? s.scale * weight : 0.0f;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    MoeGateGradientKernel(const __grid_constant__ MoeGateGradientArgs args) {
  JFLUX_DYNAMIC_SHARED(float, 4, rows);
  const Shape& s = args.shape;
  const MoeGateGradientArrays& arrays = args.arrays;
  const Lane own(s);
  float* row = rows + threadIdx.x / 32 * s.experts;  // of a token

  // The gradient of the chosen logit: that of a score, by the score's slope.
  int32_t chosen = -1;
  float weight = 0.0f, gradient = 0.0f;
  if (own.has_slot) {
    chosen = __ldg(arrays.indices + own.slot);
    if (chosen >= 0) {
      weight = __ldg(arrays.weights + own.slot);
      gradient = weight * __ldg(arrays.dweights + own.slot);
    }
  }
  const float sum = TeamSum(gradient, s.team);
  if (s.normalize) gradient -= weight * sum / s.scale;
  if (s.is_sigmoid && chosen >= 0) {
    gradient *= Sigmoid(-LogitAt<T>(arrays.logits, own.Token() * s.experts + chosen));
  }

  const bool of_all = !s.is_sigmoid && !s.normalize;  // all logits of a token have a gradient
  for (int32_t i = 0; i < s.batch; ++i) {
    const int64_t token = own.first + i;
    if (token >= s.tokens) break;
    // Each lane reads and clears its own elements.
    for (int e = own.lane; e < s.experts; e += 32) row[e] = 0.0f;
    __syncwarp();
    if (own.member == i && chosen >= 0) row[chosen] = gradient;
    __syncwarp();
    const auto logit = [&](int e) { return LogitAt<T>(arrays.logits, token * s.experts + e); };
    OverAll all{0.0f, 1.0f};
    const float of_scores = __shfl_sync(kAllLanes, sum, i * s.team);
    const bool has_choice = __shfl_sync(kAllLanes, chosen, i * s.team) >= 0;
    const bool adds = of_all && has_choice;
    if (adds) {
      const int count = (s.experts - own.lane + 31) / 32;
      all = OverAll::Of(count, [&](int r) { return logit(own.lane + 32 * r); });
    }
    const float factor = of_scores / all.total;
    for (int e = own.lane; e < s.experts; e += 32) {
      float of_logit = row[e];
      if (adds) of_logit -= factor * __expf(logit(e) - all.most);
      static_cast<T*>(arrays.dlogits)[token * s.experts + e] = static_cast<T>(of_logit);
    }
  }
}

template <typename T, bool kGrouped, int kOwn = 1>
const void* KernelFor(int64_t experts) {
  if constexpr (32 * kOwn < kMostGateExperts) {
    if (experts > 32 * kOwn) return KernelFor<T, kGrouped, 2 * kOwn>(experts);
  }
  return reinterpret_cast<const void*>(&MoeGateKernel<T, kOwn, kGrouped>);
}

const void* KernelOf(DType dtype, int64_t experts, bool grouped) {
  return WithFormat<kMoeGateFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    return grouped ? KernelFor<T, true>(experts) : KernelFor<T, false>(experts);
  });
}

const void* GradientOf(DType dtype) {
  return WithFormat<kMoeGateFormats.operands>(dtype, [&](auto format) {
    return reinterpret_cast<const void*>(&MoeGateGradientKernel<CudaType<format>>);
  });
}

constexpr int SmemBytes(int64_t experts) { return static_cast<int>(kWarps * experts * 4); }
static_assert(SmemBytes(kMostGateExperts) <= kPortable.smem_bytes);

// Why the kernels do not take a call, or empty.
std::string WhyNot(const MoeGateParams& p) {
  const std::string why = WhyNotFormats(kMoeGateFormats, kAllFormats, p.dtype, DType::kF32);
  if (!why.empty()) return why;
  if (p.experts > kMostGateExperts || p.slots > kMostGateSlots || p.slots > p.experts ||
      p.tokens > INT32_MAX) {
    return "the kernels take up to " + std::to_string(kMostGateExperts) + " experts and " +
           std::to_string(kMostGateSlots) + " choices of a token";
  }
  if (p.groups > 0 && (p.groups > kMostGateGroups || p.experts % p.groups != 0 ||
                       p.top_groups < 1 || p.top_groups > p.groups)) {
    return "the kernel takes up to " + std::to_string(kMostGateGroups) + " groups of one size";
  }
  return "";
}

}  // namespace

bool LoadMoeGateKernels(std::string* error) {
  return ForFormats(kMoeGateFormats.operands, [&](DType dtype) {
    for (int64_t experts = 32; experts <= kMostGateExperts; experts *= 2) {
      if (!LoadKernel(KernelOf(dtype, experts, false), 0, error) ||
          !LoadKernel(KernelOf(dtype, experts, true), SmemBytes(experts), error)) {
        return false;
      }
    }
    return LoadKernel(GradientOf(dtype), SmemBytes(kMostGateExperts), error);
  });
}

bool LaunchMoeGate(const MoeGateParams& p, const MoeGateArrays& arrays, cudaStream_t stream,
                   std::string* error) {
  *error = WhyNot(p);
  if (!error->empty()) return false;
  MoeGateArgs args{Shape(p), arrays};
  const bool grouped = p.groups > 0;
  return LoadOnce(LoadMoeGateKernels, error) &&
         LaunchKernel(KernelOf(p.dtype, p.experts, grouped), &args, args.shape.Ctas(), 1, kThreads,
                      grouped ? SmemBytes(p.experts) : 0, stream, error);
}

bool LaunchMoeGateGradient(const MoeGateParams& p, const MoeGateGradientArrays& arrays,
                           cudaStream_t stream, std::string* error) {
  *error = WhyNot(p);
  if (!error->empty()) return false;
  MoeGateGradientArgs args{Shape(p), arrays};
  return LoadOnce(LoadMoeGateKernels, error) &&
         LaunchKernel(GradientOf(p.dtype), &args, args.shape.Ctas(), 1, kThreads,
                      SmemBytes(p.experts), stream, error);
}

}  // namespace jflux
