// Attributes, operands and results of calls of attention, as the FFI handlers find them.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_OPERANDS_H_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_OPERANDS_H_

#include <cmath>
#include <initializer_list>

#include "core/numbers.h"
#include "ops/flash_attention/flash_attention.h"
#include "runtime/ffi.h"

namespace jflux {

// Attributes of a call of attention.
struct AttentionAttributes {
  double scale = 0;
  double softcap = 0;
  int64_t low = 0;
  int64_t span = 0;
  bool portable = false;

  void Read(AttributeReader& read) {
    read("scale", &scale)("softcap", &softcap)("low", &low)("span", &span)("portable", &portable);
  }
};

// Takes a call's operands, and then its results, one after the other, and checks that they fit.
// `ranks`: those whose keys queries attend to. If there are several, keys are numbered as
// ops/all_gather_attention/all_gather_attention.h says.
class AttentionReader {
 public:
  AttentionReader(ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t ranks = 1)
      : operands_(operands), results_(results), ranks_(ranks) {}

  // q, k and v.
  bool ReadHeads(const AttentionAttributes& a) {
    if (operands_.size() < 3) return false;
    const auto q = Take(), k = Take(), v = Take();
    const auto dtype = DTypeOf(q.element_type());
    if (!dtype || q.dimensions().size() != 4 || k.dimensions().size() != 4) return false;
    type_ = q.element_type();
    params.batch = q.dimensions()[0];
    params.queries = q.dimensions()[1];
    params.heads = q.dimensions()[2];
    params.width = q.dimensions()[3];
    params.keys = k.dimensions()[1];
    params.groups = k.dimensions()[2];
    params.dtype = *dtype;
    arrays.q = q.untyped_data();
    arrays.k = k.untyped_data();
    arrays.v = v.untyped_data();
    for (const ffi::AnyBuffer* keys : {&k, &v}) {
      if (!IsOfKeys(*keys, type_)) return false;
    }
    if (params.batch < 1 || params.heads < 1 || params.groups < 1 || params.queries < 1 ||
        params.keys < 1 || params.heads % params.groups != 0 || params.queries > kFurthest ||
        params.keys > kFurthest / ranks_) {
      return false;
    }
    params.scale = a.scale;
    params.softcap = a.softcap;
    params.portable = a.portable;
    params.low = static_cast<int32_t>(a.low);
    params.span = static_cast<uint32_t>(a.span);
    return a.scale > 0 && std::isfinite(a.scale) && a.softcap >= 0 && std::isfinite(a.softcap) &&
           a.low >= -kFurthest && a.span >= 0 && a.low + a.span <= kFurthest;
  }

  // do, base and delta.
  bool ReadCotangents() {
    if (operands_.size() < next_ + 3) return false;
    const auto d_out = Take(), base = Take(), delta = Take();
    arrays.d_out = d_out.untyped_data();
    arrays.base = static_cast<const float*>(base.untyped_data());
    arrays.delta = static_cast<const float*>(delta.untyped_data());
    for (const ffi::AnyBuffer* rows : {&base, &delta}) {
      if (!Is(*rows, ffi::F32, {params.batch, params.heads, Padded(params.queries)})) return false;
    }
    return IsOfQueries(d_out, type_);
  }

  // The positions of queries and of keys.
  bool ReadPositions() {
    if (operands_.size() < next_ + 2) return false;
    const auto queries = Take(), keys = Take();
    if (queries.dimensions().size() != 2) return false;
    params.position_batches = queries.dimensions()[0];
    arrays.q_positions = static_cast<const int32_t*>(queries.untyped_data());
    arrays.k_positions = static_cast<const int32_t*>(keys.untyped_data());
    return IsBatch(params.position_batches) &&
           Is(queries, ffi::S32, {params.position_batches, Padded(params.queries)}) &&
           Is(keys, ffi::S32, {params.position_batches, PaddedKeys()});
  }

  // Kinds of blocks, for a pass, and the order of their rows.
  bool ReadBlocks(AttentionPass pass) {
    if (operands_.size() < next_ + 2) return false;
    const auto kinds = Take(), order = Take();
    if (kinds.dimensions().size() != 3) return false;
    const AttentionBlocks block = BlocksOf(pass, static_cast<int>(Min<int64_t>(256, params.width)));
    const int64_t q_blocks = CeilDiv<int64_t>(params.queries, block.queries);
    const int64_t k_blocks =
        ranks_ == 1 ? CeilDiv<int64_t>(params.keys, block.keys) : PaddedKeys() / block.keys;
    const bool by_keys = pass == AttentionPass::kDkv;
    params.block_batches = kinds.dimensions()[0];
    (by_keys ? arrays.blocks_by_keys : arrays.blocks) =
        static_cast<const int8_t*>(kinds.untyped_data());
    (by_keys ? arrays.order_by_keys : arrays.order) =
        static_cast<const int32_t*>(order.untyped_data());
    return IsBatch(params.block_batches) &&
           Is(order, ffi::S32, {params.block_batches * (by_keys ? k_blocks : q_blocks)}) &&
           Is(kinds, ffi::S8,
              {params.block_batches, by_keys ? k_blocks : q_blocks, by_keys ? q_blocks : k_blocks});
  }

  // The segments of queries and of keys, if there are any. They are the last operands.
  bool ReadSegments() {
    if (operands_.size() == next_) return true;
    if (operands_.size() != next_ + 2) return false;
    const auto queries = Take(), keys = Take();
    arrays.q_segments = static_cast<const int32_t*>(queries.untyped_data());
    arrays.k_segments = static_cast<const int32_t*>(keys.untyped_data());
    return Is(queries, ffi::S32, {params.batch, Padded(params.queries)}) &&
           Is(keys, ffi::S32, {params.batch, PaddedKeys()});
  }

  bool ReadOutputs() {
    if (results_.size() != 2) return false;
    auto out = *results_.get<ffi::AnyBuffer>(0), lse = *results_.get<ffi::AnyBuffer>(1);
    params.wide_out = out->element_type() == ffi::F32;
    arrays.out = out->untyped_data();
    arrays.lse = static_cast<float*>(lse->untyped_data());
    return IsOfQueries(*out, params.wide_out ? ffi::F32 : type_) &&
           Is(*lse, ffi::F32, {params.batch, params.queries, params.heads});
  }

  // dq, dk and dv.
  bool ReadGradients() {
    if (results_.size() != 3) return false;
    auto dq = *results_.get<ffi::AnyBuffer>(0), dk = *results_.get<ffi::AnyBuffer>(1),
         dv = *results_.get<ffi::AnyBuffer>(2);
    arrays.dq = static_cast<float*>(dq->untyped_data());
    arrays.dk = static_cast<float*>(dk->untyped_data());
    arrays.dv = static_cast<float*>(dv->untyped_data());
    return IsOfQueries(*dq, ffi::F32) && IsOfKeys(*dk, ffi::F32) && IsOfKeys(*dv, ffi::F32);
  }

  FlashAttentionParams params{};
  FlashAttentionArrays arrays{};

 private:
  int64_t PaddedKeys() const { return ranks_ * Padded(params.keys); }
  ffi::AnyBuffer Take() { return *operands_.get<ffi::AnyBuffer>(next_++); }
  bool IsBatch(int64_t count) const { return count == 1 || count == params.batch; }
  bool IsOfQueries(const ffi::AnyBuffer& b, ffi::DataType type) const {
    return Is(b, type, {params.batch, params.queries, params.heads, params.width});
  }
  bool IsOfKeys(const ffi::AnyBuffer& b, ffi::DataType type) const {
    return Is(b, type, {params.batch, params.keys, params.groups, params.width});
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  int64_t ranks_;
  size_t next_ = 0;
  ffi::DataType type_{};
};

}  // namespace jflux

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_OPERANDS_H_
