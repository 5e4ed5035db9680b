// What numbers become that travel in a quantised wire, for tests.
#ifndef JFLUX_TESTS_CC_WIRES_H_
#define JFLUX_TESTS_CC_WIRES_H_

#include <algorithm>
#include <vector>

#include "core/quantize.h"

namespace jflux {

// Each block of 128 elements, of which the last may be short.
inline std::vector<float> ThroughWire(std::vector<float> row, DType wire) {
  const auto size = static_cast<int64_t>(row.size());
  for (int64_t first = 0; first < size; first += kWireBlock) {
    const int64_t end = std::min(size, first + kWireBlock);
    uint32_t magnitude = 0;
    for (int64_t c = first; c < end; ++c) {
      magnitude = std::max(magnitude, BitsOfFloat(row[c]) & 0x7fffffff);
    }
    const float scale = ScaleOfBlock(magnitude, wire, false);
    for (int64_t c = first; c < end; ++c) {
      row[c] = FloatOfValue(QuantizedValue(row[c], scale, wire), wire) * scale;
    }
  }
  return row;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_WIRES_H_
