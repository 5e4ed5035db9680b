// Instantiates the portable kernels of attention's forward pass and launches one.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_sm80.cuh"

namespace jflux {
namespace {

struct Kernels {
  static constexpr AttentionPass kPass = AttentionPass::kForward;
  static constexpr int kMostWidth = 256;
  using Args = attention::Args;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::ForwardShape80<T, kWidth, kSoftcap>;
    return {reinterpret_cast<const void*>(&attention::ForwardKernel80<Shape>), Shape::kThreads,
            Shape::kSmemBytes};
  }
  static bool SetArgs(int width, const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                      Args* args, std::string* error) {
    return attention::SetArgs(kPass, width, p, arrays, args, error);
  }
};

}  // namespace

bool LoadFlashAttentionKernels80(std::string* error) { return attention::Load<Kernels>(error); }

bool LaunchFlashAttention80(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                            cudaStream_t stream, std::string* error) {
  return LoadOnce(LoadFlashAttentionKernels80, error) &&
         attention::Launch<Kernels>(p, arrays, stream, error);
}

}  // namespace jflux
