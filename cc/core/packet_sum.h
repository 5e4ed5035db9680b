// Sums over ranks of packets' payloads: in float32 (float64 for float64), in rank order, rounded
// once. The order is fixed, so every rank and every run gets the same bits.
#ifndef JFLUX_CORE_PACKET_SUM_H_
#define JFLUX_CORE_PACKET_SUM_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numbers.h"
#include "core/packet.h"

namespace jflux {

// The payload of one packet as numbers. T: BF16, F16 (core/numbers.h), float or double.
template <typename T>
struct PayloadSum {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static constexpr int kCount = kPacketPayload / sizeof(T);
  Wide value[kCount];

  static JFLUX_HD PayloadSum Of(uint64_t payload) {
    T numbers[kCount];
    std::memcpy(numbers, &payload, sizeof(payload));
    PayloadSum sum;
    for (int i = 0; i < kCount; ++i) sum.value[i] = static_cast<Wide>(numbers[i]);
    return sum;
  }
  JFLUX_HD void Add(const PayloadSum& other) {
    for (int i = 0; i < kCount; ++i) value[i] += other.value[i];
  }
  JFLUX_HD uint64_t Rounded() const {
    T numbers[kCount];
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_arithmetic_v<T>) {
        numbers[i] = value[i];
      } else {
        numbers[i] = T::From(value[i]);
      }
    }
    uint64_t payload;
    std::memcpy(&payload, numbers, sizeof(payload));
    return payload;
  }
};

// Waits for packet index_of(src) from each peer and adds them to `local`, this rank's payload.
template <typename T, typename IndexOf>
JFLUX_HD bool SumOverRanks(const PacketCall& call, uint64_t local, IndexOf&& index_of,
                           PayloadSum<T>* total) {
  uint64_t payload[kMaxRanks];
  if (!call.Await(payload, [](int) { return true; }, index_of)) return false;
  const auto of = [&](int src) {
    return PayloadSum<T>::Of(src == call.view.rank ? local : payload[src]);
  };
  *total = of(0);
  JFLUX_UNROLL
  for (int src = 1; src < kMaxRanks; ++src) {
    if (src < call.view.world) total->Add(of(src));
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_CORE_PACKET_SUM_H_
