// moe_gate: the experts that a router's logits [T, E] choose, and their weights, on one device; and
// moe_gate_gradient, the logits' gradient. With x a token's logits, k choices of a token, and
// sigmoid(x) = 1 / (1 + exp(-x)):
//
//   score      indices [T, k]                     weights [T, k], of the chosen e
//   softmax    the k largest x_e + bias_e         softmax(x)_e
//   sigmoid    the k largest sigmoid(x_e) + bias  sigmoid(x_e)
//
// `normalize` divides a token's weights by their sum, and `scale` multiplies them. The best choice
// comes first, and of equal ones that of the lower index. Numbers are ordered by their bits: NaN
// is the largest, and 0 is larger than -0. A token that the mask leaves out chooses -1, with the
// weight 0; its logits are not looked at, and their gradient is 0. All is computed in float32.
//
// With groups, G of E / G experts that follow each other, a token chooses among the experts of its
// best `top_groups` groups, by their scores, also of a softmax. A group is as good as its best
// expert, with sigmoids as the sum of its two best ones.
//
// The gradient takes the weights' gradient, and what the op gave. It needs the logits too, unless
// the weights are a normalized softmax.
//
// On CPUs both are plain lax. Python: jflux/_ops/experts/moe_gate.py.
#ifndef JFLUX_OPS_MOE_GATE_MOE_GATE_H_
#define JFLUX_OPS_MOE_GATE_MOE_GATE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kMoeGateId{46}, kMoeGateGradientId{47};
inline constexpr OpFormats kMoeGateFormats{SetOf(DType::kF16, DType::kBF16, DType::kF32),
                                           SetOf(DType::kF32)};
inline constexpr OpFormats kMoeGateGradientFormats{kMoeGateFormats.operands,
                                                   kMoeGateFormats.operands};

// That the kernels take.
inline constexpr int64_t kMostGateExperts = 1024, kMostGateSlots = 32, kMostGateGroups = 32;

enum class GateScore : int64_t { kSoftmax, kSigmoid };

struct MoeGateParams {
  int64_t tokens, experts, slots;  // T, E, k
  GateScore score;
  bool normalize;
  float scale;                         // not 0
  DType dtype;                         // of the logits and of their gradient
  int64_t groups = 0, top_groups = 0;  // of the gate alone; 0: it has no groups

  // Whether the gradient depends on the logits, beside the weights.
  bool GradientNeedsLogits() const { return score == GateScore::kSigmoid || !normalize; }
};

struct MoeGateArrays {
  const void* logits;   // [T, E]
  const float* bias;    // [E]; null: zeros
  const uint8_t* mask;  // [T], 0 or 1; null: all are 1
  int32_t* indices;     // [T, k]
  float* weights;       // [T, k]
};

struct MoeGateGradientArrays {
  const float* dweights;   // [T, k]
  const int32_t* indices;  // [T, k]
  const float* weights;    // [T, k]
  const void* logits;      // [T, E]; null if they are not needed
  void* dlogits;           // [T, E]
};

// Enqueue the call on `stream`, on the current device: false and *error if they cannot.
bool LaunchMoeGate(const MoeGateParams& params, const MoeGateArrays& arrays, cudaStream_t stream,
                   std::string* error);
bool LaunchMoeGateGradient(const MoeGateParams& params, const MoeGateGradientArrays& arrays,
                           cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadMoeGateKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_GATE_MOE_GATE_H_
