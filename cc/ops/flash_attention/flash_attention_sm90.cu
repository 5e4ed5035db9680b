// Instantiates Hopper's kernels of attention and launches those of a pass.
#include "ops/flash_attention/flash_attention_backward_sm90.cuh"
#include "ops/flash_attention/flash_attention_maps_cuda.h"
#include "ops/flash_attention/flash_attention_sm90.cuh"
#include "ops/flash_attention/flash_attention_wide_backward_sm90.cuh"

namespace jflux {
namespace {

template <AttentionPass kPass_>
struct Kernels {
  static constexpr AttentionPass kPass = kPass_;
  using Args = attention::MapArgs;
  static bool SetArgs(int width, const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                      Args* args, std::string* error) {
    return attention::SetMapArgs(kPass, width, p, arrays, args, error);
  }
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    if constexpr (kPass == AttentionPass::kForward) {
      using Shape = attention::ForwardShape<T, kWidth, kSoftcap>;
      return Of<Shape>(&attention::ForwardKernel<Shape>);
    } else {
      using Shape = attention::BackwardShape<T, kWidth, kSoftcap, kPass>;
      if constexpr (Shape::kIsWide) {
        return Of<Shape>(&attention::WideBackwardKernel<Shape>);
      } else {
        return Of<Shape>(&attention::BackwardKernel<Shape>);
      }
    }
  }

 private:
  template <typename Shape>
  static attention::Instance Of(void (*kernel)(Args)) {
    return {reinterpret_cast<const void*>(kernel), attention::kThreads, Shape::kSmemBytes};
  }
};
using Forward = Kernels<AttentionPass::kForward>;
using Dkv = Kernels<AttentionPass::kDkv>;
using Dq = Kernels<AttentionPass::kDq>;

bool LoadForward(std::string* error) { return attention::Load<Forward>(error); }

bool LoadBackward(std::string* error) {
  return attention::Load<Dkv>(error) && attention::Load<Dq>(error);
}

}  // namespace

bool LoadFlashAttentionKernels(std::string* error) {
  const auto hopper = [](std::string* e) { return LoadForward(e) && LoadBackward(e); };
  return LoadBothLoops(hopper, LoadFlashAttentionKernels80, error);
}

bool LaunchFlashAttention(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                          cudaStream_t stream, std::string* error) {
  if (p.portable) return LaunchFlashAttention80(p, arrays, stream, error);
  return LoadOnce(LoadForward, error) && attention::Launch<Forward>(p, arrays, stream, error);
}

bool LaunchFlashAttentionBackward(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                                  cudaStream_t stream, std::string* error) {
  if (p.portable) return LaunchFlashAttentionBackward80(p, arrays, stream, error);
  return LoadOnce(LoadBackward, error) && attention::Launch<Dkv>(p, arrays, stream, error) &&
         attention::Launch<Dq>(p, arrays, stream, error);
}

}  // namespace jflux
