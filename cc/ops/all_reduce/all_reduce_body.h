// The algorithms of all_reduce, for one of the threads that share a rank's part: of a kernel's, or
// the CPU back end's only one. Sums are in float32 (float64 for float64) and in rank order, and are
// rounded once: the same bits on all ranks, in each run, and from each algorithm.
#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numbers.h"
#include "core/packet.h"
#include "ops/all_reduce/all_reduce.h"

namespace jflux {

// A packet's payload as numbers. T: BF16, F16 (core/numbers.h), float or double.
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

template <typename T>
struct AllReduceBody {
  const AllReduceParams& p;
  const AllReduceArrays& arrays;
  const PacketCall& call;

  // The part of thread `thread` of so many. False if a wait failed.
  JFLUX_HD bool Run(int64_t thread, int64_t threads) const {
    return p.algorithm == AllReduceAlgorithm::kOneShot ? OneShot(thread, threads)
                                                       : TwoShot(thread, threads);
  }

 private:
  JFLUX_HD bool OneShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units();
    const int rank = call.view.rank;
    for (int64_t u = thread; u < units; u += threads) {
      const uint64_t own = Load(u);
      for (int d = 1; d < p.world; ++d) Send((rank + d) % p.world, rank * units + u, own);
    }
    for (int64_t u = thread; u < units; u += threads) {
      uint64_t sum;
      if (!Sum(Load(u), [&](int src) { return src * units + u; }, &sum)) return false;
      Store(u, sum);
    }
    return true;
  }

  JFLUX_HD bool TwoShot(int64_t thread, int64_t threads) const {
    const int64_t units = p.Units(), shard = p.ShardUnits(), sums = p.world * shard;
    const int rank = call.view.rank;
    const auto size_of = [&](int owner) { return Min(shard, units - owner * shard); };
    for (int64_t u = thread; u < shard; u += threads) {
      for (int d = 1; d < p.world; ++d) {
        const int owner = (rank + d) % p.world;
        if (u < size_of(owner)) Send(owner, rank * shard + u, Load(owner * shard + u));
      }
    }
    for (int64_t u = thread; u < size_of(rank); u += threads) {
      uint64_t sum;
      if (!Sum(Load(rank * shard + u), [&](int src) { return src * shard + u; }, &sum)) {
        return false;
      }
      for (int d = 1; d < p.world; ++d) {
        Send((rank + d) % p.world, sums + rank * shard + u, sum);
      }
      Store(rank * shard + u, sum);
    }
    for (int64_t u = thread; u < shard; u += threads) {
      uint64_t payload[kMaxRanks];
      const auto has = [&](int src) { return u < size_of(src); };
      if (!call.Await(payload, has, [&](int src) { return sums + src * shard + u; })) return false;
      JFLUX_UNROLL
      for (int src = 0; src < kMaxRanks; ++src) {
        if (src < p.world && src != rank && has(src)) Store(src * shard + u, payload[src]);
      }
    }
    return true;
  }

  // Of `own` and the peers' packets index_of(src).
  template <typename IndexOf>
  JFLUX_HD bool Sum(uint64_t own, IndexOf&& index_of, uint64_t* sum) const {
    uint64_t payload[kMaxRanks];
    if (!call.Await(payload, [](int) { return true; }, index_of)) return false;
    const auto of = [&](int src) {
      return PayloadSum<T>::Of(src == call.view.rank ? own : payload[src]);
    };
    PayloadSum<T> total = of(0);
    JFLUX_UNROLL
    for (int src = 1; src < kMaxRanks; ++src) {
      if (src < p.world) total.Add(of(src));
    }
    *sum = total.Rounded();
    return true;
  }

  JFLUX_HD void Send(int peer, int64_t index, uint64_t payload) const {
    StorePacket(call.At(peer, index), payload, call.epoch);
  }

  using Word = uint64_t __attribute__((may_alias));

  JFLUX_HD uint64_t Load(int64_t unit) const {
    const char* from = static_cast<const char*>(arrays.x) + unit * kPacketPayload;
    const int64_t left = p.Bytes() - unit * kPacketPayload;
    if (left >= kPacketPayload) return *reinterpret_cast<const Word*>(from);
    uint64_t payload = 0;
    for (int64_t i = 0; i < left; ++i) {
      payload |= static_cast<uint64_t>(static_cast<uint8_t>(from[i])) << (8 * i);
    }
    return payload;
  }
  JFLUX_HD void Store(int64_t unit, uint64_t payload) const {
    char* to = static_cast<char*>(arrays.y) + unit * kPacketPayload;
    const int64_t left = p.Bytes() - unit * kPacketPayload;
    if (left >= kPacketPayload) {
      *reinterpret_cast<Word*>(to) = payload;
      return;
    }
    for (int64_t i = 0; i < left; ++i) to[i] = static_cast<char>(payload >> (8 * i));
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_BODY_H_
