// Arrays as units: 8 bytes each, the payload of one LL packet. The last unit may be partial.
#ifndef JFLUX_CORE_UNITS_H_
#define JFLUX_CORE_UNITS_H_

#include <cstdint>

#include "core/packet.h"

namespace jflux {

using UnitWord = uint64_t __attribute__((may_alias));

// `array` has `bytes` bytes and is 8-byte aligned.
JFLUX_HD uint64_t LoadUnit(const void* array, int64_t unit, int64_t bytes) {
  const char* from = static_cast<const char*>(array) + unit * kPacketPayload;
  const int64_t left = bytes - unit * kPacketPayload;
  if (left >= kPacketPayload) return *reinterpret_cast<const UnitWord*>(from);
  uint64_t payload = 0;
  for (int64_t i = 0; i < left; ++i) {
    payload |= static_cast<uint64_t>(static_cast<uint8_t>(from[i])) << (8 * i);
  }
  return payload;
}

JFLUX_HD void StoreUnit(void* array, int64_t unit, int64_t bytes, uint64_t payload) {
  char* to = static_cast<char*>(array) + unit * kPacketPayload;
  const int64_t left = bytes - unit * kPacketPayload;
  if (left >= kPacketPayload) {
    *reinterpret_cast<UnitWord*>(to) = payload;
    return;
  }
  for (int64_t i = 0; i < left; ++i) to[i] = static_cast<char>(payload >> (8 * i));
}

// An array [outer][world][inner bytes], and the shard [:, r] of each rank r. With world == 1 the
// only shard is the array.
struct Shards {
  int32_t world;
  int64_t outer, inner;  // inner: in bytes

  JFLUX_HD int64_t Bytes() const { return outer * inner; }
  JFLUX_HD int64_t Offset(int shard, int64_t o, int64_t i) const {
    return (o * world + shard) * inner + i;
  }

  // Unit `unit` of the shard. A shard's bytes continue from one row of `inner` to the next.
  JFLUX_HD uint64_t Load(const void* array, int shard, int64_t unit) const {
    const char* from = static_cast<const char*>(array);
    if (inner % kPacketPayload == 0) {
      return *reinterpret_cast<const UnitWord*>(from + WholeUnit(shard, unit));
    }
    uint64_t payload = 0;
    ForBytes(shard, unit, [&](int64_t offset, int i) {
      payload |= static_cast<uint64_t>(static_cast<uint8_t>(from[offset])) << (8 * i);
    });
    return payload;
  }
  JFLUX_HD void Store(void* array, int shard, int64_t unit, uint64_t payload) const {
    char* to = static_cast<char*>(array);
    if (inner % kPacketPayload == 0) {
      *reinterpret_cast<UnitWord*>(to + WholeUnit(shard, unit)) = payload;
      return;
    }
    ForBytes(shard, unit,
             [&](int64_t offset, int i) { to[offset] = static_cast<char>(payload >> (8 * i)); });
  }

 private:
  JFLUX_HD int64_t WholeUnit(int shard, int64_t unit) const {
    const int64_t per_row = inner / kPacketPayload, o = Quotient(unit, per_row);
    return Offset(shard, o, (unit - o * per_row) * kPacketPayload);
  }
  // visit(offset in the array, byte of the unit).
  template <typename Visit>
  JFLUX_HD void ForBytes(int shard, int64_t unit, Visit&& visit) const {
    const int64_t first = unit * kPacketPayload;
    const auto count = static_cast<int>(Min(kPacketPayload, Bytes() - first));
    int64_t o = Quotient(first, inner), i = first - o * inner;
    for (int b = 0; b < count; ++b) {
      visit(Offset(shard, o, i), b);
      if (++i == inner) {
        i = 0;
        ++o;
      }
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_UNITS_H_
