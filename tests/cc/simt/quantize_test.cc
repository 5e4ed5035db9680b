// The kernels of quantize in the simulator, bit for bit against the definition on the host.
#include "ops/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/numbers.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
  int64_t stack, rows, columns;
  QuantizeBlock block;
  bool transpose = false, given = false, losses = false, power_of_two = false, copy = true;
};

template <DType kValues>
uint8_t Rounded(float ratio) {
  const float most = kValues == DType::kF8E4M3FN ? 448 : kValues == DType::kF8E5M2 ? 57344 : 127;
  if constexpr (kValues == DType::kS8) {
    if (std::isnan(ratio)) return 0;
    return static_cast<uint8_t>(
        static_cast<int8_t>(std::nearbyint(std::clamp(ratio, -most, most))));
  } else {
    return Number<kValues>::From(std::isnan(ratio) ? kNaN : std::clamp(ratio, -most, most)).bits;
  }
}
template <DType kValues>
bool Same(uint8_t a, uint8_t b) {
  if constexpr (kValues != DType::kS8) {
    const auto is_nan = [](uint8_t v) { return std::isnan(float{Number<kValues>{v}}); };
    if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b);
  }
  return a == b;
}

// What quantize makes of a matrix, and of its losses.
template <DType kValues>
struct Exact {
  std::vector<uint8_t> values;
  std::vector<float> scale;
  QuantizeLosses losses{};

  // x(row, column).
  template <typename X>
  Exact(const Case& c, int64_t rows, int64_t columns, X&& x, const float* given)
      : values(rows * columns) {
    const float most = kValues == DType::kF8E4M3FN ? 448 : kValues == DType::kF8E5M2 ? 57344 : 127;
    const int64_t down = c.block.rows == -1 ? rows : c.block.rows;
    const int64_t across = c.block.columns == -1 ? columns : c.block.columns;
    for (int64_t row = 0; row < rows; row += down) {
      for (int64_t column = 0; column < columns; column += across) {
        float largest = 0;
        const auto for_each = [&](auto&& visit) {
          for (int64_t r = row; r < std::min(rows, row + down); ++r) {
            for (int64_t k = column; k < std::min(columns, column + across); ++k) visit(r, k);
          }
        };
        for_each([&](int64_t r, int64_t k) {
          const float v = std::abs(x(r, k));
          largest = std::isfinite(v) && !std::isnan(largest) ? std::max(largest, v) : kNaN;
        });
        float s = std::max(largest / most, std::numeric_limits<float>::min());
        if (c.power_of_two) s = std::exp2(std::ceil(std::log2(s)));
        if (largest == 0) s = 1;
        if (given != nullptr) s = given[scale.size()];
        if (std::isnan(largest)) s = kNaN;
        scale.push_back(s);
        for_each([&](int64_t r, int64_t k) {
          const float ratio = x(r, k) / s;
          const uint8_t value = Rounded<kValues>(ratio);
          values[r * columns + k] = value;
          losses.flushed += (value & (kValues == DType::kS8 ? 0xff : 0x7f)) == 0 && x(r, k) != 0;
          losses.saturated += std::abs(ratio) > most;
        });
      }
    }
  }
};

// Numbers of all sizes; rows of zeros, of denormals and of powers of two; neighbours of ties; some
// that are none.
template <typename T>
Array<T> Numbers(std::mt19937& random, int64_t count, int64_t columns, bool finite) {
  std::normal_distribution<float> normal;
  Array<T> x(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = i / columns;
    float v = normal(random);
    if (row % 7 == 1) v *= 1e4f;
    if (row % 7 == 2) v *= 1e-30f;
    if (row % 7 == 3) v *= 1e-42f;
    if (row % 7 == 4) v = 0;
    if (row % 7 == 5) v = std::ldexp(std::nearbyint(8 * v), -3) * (random() % 2 ? 1 : 1 + 0x1p-23f);
    if (random() % 10 == 0) v = random() % 2 ? 0.0f : -0.0f;
    x.data[i] = static_cast<T>(v);
  }
  if (!finite) {
    x.data[count / 3] = static_cast<T>(kNaN);
    x.data[count / 2] = static_cast<T>(-std::numeric_limits<float>::infinity());
  }
  return x;
}

template <typename T, DType kValues>
void Check(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t count = c.stack * c.rows * c.columns, matrix = c.rows * c.columns;
  const auto x = Numbers<T>(random, count, c.columns, seed % 3 != 0);
  const QuantizeParams p{c.stack,     c.rows,         c.columns,         c.block, c.copy,
                         c.transpose, c.power_of_two, simt::kDTypeOf<T>, kValues};
  Array<float> given(p.Scales());
  constexpr float kGiven[] = {
      0.01f,          3,     0,      1e-41f, std::numeric_limits<float>::infinity(), -0.5f,
      0x1.fffffep-3f, 1e38f, 1e-30f, kNaN};
  for (float& v : given.data) v = kGiven[random() % std::size(kGiven)];
  Array<uint8_t> values[2] = {Array<uint8_t>(count), Array<uint8_t>(count)};
  Array<float> scale[2] = {Array<float>(p.Scales()), Array<float>(p.TransposedScales())};
  Array<uint32_t> maxima(p.Maxima());
  QuantizeLosses losses{-1, -1};
  const QuantizeArrays arrays{
      x.data.data(),
      c.given ? given.get() : nullptr,
      {{values[0].get(), scale[0].get(), maxima.get()},
       {values[1].get(), scale[1].get(), maxima.get() + (c.copy ? p.Scales() : 0)}},
      c.losses ? &losses : nullptr};
  std::string error;
  EXPECT(LaunchQuantize(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure;

  QuantizeLosses lost{};
  for (const bool transposed : {false, true}) {
    if (transposed ? !c.transpose : !c.copy) continue;
    const int64_t rows = transposed ? c.columns : c.rows;
    const int64_t columns = transposed ? c.rows : c.columns;
    const int64_t scales = scale[transposed].size() / c.stack;
    int64_t wrong = 0;
    for (int64_t m = 0; m < c.stack; ++m) {
      // The scales of a transpose are given as those of x, whose blocks are in another order.
      std::vector<float> own(given.data.begin() + m * scales,
                             given.data.begin() + (m + 1) * scales);
      if (transposed && c.given && c.block.rows != -1) {
        const int64_t down = CeilDiv<int64_t>(c.rows, 128),
                      across = CeilDiv<int64_t>(c.columns, 128);
        for (int64_t i = 0; i < scales; ++i) {
          own[i] = given.data[m * scales + i % down * across + i / down];
        }
      }
      const auto at = [&](int64_t r, int64_t k) {
        return static_cast<float>(
            x.data[m * matrix + (transposed ? k * c.columns + r : r * columns + k)]);
      };
      const Exact<kValues> want(c, rows, columns, at, c.given ? own.data() : nullptr);
      for (int64_t i = 0; i < matrix; ++i) {
        // Scales are in the order in which blocks are made.
        wrong += !Same<kValues>(values[transposed].data[m * matrix + i], want.values[i]);
      }
      for (int64_t i = 0; i < scales; ++i) {
        const float s = scale[transposed].data[m * scales + i];
        wrong += std::isnan(want.scale[i]) ? !std::isnan(s) : s != want.scale[i];
      }
      if (!transposed) {
        lost.flushed += want.losses.flushed;
        lost.saturated += want.losses.saturated;
      }
    }
    EXPECT_EQ(wrong, 0) << "seed " << seed << " block " << c.block.rows << " x " << c.block.columns
                        << " transposed " << transposed << " given " << c.given;
  }
  if (c.losses) {
    EXPECT_EQ(losses.flushed, lost.flushed);
    EXPECT_EQ(losses.saturated, lost.saturated);
  }
}

template <typename T, DType kValues>
void CheckAll(uint32_t seed) {
  constexpr QuantizeBlock kRow{1, -1}, kPart{1, 128}, kSquare{128, 128}, kAll{-1, -1};
  // Rows: of a few chunks, of a team of several warps, and of more than it keeps.
  Check<T, kValues>({1, 5, 48, kRow, false, false, true}, seed++);
  Check<T, kValues>({1, 3, 3008, kRow, false, true}, seed++);
  Check<T, kValues>({1, 1, 17008, kRow, false, false, true, true}, seed++);
  Check<T, kValues>({2, 9, 384, kPart, false, true, true}, seed++);
  // Tiles.
  for (const bool given : {false, true}) {
    const bool more = seed % 2 == 0;
    Check<T, kValues>({1, 10, 144, kPart, false, given, true}, seed++);
    Check<T, kValues>({1, 144, 272, kSquare, true, given, more, !more}, seed++);
    Check<T, kValues>({2, 144, 272, kAll, true, given, !more, more}, seed++);
  }
  Check<T, kValues>({1, 144, 272, kPart, true}, seed++);
  Check<T, kValues>({1, 144, 272, kRow, true, false, true}, seed++);
  Check<T, kValues>({1, 150, 272, {-1, 128}}, seed++);
  Check<T, kValues>({1, 150, 272, {128, -1}}, seed++);
  // The transpose alone.
  Check<T, kValues>({1, 144, 272, kSquare, true, false, false, true, false}, seed++);
  Check<T, kValues>({2, 144, 144, kAll, true, false, false, false, false}, seed++);
}

TEST(BitsAreThoseOfTheDefinition) {
  CheckAll<__nv_bfloat16, DType::kF8E4M3FN>(1);
  CheckAll<float, DType::kF8E5M2>(100);
  CheckAll<__half, DType::kS8>(201);
  CheckAll<float, DType::kF8E4M3FN>(302);
}

// Values with a scale for each row and tile, quantised again along columns.
void CheckAgain(const QuantizeBlock& block, int64_t rows, int64_t columns, int64_t counts_down,
                int64_t counts_across, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Array<uint8_t> x(rows * columns), values(rows * columns);
  for (uint8_t& v : x.data) v = Number<DType::kF8E4M3FN>::From(40 * normal(random)).bits;
  if (seed % 2 == 0) x.data[rows * columns / 3] = 0x7f;  // a NaN
  Array<float> of_x(counts_down * counts_across);
  for (float& v : of_x.data) v = std::exp2(static_cast<float>(random() % 40) - 20);
  const QuantizeParams p{
      1, rows, columns, block, false, true, true, DType::kF8E4M3FN, DType::kF8E4M3FN, true};
  Array<float> scale(p.TransposedScales());
  const QuantizeArrays arrays{
      x.get(),
      nullptr,
      {{}, {values.get(), scale.get(), nullptr}},
      nullptr,
      {of_x.get(), counts_down == 1 ? 0 : static_cast<int32_t>(counts_across),
       counts_across == 1 ? 0 : 1}};
  std::string error;
  EXPECT(LaunchQuantize(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure;
  const auto at = [&](int64_t r, int64_t k) {
    const int64_t down = counts_down == 1 ? 0 : k, across = counts_across == 1 ? 0 : r / 128;
    return float{Number<DType::kF8E4M3FN>{x.data[k * columns + r]}} *
           of_x.data[down * counts_across + across];
  };
  const Exact<DType::kF8E4M3FN> want({1, rows, columns, block, true, false, false, true}, columns,
                                     rows, at, nullptr);
  int64_t wrong = 0;
  for (int64_t i = 0; i < rows * columns; ++i) {
    wrong += !Same<DType::kF8E4M3FN>(values.data[i], want.values[i]);
  }
  for (int64_t i = 0; i < scale.size(); ++i) {
    wrong +=
        std::isnan(want.scale[i]) ? !std::isnan(scale.data[i]) : scale.data[i] != want.scale[i];
  }
  EXPECT_EQ(wrong, 0) << "seed " << seed;
}

TEST(QuantisedAgain) {
  CheckAgain({1, 128}, 144, 272, 144, 3, 1);
  CheckAgain({1, 128}, 272, 144, 272, 1, 2);
  CheckAgain({128, 128}, 160, 128, 1, 1, 3);
  CheckAgain({1, 128}, 16, 272, 1, 3, 4);
}

// ---- Rows of groups ----------------------------------------------------------------------------

// T: e4m3 for what is quantised again. Rows past the last group are no numbers.
template <typename T>
void CheckGroups(const std::vector<int32_t>& sizes, int64_t rows, int64_t columns, bool copy,
                 bool fill, uint32_t seed, int32_t of_block = 1) {
  constexpr DType kValues = DType::kF8E4M3FN;
  constexpr bool kAgain = std::is_same_v<T, __nv_fp8_e4m3>;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Array<T> x(rows * columns);
  Array<float> of_x(rows * CeilDiv<int64_t>(columns, 128));
  for (float& v : of_x.data) v = kAgain ? std::exp2(static_cast<float>(random() % 40) - 20) : 1;
  int64_t total = 0;
  for (const int32_t size : sizes) total += size > 0 ? size : 0;
  total = Min(total, rows);
  for (int64_t i = 0; i < total * columns; ++i) x.data[i] = static_cast<T>(8 * normal(random));
  if (seed % 3 == 0) x.data[total * columns / 3] = static_cast<T>(kNaN);

  const QuantizeBlock block{of_block, 128};
  QuantizeParams p{1, rows, columns, block, copy, true, true, simt::kDTypeOf<T>, kValues, kAgain};
  p.groups = static_cast<int64_t>(sizes.size());
  p.fill = fill;
  const int64_t across = p.TransposedColumns(), blocks = across / 128, tiles = of_x.size() / rows;
  Array<uint8_t> values(copy ? rows * columns : 0), turned(columns * across);
  Array<float> scale(copy ? rows * tiles : 0), turned_scale(p.TransposedScales());
  QuantizeArrays arrays{
      x.get(),
      nullptr,
      {{values.get(), scale.get(), nullptr}, {turned.get(), turned_scale.get(), nullptr}},
      nullptr};
  if (kAgain) arrays.x_scale = {of_x.get(), static_cast<int32_t>(tiles), 1};
  arrays.group_sizes = sizes.data();
  std::string error;
  EXPECT(LaunchQuantize(p, arrays, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure;

  // The row of each column of the transpose; -1: zeros, -2: of no group.
  std::vector<int64_t> row_of(across, -2);
  int64_t at = 0, row = 0;
  for (const int32_t size : sizes) {
    for (int64_t i = 0; i < RoundUp<int64_t>(Min<int64_t>(Max(size, 0), total - row), 128); ++i) {
      row_of[at++] = i < Min<int64_t>(size, total - row) ? row + i : -1;
    }
    row += Min<int64_t>(Max(size, 0), total - row);
  }
  const auto meant = [&](int64_t r, int64_t k) {
    return static_cast<float>(x.data[r * columns + k]) * of_x.data[r * tiles + k / 128];
  };
  const Case c{1, columns, across, block, true, false, false, true};
  const Exact<kValues> want(
      c, columns, across,
      [&](int64_t k, int64_t r) { return row_of[r] < 0 ? 0.0f : meant(row_of[r], k); }, nullptr);
  const auto is_poison = [](float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    return bits == 0xffffffff;
  };
  int64_t wrong = 0;
  for (int64_t i = 0; i < columns * across; ++i) {
    const bool is_written = fill || row_of[i % across] != -2;
    wrong += is_written ? !Same<kValues>(turned.data[i], want.values[i]) : turned.data[i] != 0xff;
  }
  for (int64_t i = 0; i < turned_scale.size(); ++i) {
    const int64_t at = of_block == 1 ? i % blocks * columns + i / blocks : i;
    const float got = turned_scale.data[at], s = want.scale[i];
    const bool is_written = fill || row_of[i % blocks * 128] != -2;
    wrong += !is_written ? !is_poison(got) : std::isnan(s) ? !std::isnan(got) : got != s;
  }
  if (copy) {
    Case of_copy = c;
    of_copy.block = {1, 128};
    const Exact<kValues> rows_of_groups(of_copy, total, columns, meant, nullptr);
    for (int64_t i = 0; i < rows * columns; ++i) {
      wrong += i < total * columns ? !Same<kValues>(values.data[i], rows_of_groups.values[i])
                                   : values.data[i] != 0xff;
    }
    for (int64_t i = 0; i < rows * tiles; ++i) {
      const float got = scale.data[i], s = i < total * tiles ? rows_of_groups.scale[i] : 0;
      wrong += i >= total * tiles ? !is_poison(got) : std::isnan(s) ? !std::isnan(got) : got != s;
    }
  }
  EXPECT_EQ(wrong, 0) << "seed " << seed;
}

TEST(GroupsBeginBlocks) {
  const std::vector<int32_t> few = {130, 0, 1, 128, 20};
  CheckGroups<__nv_bfloat16>(few, 300, 272, /*copy=*/true, /*fill=*/false, 1);
  CheckGroups<__nv_bfloat16>(few, 279, 144, /*copy=*/false, /*fill=*/true, 2);
  CheckGroups<float>(few, 300, 144, /*copy=*/true, /*fill=*/false, 3);
  CheckGroups<__nv_fp8_e4m3>(few, 300, 272, /*copy=*/false, /*fill=*/false, 4);
  CheckGroups<__nv_fp8_e4m3>({0, 5, 0}, 5, 16, /*copy=*/false, /*fill=*/true, 6);
  CheckGroups<__nv_fp8_e4m3>(few, 300, 272, /*copy=*/false, /*fill=*/false, 9, /*of_block=*/128);
  CheckGroups<__nv_bfloat16>(few, 279, 144, /*copy=*/false, /*fill=*/true, 10, /*of_block=*/128);
  CheckGroups<__nv_bfloat16>(few, 300, 272, /*copy=*/true, /*fill=*/false, 11, /*of_block=*/128);
  CheckGroups<float>(few, 279, 144, /*copy=*/true, /*fill=*/true, 12, /*of_block=*/128);
  // More groups than lanes, and sizes that make no sense.
  std::vector<int32_t> many(70);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int32_t>(i * i % 11);
  CheckGroups<__half>(many, 400, 16, /*copy=*/true, /*fill=*/false, 7);
  CheckGroups<__half>({100, -7, 150, INT32_MAX, INT32_MAX}, 400, 16, false, false, 8);
}

// ---- What is computed --------------------------------------------------------------------------

struct AtX {
  double value, slope;

  double Gradient(double of_value) const { return slope == 0 ? 0 : slope * of_value; }
};
AtX ActivationAt(Activation activation, double x) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  switch (activation) {
    case Activation::kRelu:
      return {x < 0 ? 0 : x, x > 0 ? 1.0 : 0.0};
    case Activation::kGelu: {
      const double cdf = std::erfc(-x * std::sqrt(0.5)) / 2;
      return {x * cdf, cdf + x * std::exp(-x * x / 2) * std::sqrt(0.5 / std::acos(-1.0))};
    }
    case Activation::kGeluTanh: {
      const double by = 2 * std::sqrt(2 / std::acos(-1.0)),
                   s = sigmoid(by * (x + 0.044715 * x * x * x));
      return {x * s, s + x * s * (1 - s) * by * (1 + 3 * 0.044715 * x * x)};
    }
    default: {
      const double s = sigmoid(x);
      return {x * s, s + x * s * (1 - s)};
    }
  }
}

// The copy in place of dy, its columns in turns, and the transposes are those of what is computed
// in double. By relu nothing but the rounding to T is not exact, so that bits are the same.
template <typename T>
void CheckComputed(QuantizeSource source, Activation activation, int64_t rows, int64_t columns,
                   bool transpose, bool has_factor, uint32_t seed) {
  constexpr DType kValues = DType::kF8E4M3FN;
  const bool is_square = source == QuantizeSource::kPair;
  const Case c{1, rows, columns, {is_square ? 128 : 1, 128}, transpose, false, false, true};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int64_t count = rows * columns;
  Array<T> arrays[3] = {Array<T>(count), Array<T>(count), Array<T>(count)};
  for (auto& a : arrays) {
    for (T& v : a.data) v = static_cast<T>(random() % 16 == 0 ? 0 : 2 * normal(random));
  }
  auto& [x, factor, dy] = arrays;
  QuantizeParams p{1, rows, columns, c.block, true, transpose, true, simt::kDTypeOf<T>, kValues};
  p.source = source;
  p.activation = activation;
  const int parts = p.IsPair() ? 2 : 1;
  std::vector<double> computed[2];
  for (int64_t i = 0; i < count; ++i) {
    const double of_x = static_cast<float>(x.data[i]), by = static_cast<float>(factor.data[i]),
                 from = static_cast<float>(dy.data[i]);
    const AtX at = ActivationAt(activation, of_x);
    if (is_square) {
      computed[0].push_back(of_x);
      computed[1].push_back(by);
    } else if (source == QuantizeSource::kGradients) {
      computed[0].push_back(at.Gradient(from * by));
      computed[1].push_back(at.value * from);
    } else {
      const double times = has_factor ? by : 1;
      computed[0].push_back(source == QuantizeSource::kGradient ? at.Gradient(times)
                                                                : at.value * times);
    }
  }
  Array<uint8_t> values(parts * count), turned[2] = {Array<uint8_t>(count), Array<uint8_t>(count)};
  Array<float> scale(p.Scales()),
      turned_scale[2] = {Array<float>(p.TransposedScales()), Array<float>(p.TransposedScales())};
  const bool in_place = source == QuantizeSource::kGradients;
  QuantizeArrays given{};
  given.x = x.get();
  if (has_factor) given.factor = factor.get();
  if (in_place) given.dy = dy.get();
  auto* copies = in_place ? reinterpret_cast<uint8_t*>(dy.get()) : values.get();
  given.results[0] = {copies, scale.get(), nullptr};
  for (const int i : {0, 1})
    given.results[1 + i] = {turned[i].get(), turned_scale[i].get(), nullptr};
  std::string error;
  EXPECT(LaunchQuantize(p, given, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure;

  const bool is_exact = activation == Activation::kRelu || is_square;
  int64_t wrong = 0;
  for (int part = 0; part < parts; ++part) {
    for (const bool transposed : {false, true}) {
      if (transposed && !transpose) break;
      const int64_t down = transposed ? columns : rows, across = transposed ? rows : columns;
      const int64_t blocks = CeilDiv<int64_t>(across, 128);
      const auto at = [&](int64_t r, int64_t k) {
        const double v = computed[part][transposed ? k * columns + r : r * columns + k];
        return static_cast<float>(static_cast<T>(static_cast<float>(v)));
      };
      const Exact<kValues> want(c, down, across, at, nullptr);
      for (int64_t r = 0; r < down; ++r) {
        for (int64_t k = 0; k < across; ++k) {
          const int64_t tile = transposed ? k / 128 : k / 128 * parts + part;
          const int64_t row = is_square ? r / 128 : r;
          const uint8_t got = transposed ? turned[part].data[r * across + k]
                                         : copies[r * across * parts + tile * 128 + k % 128];
          const float s = transposed ? turned_scale[part].data[row * blocks + tile]
                                     : scale.data[row * blocks * parts + tile];
          const float of_want = want.scale[row * blocks + k / 128];
          if (is_exact) {
            wrong += s != of_want || !Same<kValues>(got, want.values[r * across + k]);
            continue;
          }
          // A step of the type, which has three bits, or of the smallest numbers.
          const float exact = at(r, k), found = float{Number<kValues>{got}} * s;
          wrong += s != of_want && s != 2 * of_want && 2 * s != of_want;
          wrong += !(std::abs(found - exact) <= std::max(std::abs(exact) / 8, s * 0x1p-8f));
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0) << "source " << static_cast<int>(source) << " activation "
                      << static_cast<int>(activation) << " rows " << rows;
}

TEST(WhatIsComputed) {
  using S = QuantizeSource;
  uint32_t seed = 1;
  for (const auto activation :
       {Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    CheckComputed<__nv_bfloat16>(S::kGradients, activation, 144, 256, true, true, seed++);
    CheckComputed<__nv_bfloat16>(S::kActivated, activation, 130, 144, false, true, seed++);
    CheckComputed<__half>(S::kActivated, activation, 3, 272, false, false, seed++);
    CheckComputed<__half>(S::kGradient, activation, 144, 272, true, true, seed++);
  }
  CheckComputed<__half>(S::kGradients, Activation::kRelu, 16, 128, true, true, seed++);
  CheckComputed<__nv_bfloat16>(S::kPair, Activation::kNone, 200, 256, false, true, seed++);
  CheckComputed<float>(S::kPair, Activation::kNone, 128, 384, false, true, seed++);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
