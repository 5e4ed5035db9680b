// Arrays as units of eight bytes, a packet's payload each; the last one may not be full.
#ifndef JFLUX_CORE_UNITS_H_
#define JFLUX_CORE_UNITS_H_

#include <cstdint>

#include "core/packet.h"

namespace jflux {

using UnitWord = uint64_t __attribute__((may_alias));

// Of an array of so many bytes that starts on a multiple of eight.
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

// One of the `world` shards that an array is made of: the array is [outer][world][inner bytes].
// With a world of one, it is the array.
struct Shards {
  int32_t world;
  int64_t outer, inner;  // inner: bytes

  JFLUX_HD int64_t Bytes() const { return outer * inner; }
  JFLUX_HD int64_t Offset(int shard, int64_t o, int64_t i) const {
    return (o * world + shard) * inner + i;
  }

  // Unit `unit` of the shard, whose bytes go on from one row of `inner` to the next.
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
  // visit(offset in the array, which byte of the unit).
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
