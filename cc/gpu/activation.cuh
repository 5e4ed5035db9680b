// Activations and their derivatives, in float32: those of jflux/_ops/_epilogue.py.
#ifndef JFLUX_GPU_ACTIVATION_CUH_
#define JFLUX_GPU_ACTIVATION_CUH_

#include <type_traits>

#include "core/activation.h"
#include "core/platform.h"

namespace jflux {

// The activation at x; and the gradient of x, from that of the activation.
template <Activation kActivation>
struct ActivationAt {
  float value, slope;
  __device__ __forceinline__ explicit ActivationAt(float x) {
    if constexpr (kActivation == Activation::kRelu) {
      value = x < 0.0f ? 0.0f : x;
      slope = x;
    } else if constexpr (kActivation == Activation::kGelu) {
      const float cdf = 0.5f * erfcf(-0.70710678f * x);
      value = x * cdf;
      slope = fmaf(x * 0.39894228f, __expf(-0.5f * x * x), cdf);
    } else if constexpr (kActivation == Activation::kGeluTanh) {
      const float u = 0.79788456f * (x + 0.044715f * x * x * x);
      const float s = __fdividef(1.0f, 1.0f + __expf(-2.0f * u));
      value = x * s;
      slope = fmaf(s * (1.0f - s) * x, 1.59576912f * (1.0f + 0.134145f * x * x), s);
    } else {
      const float s = __fdividef(1.0f, 1.0f + __expf(-x));
      value = x * s;
      slope = s * fmaf(x, 1.0f - s, 1.0f);
    }
  }
  __device__ __forceinline__ float Gradient(float of_value) const {
    if constexpr (kActivation == Activation::kRelu) {
      return slope > 0.0f ? of_value : 0.0f;
    } else {
      return slope * of_value;
    }
  }
};

// Calls f with the activation as a constant.
template <typename F>
__device__ __forceinline__ void WithActivation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kGelu:
      return f(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return f(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kRelu:
      return f(std::integral_constant<Activation, Activation::kRelu>{});
    default:
      return f(std::integral_constant<Activation, Activation::kSilu>{});
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_ACTIVATION_CUH_
