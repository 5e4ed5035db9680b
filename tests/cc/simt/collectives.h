// The collectives of a warp. Lanes of the mask wait for each other; a mask that names a lane which
// has ended, or which waits in another collective, fails the run.
#ifndef JFLUX_TESTS_CC_SIMT_COLLECTIVES_H_
#define JFLUX_TESTS_CC_SIMT_COLLECTIVES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

#include "simt/machine.h"

namespace jflux::simt {

template <typename To, typename From>
To BitsAs(const From& v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &v, sizeof(to));
  return to;
}

// What the lanes of a collective have brought; null: a lane that does not take part.
template <typename In>
using InOfLanes = const In* const (&)[32];

// Each lane brings `in` and takes complete(lane, what all lanes bring).
template <typename In, typename Out>
Out Exchange(const char* what, uint32_t mask, const In& in,
             Out (*complete)(int lane, InOfLanes<In> all)) {
  struct Offer {
    In in;
    Out out;
    Out (*complete)(int lane, InOfLanes<In> all);
  } mine{in, {}, complete};
  Meet(what, mask, &mine, [](void* const* offers) {
    const In* all[32]{};
    for (int i = 0; i < 32; ++i) {
      if (offers[i] != nullptr) all[i] = &static_cast<Offer*>(offers[i])->in;
    }
    for (int i = 0; i < 32; ++i) {
      if (offers[i] == nullptr) continue;
      auto* offer = static_cast<Offer*>(offers[i]);
      offer->out = offer->complete(i, all);
    }
  });
  return mine.out;
}

// Of the values that the lanes of the mask bring, the one of lane `from`.
template <typename T>
T Shuffle(uint32_t mask, T value, int from) {
  struct Aimed {
    T value;
    int from;
  };
  return Exchange<Aimed, T>("a shuffle", mask, {value, from}, [](int lane, InOfLanes<Aimed> all) {
    const Aimed* source = all[all[lane]->from];
    if (source == nullptr) Fail("a lane reads, by a shuffle, one that does not take part");
    return source->value;
  });
}

// Op: a struct with T operator()(T, T).
template <typename Op, typename T>
T Reduce(const char* what, uint32_t mask, T value) {
  return Exchange<T, T>(what, mask, value, [](int, InOfLanes<T> all) {
    T sum{};
    bool any = false;
    for (const T* v : all) {
      if (v == nullptr) continue;
      sum = any ? Op()(sum, *v) : *v;
      any = true;
    }
    return sum;
  });
}

inline uint32_t Ballot(const char* what, uint32_t mask, bool value) {
  return Exchange<bool, uint32_t>(what, mask, value, [](int, InOfLanes<bool> all) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) {
      if (all[i] != nullptr && *all[i]) bits |= 1u << i;
    }
    return bits;
  });
}

inline int Lane() { return current->lane; }

}  // namespace jflux::simt

inline void __syncwarp(uint32_t mask = 0xffffffff) {
  jflux::simt::Meet("__syncwarp", mask, nullptr, nullptr);
}
inline uint32_t __activemask() {
  jflux::simt::Fail("__activemask: which lanes run together is nobody's promise");
}
inline uint32_t __ballot_sync(uint32_t mask, int value) {
  return jflux::simt::Ballot("a ballot", mask, value != 0);
}
inline int __any_sync(uint32_t mask, int value) {
  return jflux::simt::Ballot("__any_sync", mask, value != 0) != 0;
}
inline int __all_sync(uint32_t mask, int value) {
  return jflux::simt::Ballot("__all_sync", mask, value != 0) == mask;
}

// The lane that a shuffle of subsections of `width` lanes reads.
template <typename T>
T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
  const int lane = jflux::simt::Lane();
  return jflux::simt::Shuffle(mask, value, lane / width * width + (from & (width - 1)));
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = jflux::simt::Lane(), from = lane - static_cast<int>(delta);
  return jflux::simt::Shuffle(mask, value, from < lane / width * width ? lane : from);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = jflux::simt::Lane(), from = lane + static_cast<int>(delta);
  return jflux::simt::Shuffle(mask, value, from >= (lane / width + 1) * width ? lane : from);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32) {
  const int lane = jflux::simt::Lane(), from = lane ^ bits;
  return jflux::simt::Shuffle(mask, value, from >= (lane / width + 1) * width ? lane : from);
}

template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  return jflux::simt::Exchange<T, uint32_t>("__match_any_sync", mask, value,
                                            [](int lane, jflux::simt::InOfLanes<T> all) {
                                              uint32_t bits = 0;
                                              for (int i = 0; i < 32; ++i) {
                                                if (all[i] != nullptr && *all[i] == *all[lane])
                                                  bits |= 1u << i;
                                              }
                                              return bits;
                                            });
}

template <typename T>
T __reduce_add_sync(uint32_t mask, T value) {
  return jflux::simt::Reduce<std::plus<T>>("__reduce_add_sync", mask, value);
}
template <typename T>
T __reduce_or_sync(uint32_t mask, T value) {
  return jflux::simt::Reduce<std::bit_or<T>>("__reduce_or_sync", mask, value);
}
template <typename T>
T __reduce_and_sync(uint32_t mask, T value) {
  return jflux::simt::Reduce<std::bit_and<T>>("__reduce_and_sync", mask, value);
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value) {
  struct Max {
    T operator()(T a, T b) const { return std::max(a, b); }
  };
  return jflux::simt::Reduce<Max>("__reduce_max_sync", mask, value);
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value) {
  struct Min {
    T operator()(T a, T b) const { return std::min(a, b); }
  };
  return jflux::simt::Reduce<Min>("__reduce_min_sync", mask, value);
}

#endif  // JFLUX_TESTS_CC_SIMT_COLLECTIVES_H_
