// Instantiates the kernels of the forward pass and launches one.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_sm90.cuh"

namespace jflux {
namespace {

struct Kernels {
  static constexpr AttentionPass kPass = AttentionPass::kForward;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::ForwardShape<T, kWidth, kSoftcap>;
    return {reinterpret_cast<const void*>(&attention::ForwardKernel<Shape>), Shape::kSmemBytes};
  }
};

}  // namespace

bool LoadFlashAttention(std::string* error) { return attention::Load<Kernels>(error); }

bool LaunchFlashAttention(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                          cudaStream_t stream, std::string* error) {
  return attention::Launch<Kernels>(p, arrays, LoadFlashAttention, stream, error);
}

}  // namespace jflux
