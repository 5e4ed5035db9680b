// The operands and attributes of a decoding kernel's handler, flash_decode's and latent_decode's.
#ifndef JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CALL_H_
#define JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CALL_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "ops/flash_decode/flash_decode.h"
#include "runtime/ffi.h"
#include "runtime/local_cuda_call.h"

namespace jflux {

struct DecodeAttributes {
  int64_t capacity = 0;
  double scale = 0;
  double softcap = 0;
  int64_t splits = 0;
  bool paged = false;
  bool alibi = false;

  void Read(AttributeReader& read) {
    read("capacity", &capacity)("scale", &scale)("softcap", &softcap)("splits", &splits);
    read("paged", &paged)("alibi", &alibi);
  }
};

struct DecodeCall {
  FlashDecodeParams params{};
  FlashDecodeArrays arrays{};
};

// The parameters of a call of operands q, k, v, bounds[, scales of k, of v][, block_table][,
// slopes] and results out[, parts]; empty if they do not fit together. `value_width`: how many
// elements of a key are its value, and then there is no v; 0: there is.
inline std::optional<DecodeCall> DecodeCallOf(const DecodeAttributes& a,
                                              ffi::RemainingArgs operands,
                                              ffi::RemainingRets results, int64_t value_width) {
  const size_t caches = value_width == 0 ? 2 : 1;
  const size_t without_scales = 2 + caches + a.paged + a.alibi;
  const bool scaled = operands.size() == without_scales + caches;
  if ((!scaled && operands.size() != without_scales) || a.splits < 1 ||
      results.size() != (a.splits > 1 ? 2 : 1) || (value_width != 0 && (scaled || a.alibi))) {
    return std::nullopt;
  }
  const auto q = *operands.get<ffi::AnyBuffer>(0), k = *operands.get<ffi::AnyBuffer>(1),
             v = *operands.get<ffi::AnyBuffer>(caches),  // or k
      bounds = *operands.get<ffi::AnyBuffer>(1 + caches);
  const auto dtype = DTypeOf(q.element_type());
  if (!dtype || q.dimensions().size() != 4 || k.dimensions().size() != 4) return std::nullopt;
  DecodeCall call;
  FlashDecodeParams& p = call.params;
  p.batch = q.dimensions()[0];
  p.tokens = q.dimensions()[1];
  p.heads = q.dimensions()[2];
  p.width = q.dimensions()[3];
  p.groups = k.dimensions()[2];
  p.splits = a.splits;
  p.capacity = a.capacity;
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.dtype = *dtype;
  FlashDecodeArrays& arrays = call.arrays;
  const int64_t first = k.dimensions()[0], second = k.dimensions()[1];
  if (a.paged) {
    const auto table = *operands.get<ffi::AnyBuffer>(operands.size() - 1 - a.alibi);
    if (table.dimensions().size() != 2) return std::nullopt;
    const int64_t entries = table.dimensions()[1];
    if (!Is(table, ffi::S32, {p.batch, entries})) return std::nullopt;
    p.pages = first;
    p.page_size = second;
    p.positions = entries * second;
    arrays.block_table = static_cast<const int32_t*>(table.untyped_data());
  } else {
    if (first != p.batch) return std::nullopt;
    p.positions = second;
  }
  if (p.batch < 1 || p.tokens < 1 || p.heads < 1 || p.groups < 1 || p.width < 1 ||
      p.heads % p.groups != 0 || p.positions < 1 || p.positions > INT32_MAX / 2 ||
      p.capacity < p.positions || p.capacity > INT32_MAX || p.capacity % p.positions != 0) {
    return std::nullopt;
  }
  const int64_t columns = (value_width == 0 ? p.width : value_width) + 1;
  auto out = *results.get<ffi::AnyBuffer>(0);
  for (const ffi::AnyBuffer* cache : {&k, &v}) {
    const auto type = scaled ? ffi::F8E4M3FN : q.element_type();
    if (!Is(*cache, type, {first, second, p.groups, p.width})) return std::nullopt;
  }
  if (a.alibi) {
    const auto slopes = *operands.get<ffi::AnyBuffer>(operands.size() - 1);
    if (!Is(slopes, ffi::F32, {p.heads})) return std::nullopt;
    arrays.slopes = static_cast<const float*>(slopes.untyped_data());
  }
  if (scaled) {
    const auto of_k = *operands.get<ffi::AnyBuffer>(4), of_v = *operands.get<ffi::AnyBuffer>(5);
    const bool of_rows = Is(of_k, ffi::F32, {first, second, p.groups, 1});
    const std::initializer_list<int64_t> rows = {first, second, p.groups, 1};
    const std::initializer_list<int64_t> heads = {1, 1, p.groups, 1};
    for (const ffi::AnyBuffer* scale : {&of_k, &of_v}) {
      if (!Is(*scale, ffi::F32, of_rows ? rows : heads)) return std::nullopt;
    }
    p.scales = of_rows ? CacheScales::kOfRows : CacheScales::kOfHeads;
    arrays.k_scale = static_cast<const float*>(of_k.untyped_data());
    arrays.v_scale = static_cast<const float*>(of_v.untyped_data());
  }
  if (!Is(bounds, ffi::S32, {p.batch, 4}) ||
      !Is(*out, ffi::F32, {p.batch, p.tokens, p.heads, columns})) {
    return std::nullopt;
  }
  if (p.splits > 1) {
    auto parts = *results.get<ffi::AnyBuffer>(1);
    if (!Is(*parts, ffi::F32, {p.splits, p.batch, p.tokens, p.heads, columns})) return std::nullopt;
    arrays.parts = static_cast<float*>(parts->untyped_data());
  }
  arrays.q = q.untyped_data();
  arrays.k = k.untyped_data();
  if (value_width == 0) arrays.v = v.untyped_data();
  arrays.bounds = static_cast<const DecodeBounds*>(bounds.untyped_data());
  arrays.out = static_cast<float*>(out->untyped_data());
  return call;
}

// Launches a call by `launch`, LaunchFlashDecode or the like; refuses it after a fault that a
// kernel before has left, and which did not end it.
template <typename Launch>
ffi::Error LaunchDecode(OpId op, const std::optional<DecodeCall>& call, Launch&& launch,
                        cudaStream_t stream) {
  if (!call) return InvalidArgument(std::string(NameOf(op)) + ": operands do not fit");
  const LocalState device = StateOfThisDevice();
  if (device.fault) return ffi::Error(ffi::ErrorCode::kInternal, *device.fault);
  return LaunchLocalCuda(op, [&](std::string* error) {
    return launch(call->params, call->arrays, device.state, stream, error);
  });
}

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CALL_H_
