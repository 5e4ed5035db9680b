// What the handlers of grouped_matmul and grouped_matmul_scaled read alike.
#ifndef JFLUX_OPS_GROUPED_MATMUL_CALL_FFI_H_
#define JFLUX_OPS_GROUPED_MATMUL_CALL_FFI_H_

#include <optional>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/ffi.h"
#include "runtime/handlers.h"

namespace jflux {

// Operands x_0[, x_1], w_0[, w_1], group_sizes[, row_scale], and of grouped_matmul_scaled x_scale,
// w_scale_0[, w_scale_1 with a gate]. Results y[, sums_0[, sums_1]], or a y that is quantised, and
// its scale.
struct GroupedAttributes {
  int64_t activation = 0;      // number of an Activation
  bool fill = true;            // rows of no group are zeros
  bool gated = false;          // there is w_1
  bool portable = false;       // by the main loop of gpu/gemm_sm80.cuh
  bool scaled = false;         // there is row_scale
  double share = 1;            // of the rows, which groups have, about
  bool sums = false;           // there are sums, one for each weight
  int64_t terms = 1;           // 2: there are x_1 and w_1
  Int64s tile;                 // columns and cluster_m of a TileChoice; empty: none
  bool transpose_rhs = false;  // weights are [E, n, k]

  void Read(AttributeReader& read) {
    read("activation", &activation)("fill", &fill)("gated", &gated)("portable", &portable)(
        "scaled", &scaled)("share", &share)("sums", &sums)("terms", &terms)("tile", &tile)(
        "transpose_rhs", &transpose_rhs);
  }
};

inline TileChoice TileChoiceOf(const Int64s& tile) {
  if (tile.size() != 2) return {};
  return {static_cast<int32_t>(tile[0]), static_cast<int32_t>(tile[1])};
}

// The parameters of the call; empty if operands and results do not fit together.
struct GroupedCall {
  GroupedMatmulParams params{};
  GroupedMatmulArrays arrays{};
};

inline std::optional<GroupedCall> GroupedCallOf(const GroupedAttributes& a,
                                                ffi::RemainingArgs operands,
                                                ffi::RemainingRets results,
                                                Scales scales = Scales::kNone,
                                                Quantizing quantize = Quantizing::kNone) {
  const bool has_scales = scales != Scales::kNone, quantizes = quantize != Quantizing::kNone;
  const bool two_terms = a.terms == 2;
  if (a.terms < 1 || a.terms > 2 || (two_terms && a.gated)) return std::nullopt;
  const size_t weights = a.gated || two_terms ? 2 : 1, terms = two_terms ? 2 : 1;
  const size_t sums = a.gated ? 2 : 1;
  const size_t first_scale = terms + weights + 1 + (a.scaled ? 1 : 0);
  if (operands.size() != first_scale + (has_scales ? 1 + sums : 0) ||
      results.size() != 1 + (a.sums ? sums : 0) + (quantizes ? 1 : 0) || (quantizes && a.sums) ||
      !IsActivation(a.activation)) {
    return std::nullopt;
  }
  const auto x = *operands.get<ffi::AnyBuffer>(0), w = *operands.get<ffi::AnyBuffer>(terms);
  auto y = *results.get<ffi::AnyBuffer>(0);
  const FormatSet formats = has_scales ? kAllFormats : kWideFormats;
  const auto dtype = DTypeOf(x.element_type(), formats),
             out_dtype = DTypeOf(y->element_type(), formats);
  if (!dtype || !out_dtype || x.dimensions().size() != 2 || w.dimensions().size() != 3 ||
      y->dimensions().size() != 2) {
    return std::nullopt;
  }
  GroupedCall call;
  GroupedMatmulParams& p = call.params;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.n = y->dimensions()[1];
  p.groups = w.dimensions()[0];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.quantize = quantize;
  if (quantizes) {
    auto scale = *results.get<ffi::AnyBuffer>(1);
    if (*out_dtype != kQuantized ||
        !Is(*scale, ffi::F32, {p.m, CeilDiv<int64_t>(p.n, kScaleBlock)})) {
      return std::nullopt;
    }
    p.out_dtype = DType::kF32;
    call.arrays.y_scale = static_cast<float*>(scale->untyped_data());
  }
  p.transpose_rhs = a.transpose_rhs;
  p.activation = static_cast<Activation>(a.activation);
  p.gated = a.gated;
  p.scaled = a.scaled;
  p.sums = a.sums;
  p.tile = TileChoiceOf(a.tile);
  p.scales = scales;
  p.terms = static_cast<int>(terms);
  p.fill = a.fill;
  p.share = a.share;
  p.portable = a.portable;
  if (p.gated && p.activation == Activation::kNone) return std::nullopt;
  if (p.m == 0 || p.k == 0 || p.n == 0 || p.groups == 0) return std::nullopt;
  GroupedMatmulArrays& arrays = call.arrays;
  for (size_t i = 0; i < terms; ++i) {
    const auto one = *operands.get<ffi::AnyBuffer>(i);
    if (!Is(one, x.element_type(), {p.m, p.k})) return std::nullopt;
    arrays.x[i] = one.untyped_data();
  }
  arrays.y = y->untyped_data();
  if (!Is(*y, y->element_type(), {p.m, p.n})) return std::nullopt;
  for (size_t i = 0; i < weights; ++i) {
    const auto one = *operands.get<ffi::AnyBuffer>(terms + i);
    const int64_t rows = p.transpose_rhs ? p.n : p.k, columns = p.transpose_rhs ? p.k : p.n;
    const auto type = has_scales ? w.element_type() : x.element_type();
    if (!Is(one, type, {p.groups, rows, columns})) return std::nullopt;
    arrays.w[i] = one.untyped_data();
    if (!p.sums || i >= sums) continue;
    auto one_sum = *results.get<ffi::AnyBuffer>(1 + i);
    if (!Is(*one_sum, y->element_type(), {p.m, p.n})) return std::nullopt;
    arrays.sums[i] = one_sum->untyped_data();
  }
  const auto sizes = *operands.get<ffi::AnyBuffer>(terms + weights);
  if (!Is(sizes, ffi::S32, {p.groups})) return std::nullopt;
  arrays.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
  if (p.scaled) {
    const auto scale = *operands.get<ffi::AnyBuffer>(terms + weights + 1);
    if (!Is(scale, ffi::F32, {p.m})) return std::nullopt;
    arrays.row_scale = static_cast<const float*>(scale.untyped_data());
  }
  if (!has_scales) return call;
  const bool of_blocks = HasEntriesOfK(scales);
  const int64_t k_entries = of_blocks ? p.terms * CeilDiv<int64_t>(p.k, kScaleBlock) : 1;
  const int64_t n_entries = of_blocks ? CeilDiv<int64_t>(p.n, kScaleBlock) : p.n;
  const auto floats = [&](size_t i, int64_t size) {
    return FloatsOf(*operands.get<ffi::AnyBuffer>(first_scale + i), size);
  };
  arrays.x_scale = floats(0, p.m * k_entries);
  if (arrays.x_scale == nullptr) return std::nullopt;
  for (size_t i = 0; i < sums; ++i) {
    arrays.w_scale[i] = floats(1 + i, p.groups * n_entries * k_entries);
    if (arrays.w_scale[i] == nullptr) return std::nullopt;
  }
  return call;
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_CALL_FFI_H_
