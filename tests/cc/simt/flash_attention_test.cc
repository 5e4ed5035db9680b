// The kernels of attention in the simulator, forward and backward, against sums in double: Hopper's
// and the portable ones.
#include "ops/flash_attention/flash_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  int64_t batch, queries, keys, heads, groups, width;
  int32_t low, high;  // of a key's position less its query's
  int segments = 0;   // 0: none
  double softcap = 0;
  int stride = 1;     // of positions, as in striped order
  int64_t shift = 0;  // of the queries' positions
  bool positions_by_batch = false, wide = false;
};
constexpr int32_t kAny = kFurthest;

// A call's numbers, and what comes out in double.
template <typename T>
struct Problem {
  Case c;
  Array<T> q, k, v, d_out;
  std::vector<int32_t> q_positions, k_positions, q_segments, k_segments;  // padded
  // The results, and the sums of their terms' sizes.
  struct Sum {
    std::vector<double> value, size;
    void Reset(int64_t count) {
      value.assign(count, 0);
      size.assign(count, 0);
    }
    void Add(int64_t i, double term) {
      value[i] += term;
      size[i] += std::abs(term);
    }
  };
  Sum out, dq, dk, dv;
  std::vector<double> lse, delta;
  double scale;

  Problem(const Case& c_, std::mt19937& random)
      : c(c_),
        q(RandomArray<T>(random, c.batch * c.queries * c.heads * c.width)),
        k(RandomArray<T>(random, c.batch * c.keys * c.groups * c.width)),
        v(RandomArray<T>(random, c.batch * c.keys * c.groups * c.width)),
        d_out(RandomArray<T>(random, c.batch * c.queries * c.heads * c.width)),
        scale(1.3 / std::sqrt(static_cast<double>(c.width))) {
    const int64_t batches = c.positions_by_batch ? c.batch : 1;
    const auto number = [&](std::vector<int32_t>* positions, int64_t rows, int64_t shift) {
      positions->assign(batches * Padded(rows), kNowhere);
      for (int64_t b = 0; b < batches; ++b) {
        for (int64_t i = 0; i < rows; ++i) {
          (*positions)[b * Padded(rows) + i] = static_cast<int32_t>(i * c.stride + shift + 3 * b);
        }
      }
    };
    number(&q_positions, c.queries, c.shift);
    number(&k_positions, c.keys, 0);
    if (c.segments > 0) {
      const auto split = [&](std::vector<int32_t>* segments, int64_t rows) {
        segments->assign(c.batch * Padded(rows), 0);
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t i = 0; i < rows; ++i) {
            (*segments)[b * Padded(rows) + i] =
                static_cast<int32_t>((i * c.segments + b * 17) / rows);
          }
        }
      };
      split(&q_segments, c.queries);
      split(&k_segments, c.keys);
    }
    Solve();
  }

  int64_t QAt(int64_t b, int64_t i, int64_t h) const {
    return ((b * c.queries + i) * c.heads + h) * c.width;
  }
  int64_t KAt(int64_t b, int64_t j, int64_t g) const {
    return ((b * c.keys + j) * c.groups + g) * c.width;
  }
  bool Has(int64_t b, int64_t i, int64_t j) const {
    const int64_t row = c.positions_by_batch ? b : 0;
    const int64_t d =
        int64_t{k_positions[row * Padded(c.keys) + j]} - q_positions[row * Padded(c.queries) + i];
    return c.low <= d && d <= c.high &&
           (c.segments == 0 ||
            q_segments[b * Padded(c.queries) + i] == k_segments[b * Padded(c.keys) + j]);
  }

  void Solve() {
    const int64_t rows = c.batch * c.queries * c.heads;
    for (Sum* sum : {&out, &dq}) sum->Reset(rows * c.width);
    for (Sum* sum : {&dk, &dv}) sum->Reset(k.size());
    lse.assign(rows, -kInfinity);
    delta.assign(rows, 0);
    std::vector<double> s(c.keys), slope(c.keys), p(c.keys);
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t i = 0; i < c.queries; ++i) {
        for (int64_t h = 0; h < c.heads; ++h) {
          const int64_t g = h / (c.heads / c.groups), at = QAt(b, i, h), row = at / c.width;
          double total = 0, most = -kInfinity;
          for (int64_t j = 0; j < c.keys; ++j) {
            s[j] = -kInfinity;
            if (!Has(b, i, j)) continue;
            double x = 0;
            for (int64_t l = 0; l < c.width; ++l) x += q[at + l] * k[KAt(b, j, g) + l];
            x *= scale;
            slope[j] = scale;
            if (c.softcap != 0) {
              const double bent = std::tanh(x / c.softcap);
              x = c.softcap * bent;
              slope[j] *= 1 - bent * bent;
            }
            s[j] = x;
            most = std::max(most, x);
          }
          if (most == -kInfinity) continue;
          for (int64_t j = 0; j < c.keys; ++j) total += std::exp(s[j] - most);
          lse[row] = most + std::log(total);
          for (int64_t j = 0; j < c.keys; ++j) {
            p[j] = std::exp(s[j] - lse[row]);
            for (int64_t l = 0; l < c.width; ++l) out.Add(at + l, p[j] * v[KAt(b, j, g) + l]);
          }
          for (int64_t l = 0; l < c.width; ++l) delta[row] += out.value[at + l] * d_out[at + l];
          for (int64_t j = 0; j < c.keys; ++j) {
            if (p[j] == 0) continue;
            double dp = 0;
            for (int64_t l = 0; l < c.width; ++l) dp += d_out[at + l] * v[KAt(b, j, g) + l];
            const double ds = p[j] * (dp - delta[row]) * slope[j];
            for (int64_t l = 0; l < c.width; ++l) {
              dv.Add(KAt(b, j, g) + l, p[j] * d_out[at + l]);
              dk.Add(KAt(b, j, g) + l, ds * q[at + l]);
              dq.Add(at + l, ds * k[KAt(b, j, g) + l]);
            }
          }
        }
      }
    }
  }

  // Which pairs of blocks have scores. Some that have all are called kSome.
  std::vector<int8_t> Blocks(AttentionPass pass, std::mt19937& random) const {
    const AttentionBlocks size = BlocksOf(pass, WidthFor(c.width));
    const int64_t rows = CeilDiv<int64_t>(c.queries, size.queries);
    const int64_t columns = CeilDiv<int64_t>(c.keys, size.keys);
    std::vector<int8_t> kinds(BlockBatches() * rows * columns);
    for (int64_t b = 0; b < BlockBatches(); ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t col = 0; col < columns; ++col) {
          bool any = false, all = (col + 1) * size.keys <= c.keys;
          for (int64_t i = r * size.queries; i < std::min(c.queries, (r + 1) * size.queries); ++i) {
            for (int64_t j = col * size.keys; j < std::min(c.keys, (col + 1) * size.keys); ++j) {
              (Has(b, i, j) ? any : all) = Has(b, i, j);
            }
          }
          const bool by_keys = pass == AttentionPass::kDkv;
          kinds[b * rows * columns + (by_keys ? col * rows + r : r * columns + col)] =
              static_cast<int8_t>(!any                       ? BlockKind::kNone
                                  : all && random() % 4 != 0 ? BlockKind::kAll
                                                             : BlockKind::kSome);
        }
      }
    }
    return kinds;
  }

  // Sequences that have the same pairs of scores share their kinds.
  int64_t BlockBatches() const { return c.segments == 0 && !c.positions_by_batch ? 1 : c.batch; }
  // Any order of the rows of blocks gives the same.
  std::vector<int32_t> Order(AttentionPass pass, std::mt19937& random) const {
    const AttentionBlocks size = BlocksOf(pass, WidthFor(c.width));
    const int64_t rows = pass == AttentionPass::kDkv ? CeilDiv<int64_t>(c.keys, size.keys)
                                                     : CeilDiv<int64_t>(c.queries, size.queries);
    std::vector<int32_t> order(BlockBatches() * rows);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    return order;
  }

  FlashAttentionParams Params(bool portable = false) const {
    FlashAttentionParams p{};
    p.batch = c.batch, p.heads = c.heads, p.groups = c.groups, p.width = c.width;
    p.queries = c.queries, p.keys = c.keys;
    p.position_batches = c.positions_by_batch ? c.batch : 1;
    p.block_batches = BlockBatches();
    p.scale = scale, p.softcap = c.softcap;
    p.low = c.low, p.span = static_cast<uint32_t>(c.high - c.low);
    p.wide_out = c.wide;
    p.portable = portable;
    p.dtype = simt::kDTypeOf<T>;
    return p;
  }
  FlashAttentionArrays Arrays() {
    FlashAttentionArrays a{};
    a.q = q.get(), a.k = k.get(), a.v = v.get();
    a.q_positions = q_positions.data(), a.k_positions = k_positions.data();
    if (c.segments > 0) a.q_segments = q_segments.data(), a.k_segments = k_segments.data();
    return a;
  }
};

// As a bulk copy needs it.
template <typename V>
Array<V> Copied(const std::vector<V>& from) {
  Array<V> to(static_cast<int64_t>(from.size()));
  std::copy(from.begin(), from.end(), to.data.begin());
  return to;
}

// How many of `got` are off by more than `share` of their terms' sizes, and what
// float16 makes of terms that are nearly nothing.
template <typename V, typename Sum>
int64_t CountOff(const Array<V>& got, const Sum& want, double share) {
  int64_t off = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    off += !(std::abs(got[i] - want.value[i]) <= share * want.size[i] + 2e-5);
  }
  return off;
}

// With `forward80` and `backward80` by portable kernels too. They take five times as long here as
// Hopper's: mma.sync is an event of all lanes.
template <typename T>
void Check(const Case& c, uint32_t seed, bool forward80, bool backward80) {
  std::mt19937 random(seed);
  Problem<T> problem(c, random);
  // Of one rounding. Weights, and the gradients of scores, are rounded before they are multiplied.
  const double rounding = (std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8) * 1.01;
  FlashAttentionArrays arrays = problem.Arrays();
  auto q_positions = Copied(problem.q_positions), k_positions = Copied(problem.k_positions);
  auto q_segments = Copied(problem.q_segments), k_segments = Copied(problem.k_segments);
  arrays.q_positions = q_positions.get(), arrays.k_positions = k_positions.get();
  if (c.segments > 0) arrays.q_segments = q_segments.get(), arrays.k_segments = k_segments.get();

  const auto kinds = problem.Blocks(AttentionPass::kForward, random);
  const auto order = problem.Order(AttentionPass::kForward, random);
  arrays.blocks = kinds.data(), arrays.order = order.data();
  std::string error;
  for (const bool portable : {false, true}) {
    if (portable && !forward80) continue;
    Array<T> out(static_cast<int64_t>(c.wide ? 0 : problem.out.value.size()));
    Array<float> wide(static_cast<int64_t>(c.wide ? problem.out.value.size() : 0));
    Array<float> lse(static_cast<int64_t>(problem.lse.size()));
    arrays.out = c.wide ? static_cast<void*>(wide.get()) : out.get();
    arrays.lse = lse.get();
    EXPECT(LaunchFlashAttention(problem.Params(portable), arrays, nullptr, &error)) << error;
    EXPECT_EQ(simt::Run(seed), "") << "seed " << seed;
    EXPECT_EQ(
        c.wide ? CountOff(wide, problem.out, rounding) : CountOff(out, problem.out, 2 * rounding),
        0)
        << "out, seed " << seed << (portable ? ", portable" : "");
    for (size_t i = 0; i < problem.lse.size(); ++i) {
      const double got = lse.data[i], want = problem.lse[i];
      EXPECT(got == want || std::abs(got - want) <= 1e-5) << "lse, seed " << seed;
    }
  }

  const int64_t padded = Padded(c.queries);
  Array<float> base(c.batch * c.heads * padded), delta(c.batch * c.heads * padded);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t i = 0; i < padded; ++i) {
        const int64_t at = (b * c.heads + h) * padded + i;
        base.data[at] = std::numeric_limits<float>::infinity();
        delta.data[at] = 0;
        if (i >= c.queries) continue;
        const int64_t row = problem.QAt(b, i, h) / c.width;
        delta.data[at] = static_cast<float>(problem.delta[row]);
        if (problem.lse[row] > -kInfinity) {
          base.data[at] = static_cast<float>(problem.lse[row] / std::log(2.0));
        }
      }
    }
  }
  const auto for_dkv = problem.Blocks(AttentionPass::kDkv, random);
  const auto for_dq = problem.Blocks(AttentionPass::kDq, random);
  Array<float> dq(static_cast<int64_t>(problem.dq.value.size()));
  Array<float> dk(static_cast<int64_t>(problem.dk.value.size())), dv(dk.size());
  arrays.d_out = problem.d_out.get();
  arrays.base = base.get(), arrays.delta = delta.get();
  arrays.blocks_by_keys = for_dkv.data(), arrays.blocks = for_dq.data();
  const auto dkv_order = problem.Order(AttentionPass::kDkv, random);
  const auto dq_order = problem.Order(AttentionPass::kDq, random);
  arrays.order_by_keys = dkv_order.data(), arrays.order = dq_order.data();
  const auto run = [&](bool portable, uint32_t run_seed, Array<float>* to_dq, Array<float>* to_dk,
                       Array<float>* to_dv) {
    arrays.dq = to_dq->get(), arrays.dk = to_dk->get(), arrays.dv = to_dv->get();
    EXPECT(LaunchFlashAttentionBackward(problem.Params(portable), arrays, nullptr, &error))
        << error;
    EXPECT_EQ(simt::Run(run_seed), "") << "seed " << seed;
  };
  Array<float> dq2(dq.size()), dk2(dk.size()), dv2(dk.size());
  for (const bool portable : {false, true}) {
    if (portable && !backward80) continue;
    const char* kernels = portable ? ", portable" : "";
    run(portable, seed + 1, &dq, &dk, &dv);
    EXPECT_EQ(CountOff(dv, problem.dv, rounding), 0) << "dv, seed " << seed << kernels;
    EXPECT_EQ(CountOff(dk, problem.dk, rounding), 0) << "dk, seed " << seed << kernels;
    EXPECT_EQ(CountOff(dq, problem.dq, rounding), 0) << "dq, seed " << seed << kernels;
    if (portable) continue;
    run(portable, ~seed, &dq2, &dk2, &dv2);
    EXPECT(dq2.data == dq.data && dk2.data == dk.data && dv2.data == dv.data)
        << "bits in any order of events, seed " << seed;
  }
}

// batch, queries, keys, heads, groups, width, low, high[, segments, softcap, stride, shift, ...]
TEST(Attention) {
  simt::SetSmCount(3);
  const Case cases[] = {
      {1, 128, 128, 1, 1, 64, -kAny, kAny},
      {1, 200, 200, 2, 1, 128, -kAny, 0},
      {2, 130, 257, 2, 2, 128, -kAny, kAny, 0, 0, 1, 0, false, true},
      {1, 300, 300, 2, 2, 64, -70, 20, 0, 5.0},
      {2, 150, 150, 4, 2, 72, -kAny, 0, 3},
      {1, 140, 390, 2, 1, 40, -kAny, 0, 0, 0, 3, 100},
      {2, 70, 300, 1, 1, 128, -kAny, 0, 2, 3.0, 1, 40, true},
      {1, 150, 200, 2, 1, 256, -kAny, 0, 0, 0, 1, 0, false, true},
      {1, 129, 130, 1, 1, 136, -100, 0, 0, 2.0},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    Check<__nv_bfloat16>(c, seed, /*forward80=*/true, seed % 8 == 1);
    Check<__half>(c, seed + 1, /*forward80=*/true, seed % 8 == 5);
    seed += 2;
  }
}

// A random call with heads of 8 `least` to 8 `most` elements.
void CheckAny(uint32_t seed, int least, int most) {
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  Case c{};
  c.batch = 1 + below(2);
  c.queries = 1 + below(300), c.keys = 1 + below(400);
  c.groups = 1 + below(2), c.heads = c.groups * (1 + below(3));
  c.width = 8 * (least + below(most - least + 1));
  c.high = below(2) != 0 ? 0 : below(3) != 0 ? kAny : below(100);
  c.low = below(2) != 0 ? -kAny : -below(150);
  c.segments = below(2) * below(5);
  c.softcap = below(3) != 0 ? 0 : 1 + below(9);
  c.stride = 1 + below(3), c.shift = std::max(0, below(200) - 60);
  c.positions_by_batch = below(2) != 0, c.wide = below(2) != 0;
  simt::SetSmCount(1 + below(5));
  const bool forward80 = seed % 3 == 0, backward80 = seed % 10 == 0;
  below(2) != 0 ? Check<__half>(c, seed, forward80, backward80)
                : Check<__nv_bfloat16>(c, seed, forward80, backward80);
}

TEST(AnyAttention) {
  for (int i = 0; i < simt::Schedules(30); ++i) CheckAny(1000 + i, 1, 16);
}

TEST(AnyAttentionOfWideHeads) {
  for (int i = 0; i < simt::Schedules(16); ++i) CheckAny(100000 + i, 17, 32);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
