// Instantiates the kernels of the backward pass that compute dq, and launches one.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_backward_sm90.cuh"

namespace jflux {
namespace {

struct Kernels {
  static constexpr AttentionPass kPass = AttentionPass::kDq;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::BackwardShape<T, kWidth, kSoftcap, kPass>;
    return {reinterpret_cast<const void*>(&attention::BackwardKernel<Shape>), Shape::kSmemBytes};
  }
};

}  // namespace

bool LoadFlashAttentionDq(std::string* error) { return attention::Load<Kernels>(error); }

bool LaunchFlashAttentionDq(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                            cudaStream_t stream, std::string* error) {
  return attention::Launch<Kernels>(p, arrays, LoadFlashAttentionDq, stream, error);
}

}  // namespace jflux
