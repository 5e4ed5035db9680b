// Instantiates the kernels of the backward pass that compute dk and dv, and launches one.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_backward_sm90.cuh"

namespace jflux {
namespace {

struct Kernels {
  static constexpr AttentionPass kPass = AttentionPass::kDkv;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::BackwardShape<T, kWidth, kSoftcap, kPass>;
    return {reinterpret_cast<const void*>(&attention::BackwardKernel<Shape>), Shape::kSmemBytes};
  }
};

}  // namespace

bool LoadFlashAttentionDkv(std::string* error) { return attention::Load<Kernels>(error); }

bool LaunchFlashAttentionDkv(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                             cudaStream_t stream, std::string* error) {
  return attention::Launch<Kernels>(p, arrays, LoadFlashAttentionDkv, stream, error);
}

}  // namespace jflux
