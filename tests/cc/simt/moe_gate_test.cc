// The kernels of moe_gate in the simulator: choices exactly, weights and gradients in double.
#include "ops/moe_gate/moe_gate.h"

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
using simt::BitsAs;
using simt::RandomArray;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
  int64_t tokens, experts, slots;
  GateScore score = GateScore::kSoftmax;
  bool normalize = true, biased = false, masked = false;
  int64_t groups = 0, top_groups = 0;
};

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <typename T>
struct Problem {
  static constexpr float kScale = 2.5f;
  Case c;
  MoeGateParams p;
  Array<T> logits;
  Array<float> bias, dweights;
  std::vector<uint8_t> mask;
  Array<int32_t> indices;
  Array<float> weights;
  Array<T> dlogits;

  Problem(const Case& of, std::mt19937& random)
      : c(of),
        p{of.tokens, of.experts,        of.slots,  of.score,     of.normalize,
          kScale,    simt::kDTypeOf<T>, of.groups, of.top_groups},
        logits(RandomArray<T>(random, of.tokens * of.experts, 2)),
        bias(RandomArray<float>(random, of.experts)),
        dweights(RandomArray<float>(random, of.tokens * of.slots)),
        mask(of.tokens, 1),
        indices(of.tokens * of.slots),
        weights(of.tokens * of.slots),
        dlogits(of.tokens * of.experts) {
    for (T& x : logits.data) {  // a third of them in steps of 1/2, so that some are equal
      if (random() % 3 == 0) x = static_cast<T>(std::round(2 * static_cast<float>(x)) / 2);
      if (random() % 40 == 0) x = static_cast<T>(-0.0f);
      if (random() % 40 == 0) x = static_cast<T>(-kInf);
    }
    if (!c.masked) return;
    for (int64_t t = 0; t < c.tokens; ++t) {
      if ((mask[t] = random() % 3 != 0)) continue;
      for (int64_t e = 0; e < c.experts; ++e) logits.data[t * c.experts + e] = T(kNaN);
      for (int64_t j = 0; j < c.slots; ++j) dweights.data[t * c.slots + j] = kNaN;
    }
  }

  float Logit(int64_t t, int64_t e) const {
    return static_cast<float>(logits.data[t * c.experts + e]);
  }
  bool IsSigmoid() const { return c.score == GateScore::kSigmoid; }

  // The order of numbers in XLA's top-k, as that of integers.
  static int32_t Order(float x) {
    const auto bits = BitsAs<int32_t>(x);
    return bits < 0 ? bits ^ INT32_MAX : bits;
  }
  // By what a token's experts are chosen.
  std::vector<float> Choices(int64_t t) const {
    std::vector<float> choices(c.experts);
    float most = -kInf, total = 0;
    for (int64_t e = 0; e < c.experts; ++e) most = std::max(most, Logit(t, e));
    // In the order of the kernel, so that equal scores are equal here: lanes, then their sums.
    float of_lane[32] = {}, sums[32];
    for (int64_t e = 0; e < c.experts; ++e) of_lane[e % 32] += std::exp(Logit(t, e) - most);
    for (int step = 16; step > 0; step /= 2) {
      for (int i = 0; i < 32; ++i) sums[i] = of_lane[i] + of_lane[i ^ step];
      std::copy(sums, sums + 32, of_lane);
    }
    total = of_lane[0];
    for (int64_t e = 0; e < c.experts; ++e) {
      float choice = Logit(t, e);
      if (IsSigmoid()) {
        choice = 1.0f / (1.0f + std::exp(-choice));
      } else if (c.groups > 0) {
        choice = std::exp(choice - most) / total;
      }
      choices[e] = c.biased ? choice + bias.data[e] : choice;
    }
    if (c.groups > 0) LimitToGroups(&choices);
    return choices;
  }
  void LimitToGroups(std::vector<float>* choices) const {
    const int64_t size = c.experts / c.groups;
    std::vector<float> scores;
    for (int64_t g = 0; g < c.groups; ++g) {
      std::vector<float> own(choices->begin() + g * size, choices->begin() + (g + 1) * size);
      std::sort(own.begin(), own.end(), [](float a, float b) { return Order(a) > Order(b); });
      scores.push_back(IsSigmoid() && size > 1 ? own[0] + own[1] : own[0]);
    }
    const auto best = Best(scores, c.top_groups);
    for (int64_t e = 0; e < c.experts; ++e) {
      if (std::count(best.begin(), best.end(), e / size) == 0) (*choices)[e] = -kInf;
    }
  }
  static std::vector<int32_t> Best(const std::vector<float>& values, int64_t count) {
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return Order(values[a]) > Order(values[b]); });
    order.resize(count);
    return order;
  }
  std::vector<int32_t> Chosen(int64_t t) const {
    return mask[t] == 0 ? std::vector<int32_t>(c.slots, -1) : Best(Choices(t), c.slots);
  }
  // Each expert's score over the sum of those that share it: of the chosen ones, or of all.
  double Score(int64_t t, int32_t e, const std::vector<int32_t>& chosen) const {
    const auto score = [&](int64_t i) {
      return IsSigmoid() ? Sigmoid(Logit(t, i)) : std::exp(static_cast<double>(Logit(t, i)));
    };
    double sum = IsSigmoid() && !c.normalize ? 1 : 0;
    if (c.normalize) {
      for (const int32_t i : chosen) sum += score(i);
    } else if (!IsSigmoid()) {
      for (int64_t i = 0; i < c.experts; ++i) sum += score(i);
    }
    return score(e) / sum;
  }

  void Run(uint32_t seed) {
    std::string error;
    EXPECT(LaunchMoeGate(p,
                         {logits.get(), c.biased ? bias.get() : nullptr,
                          c.masked ? mask.data() : nullptr, indices.get(), weights.get()},
                         nullptr, &error))
        << error;
    std::string failure = simt::Run(seed);
    EXPECT(failure.empty()) << failure;
    EXPECT(LaunchMoeGateGradient(p,
                                 {dweights.get(), indices.get(), weights.get(),
                                  p.GradientNeedsLogits() ? logits.get() : nullptr, dlogits.get()},
                                 nullptr, &error))
        << error;
    failure = simt::Run(seed);
    EXPECT(failure.empty()) << failure;
  }

  int64_t Wrong() const {
    int64_t wrong = 0;
    for (int64_t t = 0; t < c.tokens; ++t) {
      const auto chosen = Chosen(t);
      std::vector<double> scores(c.slots, 0), own(c.experts, 0);
      double moved = 0;  // the weights' gradient, on average
      for (int64_t j = 0; j < c.slots; ++j) {
        const int64_t s = t * c.slots + j;
        wrong += indices.data[s] != chosen[j];
        if (chosen[j] >= 0) scores[j] = Score(t, chosen[j], chosen);
        wrong += !(std::abs(weights[s] - kScale * scores[j]) <= 1e-5 * scores[j]);
        if (chosen[j] < 0) continue;
        own[chosen[j]] = kScale * scores[j] * dweights[s];
        moved += own[chosen[j]];
      }
      const double unit = sizeof(T) == 4 ? 1e-5 : 1e-2;
      for (int32_t e = 0; e < c.experts; ++e) {
        const bool is_chosen = std::count(chosen.begin(), chosen.end(), e) > 0;
        double want = own[e];
        if (mask[t] != 0 && (c.normalize ? is_chosen : !IsSigmoid())) {
          want -= Score(t, e, chosen) * moved;
        }
        if (is_chosen && IsSigmoid()) want *= Sigmoid(-Logit(t, e));
        const double size = std::abs(own[e]) + std::abs(moved) + std::abs(want);
        const double error = std::abs(dlogits[t * c.experts + e] - want);
        wrong += !(error <= unit * std::abs(want) + 1e-5 * size);
        wrong += mask[t] == 0 && dlogits[t * c.experts + e] != 0;
      }
    }
    return wrong;
  }
};

template <typename T>
void Check(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  Problem<T> problem(c, random);
  problem.Run(seed);
  EXPECT_EQ(problem.Wrong(), 0) << "seed " << seed;
}

TEST(ChoicesWeightsAndGradientsEqualTheirDefinition) {
  uint32_t seed = 1;
  for (const auto score : {GateScore::kSoftmax, GateScore::kSigmoid}) {
    for (const bool normalize : {true, false}) {
      Check<float>({37, 128, 8, score, normalize, /*biased=*/true, /*masked=*/true}, seed++);
      Check<__nv_bfloat16>({21, 60, 3, score, normalize, false, true}, seed++);
      Check<__half>({9, 7, 7, score, normalize, true, false}, seed++);  // all experts
      Check<float>({5, 1, 1, score, normalize}, seed++);
    }
  }
  for (const auto score : {GateScore::kSoftmax, GateScore::kSigmoid}) {  // with groups
    Check<float>({19, 256, 8, score, true, true, true, 8, 4}, seed++);
    Check<__nv_bfloat16>({7, 60, 6, score, false, false, true, 20, 3}, seed++);
    Check<float>({9, 31, 5, score, true, true, false, 31, 5}, seed++);  // each expert is a group
    Check<__half>({6, 64, 3, score, false, true, false, 1, 1}, seed++);
  }
  Check<float>({3, 257, 32}, seed++);
  Check<__nv_bfloat16>({2, 1024, 17, GateScore::kSoftmax, false}, seed++);
  // Two and three tokens of a warp.
  Check<float>({2310, 40, 3, GateScore::kSigmoid, true, false, true}, seed++);
  Check<float>({5000, 8, 2, GateScore::kSoftmax, false, false, true}, seed++);
}

// One token with these logits chooses these experts.
void CheckChoice(const std::vector<float>& logits, const std::vector<int32_t>& want) {
  const auto experts = static_cast<int64_t>(logits.size());
  std::vector<int32_t> indices(want.size(), -7);
  std::vector<float> weights(want.size());
  const MoeGateParams p{1, experts,    static_cast<int64_t>(want.size()), GateScore::kSoftmax, true,
                        1, DType::kF32};
  std::string error;
  EXPECT(LaunchMoeGate(p, {logits.data(), nullptr, nullptr, indices.data(), weights.data()},
                       nullptr, &error))
      << error;
  const std::string failure = simt::Run(1);
  EXPECT(failure.empty()) << failure;
  EXPECT(indices == want);
}

TEST(NumbersAreOrderedByTheirBits) {
  const float negative_nan = BitsAs<float>(0xffffffffu);
  // As lax.top_k on a CPU.
  CheckChoice({-0.0f, 0.0f, 1, -kInf, negative_nan, kNaN, kInf, kNaN, 2, 2},
              {5, 7, 6, 8, 9, 2, 1, 0, 3, 4});
  // Equal ones in one lane and in several: the lower index first, in rounds of 32.
  std::vector<float> equal(100, 3.0f);
  equal[70] = 4;
  CheckChoice(equal, {70, 0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                      15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30});
  std::vector<float> strided(130, -kInf);
  for (const int e : {1, 33, 65, 97, 129, 2, 34}) strided[e] = 5;
  CheckChoice(strided, {1, 2, 33, 34, 65, 97, 129, 0, 3});
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
