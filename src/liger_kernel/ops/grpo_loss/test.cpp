// grpo_loss on the CPU against its definition in fp64: every kind and level, derivatives by differences, masks, slices, overflow.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/grpo_loss/grpo_loss.h>

namespace liger::grpo_loss {
namespace {

using test::for_each_cpu_variant;

struct Data {
  int64_t sequences, length;
  std::vector<float> logp, old_logp, ref_logp, mask, advantage, log_ratio, phi, importance;
};

Data make(int64_t sequences, int64_t length, bool importance_per_token) {
  Data d{sequences, length, {}, {}, {}, {}, {}, {}, {}, {}};
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  const int64_t n = sequences * length;
  for (int64_t i = 0; i < n; ++i) {
    d.logp.push_back(-2 - std::abs(normal(generator)));
    d.old_logp.push_back(d.logp[i] + 0.3f * normal(generator));
    d.ref_logp.push_back(d.logp[i] + 0.3f * normal(generator));
    d.mask.push_back(i % 5 == 2 ? 0.f : 1.f);
  }
  for (int64_t s = 0; s < sequences; ++s) {
    d.advantage.push_back(normal(generator)), d.log_ratio.push_back(0.3f * normal(generator));
    d.phi.push_back(std::abs(normal(generator)));
  }
  for (int64_t i = 0; i < (importance_per_token ? n : sequences); ++i) d.importance.push_back(0.5f + std::abs(normal(generator)));
  return d;
}

// The loss of one token as a function of its log-probability and of the logarithm of the ratio.
double loss_at(const Options& o, const Data& d, int64_t i, int64_t s, double importance, double logp, double log_ratio, double constant) {
  const double a = d.advantage[s], r = std::exp(log_ratio), k = d.ref_logp[i] - logp;
  double loss = 0;
  switch (o.kind) {
    case Kind::kClipped: loss = -std::min(std::min(r, double(o.delta)) * a, std::clamp(r, double(o.low), double(o.high)) * a); break;
    case Kind::kCispo: loss = -std::min(constant, double(o.high)) * a * logp; break;
    case Kind::kSapo: {
      const double tau = a > 0 ? o.tau_positive : o.tau_negative;
      loss = -a * 4 / tau / (1 + std::exp(-tau * (r - 1)));
      break;
    }
    case Kind::kVespo: loss = -d.phi[s] * a * logp; break;
  }
  return loss * importance + o.beta * (std::exp(k) - k - 1) * (o.bias_correction ? r : 1);
}

void check(const Options& o, bool sequence_level, bool importance_per_token, const Host& host) {
  SCOPED_TRACE(::testing::Message() << "kind " << int(o.kind) << ", sequence level " << sequence_level << ", beta " << o.beta);
  const Data d = make(4, 9, importance_per_token);
  const int64_t n = d.sequences * d.length, skip = sequence_level ? 9 : 5;  // a slice that begins within, or with, a sequence
  std::vector<float> loss(n, -7), kl(n, -7), clipped(n, -7), slope(n, -7), ratio_slope(n, -7);
  for (const auto& [begin, end] : {std::pair{int64_t{0}, skip}, std::pair{skip, n}}) {
    tokens({.logp = d.logp.data() + begin,
            .old_logp = d.old_logp.data() + begin,
            .ref_logp = d.ref_logp.data() + begin,
            .mask = d.mask.data() + begin,
            .advantage = d.advantage.data(),
            .log_ratio = sequence_level ? d.log_ratio.data() : nullptr,
            .phi = d.phi.data(),
            .importance = d.importance.data() + (importance_per_token ? begin : 0),
            .importance_per_token = importance_per_token,
            .loss = loss.data() + begin,
            .kl = kl.data() + begin,
            .clipped = clipped.data() + begin,
            .slope = slope.data() + begin,
            .ratio_slope = sequence_level ? ratio_slope.data() + begin : nullptr,
            .tokens = end - begin,
            .first = begin,
            .length = d.length,
            .options = o},
           host);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t s = i / d.length;
    if (d.mask[i] == 0) {
      EXPECT_EQ(loss[i], 0);
      EXPECT_EQ(kl[i], 0);
      EXPECT_EQ(clipped[i], 0);
      EXPECT_EQ(slope[i], 0);
      if (sequence_level) EXPECT_EQ(ratio_slope[i], 0);
      continue;
    }
    const double importance = d.importance[importance_per_token ? i : s], logp = d.logp[i];
    const double log_ratio = sequence_level ? d.log_ratio[s] : logp - d.old_logp[i], r = std::exp(log_ratio);
    const auto at = [&](double by_logp, double by_ratio) {
      return loss_at(o, d, i, s, importance, logp + by_logp, log_ratio + by_ratio, r);
    };
    EXPECT_NEAR(loss[i], at(0, 0), 1e-5);
    const double h = 1e-6, own = (at(h, 0) - at(-h, 0)) / (2 * h), through = (at(0, h) - at(0, -h)) / (2 * h);
    EXPECT_NEAR(slope[i], sequence_level ? own : own + through, 1e-4);
    if (sequence_level) EXPECT_NEAR(ratio_slope[i], through, 1e-4);
    const double k = d.ref_logp[i] - logp;
    EXPECT_NEAR(kl[i], o.beta == 0 ? 0 : (std::exp(k) - k - 1) * (o.bias_correction ? r : 1), 1e-5);
    const bool cut = (r < o.low && d.advantage[s] < 0) || (r > o.high && d.advantage[s] > 0);
    EXPECT_EQ(clipped[i], (o.kind == Kind::kClipped || o.kind == Kind::kCispo) && cut ? 1 : 0);
  }
}

TEST(GrpoLoss, KindsAndLevels) {
  for_each_cpu_variant("grpo_loss", [](const Host& host) {
    const float inf = std::numeric_limits<float>::infinity();
    for (const Kind kind : {Kind::kClipped, Kind::kCispo, Kind::kSapo, Kind::kVespo}) {
      for (const bool corrected : {false, true}) {
        for (const float beta : {0.f, 0.1f}) {
          Options o{.kind = kind, .delta = inf, .beta = beta, .bias_correction = corrected, .tau_positive = 2, .tau_negative = 0.5f};
          if (kind == Kind::kCispo) o.low = -inf;
          check(o, false, corrected, host);
          if (kind == Kind::kClipped) {
            check(o, true, corrected, host);
            o.delta = 1.1f;
            check(o, false, !corrected, host);
            check(o, true, !corrected, host);
          }
        }
      }
    }
  });
}

// A ratio beyond fp32 that is clipped away has no gradient.
TEST(GrpoLoss, Overflow) {
  for_each_cpu_variant("grpo_loss", [](const Host& host) {
    const float logp = -1, old_logp = -200, advantage = 1, inf = std::numeric_limits<float>::infinity();
    float loss, clipped, slope;
    TokensArgs a{};
    a.logp = &logp, a.old_logp = &old_logp, a.advantage = &advantage, a.loss = &loss, a.clipped = &clipped, a.slope = &slope;
    a.tokens = a.length = 1, a.options.delta = inf;
    for (const Kind kind : {Kind::kClipped, Kind::kSapo}) {
      a.options.kind = kind;
      tokens(a, host);
      EXPECT_TRUE(std::isfinite(loss));
      EXPECT_EQ(slope, 0);
    }
    a.tokens = 0;
    tokens(a, host);
  });
}

}  // namespace
}  // namespace liger::grpo_loss
