// Results that a kernel has quantised: what they are, from the same results in float32.
#ifndef JFLUX_TESTS_CC_SIMT_QUANTIZED_H_
#define JFLUX_TESTS_CC_SIMT_QUANTIZED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/numbers.h"
#include "gpu/gemm_config.h"
#include "simt/values.h"

namespace jflux::simt {

// e4m3 [rows, n], of which 1 x kScaleBlock have an entry of scale [rows, blocks of n].
struct QuantizedArray {
  int64_t n, blocks;
  Array<uint8_t> values;
  Array<float> scale;

  QuantizedArray(int64_t rows, int64_t n)
      : n(n), blocks(CeilDiv<int64_t>(n, kScaleBlock)), values(rows * n), scale(rows * blocks) {}

  // How many values and scales have other bits than those of `y` [rows, n]. A NaN is one, whatever
  // its bits are.
  int64_t Wrong(const Array<float>& y, Quantizing by) const {
    constexpr float kMost = 448;
    int64_t wrong = 0;
    for (int64_t b = 0; b < scale.size(); ++b) {
      const int64_t first = b / blocks * n + b % blocks * kScaleBlock;
      const int64_t last = Min(first + kScaleBlock, (b / blocks + 1) * n);
      float largest = 0, want = std::numeric_limits<float>::quiet_NaN();
      bool is_finite = true;
      for (int64_t i = first; i < last; ++i) {
        is_finite &= std::isfinite(y.data[i]);
        largest = std::max(largest, std::abs(y.data[i]));
      }
      if (is_finite) {
        want = std::max(largest / kMost, std::numeric_limits<float>::min());
        if (by == Quantizing::kByPowersOfTwo) want = std::exp2(std::ceil(std::log2(want)));
        if (largest == 0) want = 1;
      }
      wrong += is_finite ? scale.data[b] != want : !std::isnan(scale.data[b]);
      for (int64_t i = first; i < last; ++i) {
        const Number<DType::kF8E4M3FN> value{values.data[i]};
        const float ratio = std::clamp(y.data[i] / want, -kMost, kMost);
        wrong += is_finite ? value.bits != Number<DType::kF8E4M3FN>::From(ratio).bits
                           : !std::isnan(float{value});
      }
    }
    return wrong;
  }
};

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_QUANTIZED_H_
