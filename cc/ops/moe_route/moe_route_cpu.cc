// The CPU back end of moe_route.
#include <algorithm>
#include <vector>

#include "ops/moe_route/moe_route.h"

namespace jflux {

std::string MoeRouteCpu(const MoeRouteParams& p, const MoeRouteArrays& arrays) {
  std::fill_n(arrays.counts, p.experts, 0);
  for (int64_t s = 0; s < p.slots; ++s) {
    const int32_t e = arrays.indices[s];
    if (e < -1 || e >= p.experts) {
      return "slot " + std::to_string(s) + " of topk_indices is " + std::to_string(e) +
             ", and there are " + std::to_string(p.experts) + " experts";
    }
    if (e >= 0 && (p.capacity < 0 || arrays.counts[e] < p.capacity)) ++arrays.counts[e];
  }
  arrays.offsets[0] = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    arrays.offsets[e + 1] = arrays.offsets[e] + arrays.counts[e];
  }
  std::fill_n(arrays.source, p.slots, -1);
  std::vector<int32_t> next(arrays.offsets, arrays.offsets + p.experts);
  for (int64_t s = 0; s < p.slots; ++s) {
    const int32_t e = arrays.indices[s];
    const bool has_row = e >= 0 && next[e] < arrays.offsets[e + 1];
    arrays.destination[s] = has_row ? next[e]++ : -1;
    if (has_row) arrays.source[arrays.destination[s]] = static_cast<int32_t>(s);
  }
  return "";
}

}  // namespace jflux
