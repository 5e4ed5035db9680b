// Arrays of kernels under test: random numbers of a type, and the same as double.
#ifndef JFLUX_TESTS_CC_SIMT_VALUES_H_
#define JFLUX_TESTS_CC_SIMT_VALUES_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

#include "core/dtype.h"

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

template <typename T>
Array<T> RandomArray(std::mt19937& random, int64_t count, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Array<T> array(count);
  for (T& v : array.data) v = static_cast<T>(static_cast<float>(normal(random)));
  return array;
}

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kF16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBF16
                                                              : DType::kF32;

// How often |got - want| exceeds what rounding once to T, of sums in float32, can cost. `scale`:
// what the sums amount to. NaN always does.
template <typename T, typename Want>
int64_t CountWrong(const Array<T>& got, double scale, Want&& want) {
  constexpr double kRounding = std::is_same_v<T, __half>          ? 0x1p-11
                               : std::is_same_v<T, __nv_bfloat16> ? 0x1p-8
                                                                  : 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double w = want(i);
    wrong += !(std::abs(got[i] - w) <= 1.01 * kRounding * std::abs(w) + 1e-5 * scale);
  }
  return wrong;
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_VALUES_H_
