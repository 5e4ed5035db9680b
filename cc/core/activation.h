// Activations that an epilogue applies to the product. Python reads their names from here
// (runtime/capi.h).
#ifndef JFLUX_CORE_ACTIVATION_H_
#define JFLUX_CORE_ACTIVATION_H_

#include <cstdint>

namespace jflux {

enum class Activation : int32_t { kNone = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

// In the order of Activation, without kNone.
inline constexpr const char* kActivationNames[] = {"gelu", "gelu_tanh", "relu", "silu"};

inline bool IsActivation(int64_t number) { return 0 <= number && number <= 4; }

}  // namespace jflux

#endif  // JFLUX_CORE_ACTIVATION_H_
