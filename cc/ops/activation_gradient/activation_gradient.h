// activation_gradient: the gradients of what an activation is applied to, of the rows that groups
// have, on one device. With dy the gradient of y [M, n]:
//
//   y = activation(s0)        ->  ds0 = dy activation'(s0)
//   y = activation(s0) s1     ->  ds0 = dy s1 activation'(s0), ds1 = dy activation(s0)
//
// Rows past the sum of the group sizes are neither read nor written. All is computed in float32 and
// rounded once.
//
// On CPUs it is plain lax. Python: jflux/_ops/products/_activation_gradient.py.
#ifndef JFLUX_OPS_ACTIVATION_GRADIENT_ACTIVATION_GRADIENT_H_
#define JFLUX_OPS_ACTIVATION_GRADIENT_ACTIVATION_GRADIENT_H_

#include <cstdint>
#include <string>

#include "core/activation.h"
#include "core/format.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kActivationGradientId{45};
inline constexpr OpFormats kActivationGradientFormats{
    SetOf(DType::kF16, DType::kBF16, DType::kF32), SetOf(DType::kF16, DType::kBF16, DType::kF32)};

struct ActivationGradientParams {
  int64_t rows, columns;  // of each array
  int64_t groups;
  bool gated;
  Activation activation;
  DType dtype;  // of all arrays
};

struct ActivationGradientArrays {
  const void* dy;
  const void* sums[2];         // the second one of a gated activation alone
  const int32_t* group_sizes;  // [groups]
  void* gradients[2];          // of sums
};

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchActivationGradient(const ActivationGradientParams& params,
                              const ActivationGradientArrays& arrays, cudaStream_t stream,
                              std::string* error);

// Loads the kernels on the current device.
bool LoadActivationGradientKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_ACTIVATION_GRADIENT_ACTIVATION_GRADIENT_H_
