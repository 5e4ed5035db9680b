// Arrays of kernels under test: random numbers of a type, and the same as double.
#ifndef JFLUX_TESTS_CC_SIMT_VALUES_H_
#define JFLUX_TESTS_CC_SIMT_VALUES_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

#include "core/format.h"

namespace jflux::simt {

// Schedules of each case of a test: `usual`, times JFLUX_SIMT_SCHEDULES in the environment.
inline int Schedules(int usual) {
  const char* times = std::getenv("JFLUX_SIMT_SCHEDULES");
  return times == nullptr ? usual : usual * std::atoi(times);
}

// As cudaMalloc's.
template <typename T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <typename U>
  Aligned(const Aligned<U>&) {}  // NOLINT
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{256}));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{256}); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};

template <typename T>
struct Array {
  std::vector<T, Aligned<T>> data;

  // Of what a kernel must overwrite: not a number, in each type.
  explicit Array(int64_t count) : data(count) { Poison(); }
  void Poison() { std::memset(static_cast<void*>(data.data()), 0xff, data.size() * sizeof(T)); }
  double operator[](int64_t i) const { return static_cast<double>(static_cast<float>(data[i])); }
  int64_t size() const { return static_cast<int64_t>(data.size()); }
  T* get() { return data.data(); }
};

// Normal ones; int8_t have any value.
template <typename T>
Array<T> RandomArray(std::mt19937& random, int64_t count, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Array<T> array(count);
  for (T& v : array.data) {
    if constexpr (std::is_same_v<T, int8_t>) {
      v = static_cast<int8_t>(random());
    } else {
      v = static_cast<T>(static_cast<float>(normal(random)));
    }
  }
  return array;
}

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kF16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBF16
                           : std::is_same_v<T, __nv_fp8_e4m3> ? DType::kF8E4M3FN
                           : std::is_same_v<T, __nv_fp8_e5m2> ? DType::kF8E5M2
                           : std::is_same_v<T, int8_t>        ? DType::kS8
                                                              : DType::kF32;

// A result in double, with what bounds the error of the same result in float32: a few rounding
// units times `size`. Of a sum, the size is that of its terms; of a product a b, it is that of |a|
// times b's error and |b| times a's.
struct Sum {
  double value = 0, size = 0;

  Sum() = default;
  Sum(double exact) : value(exact), size(std::abs(exact)) {}  // NOLINT: one number
  Sum(double v, double s) : value(v), size(s) {}
  void Add(double term) {
    value += term;
    size += std::abs(term);
  }
  // Of a sum of whole numbers, which is rounded once.
  void AddWhole(double term) {
    value += term;
    size = std::abs(value);
  }
  Sum operator*(const Sum& o) const {
    return {value * o.value, std::abs(value) * o.size + size * std::abs(o.value)};
  }
};

// Of one rounding to T.
template <typename T>
constexpr double kUnit = std::is_same_v<T, __half>          ? 0x1p-11
                         : std::is_same_v<T, __nv_bfloat16> ? 0x1p-8
                                                            : 0x1p-24;
// A sum of n terms in float32 is off by at most n units of its size. Of ten million sums of 200
// random terms, the worst was off by 2.8 units. In float16, results below 2^-14 are rounded to
// multiples of 2^-24.
constexpr double kUnitsOfSum = 8, kLeast = 0x1p-24;

// How many elements are off by more than rounding can cost. want(i) is a Sum. NaN is always off.
template <typename T, typename Want>
int64_t CountWrong(const Array<T>& got, Want&& want) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const Sum w = want(i);
    const double rounding = std::is_same_v<T, float> ? 0 : 1.01 * kUnit<T>;
    const double bound =
        rounding * std::abs(w.value) + kUnitsOfSum * kUnit<float> * w.size + kLeast;
    wrong += !(std::abs(got[i] - w.value) <= bound);
  }
  return wrong;
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_VALUES_H_
