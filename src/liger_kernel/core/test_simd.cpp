// core/cpu/simd.inl.h of every ISA that this machine runs: conversions against exact ones, exp and tanh against double.
#include <algorithm>
#include <cstdio>

#include <liger_kernel/core/cpu/test_simd.h>
#include <liger_kernel/core/testing.h>

namespace liger::test {
namespace {

const std::vector<std::pair<const char*, const Simd*>>& isas() {
  static const std::vector<std::pair<const char*, const Simd*>> all = [] {
    std::vector<std::pair<const char*, const Simd*>> found = {{"baseline", &simd_cpu()}};
#ifdef __x86_64__
    if (cpu_machine().floor >= kAvx2) found.emplace_back("avx2", &simd_cpu_avx2());
    if (cpu_machine().floor >= kAvx512) found.emplace_back("avx512", &simd_cpu_avx512());
#endif
    return found;
  }();
  return all;
}

uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}
float from_bits(uint32_t u) {
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}

constexpr DType kNarrow[] = {DType::kBF16, DType::kF16};

// Every fp32 value at which narrowing could go wrong: all values of the type, the midpoints between neighbours (ties), one fp32
// unit beside both; the fp32 subnormals' ends, infinities and NaNs of every payload bit; both signs.
std::vector<float> narrowing_values(DType t) {
  std::vector<float> values;
  for (uint32_t pattern = 0; pattern < 0x8000; ++pattern) {
    const double v = decode(t, pattern), next = decode(t, pattern + 1);
    if (!std::isfinite(v)) continue;
    const double middle = std::isfinite(next) ? (v + next) / 2 : v * (1 + unit_roundoff(t));
    for (const float f : {static_cast<float>(v), static_cast<float>(middle)}) {
      for (const float g : {std::nextafter(f, -INFINITY), f, std::nextafter(f, INFINITY)}) values.insert(values.end(), {g, -g});
    }
  }
  for (const uint32_t u : {0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u})
    values.insert(values.end(), {from_bits(u), -from_bits(u)});
  for (int bit = 0; bit < 23; ++bit) values.insert(values.end(), {from_bits(0x7f800000u | 1u << bit), from_bits(0xff800000u | 1u << bit)});
  values.push_back(from_bits(0x7fffffffu));
  return values;
}

bool same_narrow(DType t, uint16_t got, float v) {
  const uint32_t want = encode(t, v);
  const double decoded = decode(t, got);
  if (std::isnan(v)) return std::isnan(decoded);
  if (got == want) return true;
  // VCVTNEPS2BF16 takes fp32 subnormals for zeros, whatever the rounding control says.
  return t == DType::kBF16 && std::abs(v) < std::numeric_limits<float>::min() && decoded == 0 && std::signbit(decoded) == std::signbit(v);
}

TEST(Simd, EncodeAndDecodeAreInverse) {
  for (const DType t : kNarrow) {
    for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
      const double v = decode(t, pattern);
      if (!std::isnan(v)) {
        ASSERT_EQ(encode(t, v), pattern) << name(t);
      }
    }
  }
  for (const float v : {0.f, -0.f, 1.f, 3.14159f, 1e-45f, 1e-39f, 3.4e38f, INFINITY}) EXPECT_EQ(encode(DType::kF32, v), bits_of(v));
}

TEST(Simd, WideningIsExactForAllPatterns) {
  for (const auto& [isa, simd] : isas()) {
    for (const DType t : kNarrow) {
      std::vector<uint16_t> in(0x10000);
      for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
      std::vector<float> out(in.size());
      simd->widen(t, in.data(), out.data(), static_cast<int64_t>(in.size()));
      for (size_t i = 0; i < in.size(); ++i) {
        const double want = decode(t, in[i]);
        for (const float got : {out[i], simd->widen_scalar(t, in[i])}) {
          ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want))
              << isa << ' ' << name(t) << " pattern " << i << ": " << got << ", expected " << want;
        }
      }
    }
  }
}

TEST(Simd, NarrowingRoundsToNearestEven) {
  for (const DType t : kNarrow) {
    const std::vector<float> in = narrowing_values(t);
    const auto n = static_cast<int64_t>(in.size());
    std::vector<uint16_t> out(in.size());
    std::vector<float> round(in.size());
    for (const auto& [isa, simd] : isas()) {
      simd->narrow(t, in.data(), out.data(), n);
      simd->round(t, in.data(), round.data(), n);
      for (size_t i = 0; i < in.size(); ++i) {
        ASSERT_TRUE(same_narrow(t, out[i], in[i]))
            << isa << ' ' << name(t) << ' ' << in[i] << ": pattern " << out[i] << ", expected " << encode(t, in[i]);
        const double want = decode(t, out[i]);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(round[i]) : round[i] == want)
            << isa << ' ' << name(t) << ' ' << in[i] << ": rounded " << round[i];
        const uint16_t scalar = simd->narrow_scalar(t, in[i]);
        ASSERT_TRUE(std::isnan(in[i]) ? std::isnan(decode(t, scalar)) : scalar == encode(t, in[i]))
            << isa << ' ' << name(t) << " scalar " << in[i];
      }
    }
  }
}

// The first n elements alone are read and written; the other lanes hold the fill.
TEST(Simd, PartialLoadsAndStores) {
  for (const auto& [isa, simd] : isas()) {
    for (const DType t : kDTypes) {
      for (int64_t n = 1; n < simd->lanes; ++n) {
        Matrix in(t, 1, n), out = Matrix::output(t, 1, n);
        in.random(static_cast<uint32_t>(n));
        std::vector<float> wide(simd->lanes);
        simd->load_filled(t, in.data(), wide.data(), n, -2.5f);
        for (int64_t i = 0; i < simd->lanes; ++i) EXPECT_EQ(wide[i], i < n ? in.at(0, i) : -2.5) << isa << ' ' << name(t) << ' ' << n;
        simd->narrow(t, wide.data(), out.data(), n);
        for (int64_t i = 0; i < n; ++i) EXPECT_EQ(out.at(0, i), in.at(0, i));
        EXPECT_TRUE(out.untouched()) << isa << ' ' << name(t) << ' ' << n;
      }
    }
  }
}

TEST(Simd, LaneReductions) {
  for (const auto& [isa, simd] : isas()) {
    std::vector<float> v(simd->lanes);
    for (int i = 0; i < simd->lanes; ++i) v[i] = static_cast<float>(i + 1);
    EXPECT_EQ(simd->sum(v.data()), 0.5f * static_cast<float>(simd->lanes * (simd->lanes + 1))) << isa;
    for (int i = 0; i < simd->lanes; ++i) {
      std::vector<float> w(simd->lanes, -3.f);
      w[i] = -1.f;
      EXPECT_EQ(simd->max_lane(w.data()), -1.f) << isa << ' ' << i;
      w[i] = NAN;
      EXPECT_TRUE(std::isnan(simd->max_lane(w.data()))) << isa << ' ' << i;
    }
    // A NaN on the left gives the right, a NaN on the right wins.
    std::vector<float> nan(simd->lanes, NAN), one(simd->lanes, 1.f), out(simd->lanes);
    for (const auto& function : {simd->max, simd->min}) {
      function(nan.data(), one.data(), out.data());
      EXPECT_EQ(out, one) << isa;
      function(one.data(), nan.data(), out.data());
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float f) { return std::isnan(f); })) << isa;
    }
  }
}

struct Worst {
  double ulps = 0;
  float at = 0;
};

// The largest error in units of fp32's last place at the true value, over in.
Worst worst_error(void (*function)(const float*, float*, int64_t), double (*truth)(double), const std::vector<float>& in) {
  std::vector<float> out(in.size());
  function(in.data(), out.data(), static_cast<int64_t>(in.size()));
  Worst worst;
  for (size_t i = 0; i < in.size(); ++i) {
    const double want = truth(in[i]);
    const double ulp = std::ldexp(1, std::max(std::ilogb(want), -126) - 23);
    const double ulps = want == 0 && out[i] == 0 ? 0 : std::abs(out[i] - want) / ulp;
    if (!(ulps <= worst.ulps)) worst = {ulps, in[i]};
  }
  return worst;
}

std::vector<float> dense(float low, float high, int count) {
  std::vector<float> values;
  for (int i = 0; i <= count; ++i) values.push_back(low + static_cast<float>((static_cast<double>(high) - low) * i / count));
  return values;
}
// Every `step`-th bit pattern in [low, high], of both signs: dense near zero.
std::vector<float> patterns(float low, float high, uint32_t step) {
  std::vector<float> values;
  for (uint32_t u = bits_of(low); u <= bits_of(high); u += step) values.insert(values.end(), {from_bits(u), -from_bits(u)});
  return values;
}

double true_exp(double x) { return std::exp(x); }
double true_tanh(double x) { return std::tanh(x); }
double true_sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void report(const char* isa, const char* what, const Worst& w, double limit) {
  std::printf("  %-8s %-28s %.3f ULP at %.9g\n", isa, what, w.ulps, static_cast<double>(w.at));
  EXPECT_LE(w.ulps, limit) << isa << ' ' << what << " at " << w.at;
}

TEST(Simd, ExpIsWithinOneUlp) {
  for (const auto& [isa, simd] : isas()) {
    report(isa, "exp [-87.3, 88.7]", worst_error(simd->exp, true_exp, dense(-87.3f, 88.7f, 600'000)), 1);
    report(isa, "exp [-1, 1]", worst_error(simd->exp, true_exp, dense(-1, 1, 300'000)), 1);
    report(isa, "exp around 0", worst_error(simd->exp, true_exp, patterns(1e-38f, 1, 4001)), 1);
  }
}

TEST(Simd, TanhIsWithinThreeUlp) {
  for (const auto& [isa, simd] : isas()) {
    report(isa, "tanh [-12, 12]", worst_error(simd->tanh, true_tanh, dense(-12, 12, 600'000)), 3);
    report(isa, "tanh around 0", worst_error(simd->tanh, true_tanh, patterns(1e-30f, 12, 3001)), 3);
    report(isa, "tanh around 0.625", worst_error(simd->tanh, true_tanh, dense(0.6f, 0.65f, 100'000)), 3);
  }
}

TEST(Simd, SigmoidIsWithinThreeUlp) {
  for (const auto& [isa, simd] : isas())
    report(isa, "sigmoid [-86, 30]", worst_error(simd->sigmoid, true_sigmoid, dense(-86, 30, 600'000)), 3);
}

TEST(Simd, ExpAndTanhAtTheEnds) {
  const std::vector<float> in = {-INFINITY, -1e30f, -200.f, -87.34f, 88.73f, 200.f, 1e30f, INFINITY, NAN, -NAN, 0.f, -0.f};
  std::vector<float> out(in.size());
  const auto n = static_cast<int64_t>(in.size());
  for (const auto& [isa, simd] : isas()) {
    simd->exp(in.data(), out.data(), n);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(out[i], 0.f) << isa << " exp " << in[i];
    for (int i = 4; i < 8; ++i) EXPECT_EQ(out[i], INFINITY) << isa << " exp " << in[i];
    EXPECT_TRUE(std::isnan(out[8]) && std::isnan(out[9])) << isa;
    EXPECT_TRUE(out[10] == 1.f && out[11] == 1.f) << isa;
    simd->tanh(in.data(), out.data(), n);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(out[i], i < 4 ? -1.f : 1.f) << isa << " tanh " << in[i];
    EXPECT_TRUE(std::isnan(out[8]) && std::isnan(out[9])) << isa;
    EXPECT_TRUE(out[10] == 0.f && !std::signbit(out[10]) && out[11] == 0.f) << isa;
    simd->sigmoid(in.data(), out.data(), n);
    EXPECT_TRUE(out[0] == 0.f && out[7] == 1.f && std::isnan(out[8]) && out[10] == 0.5f) << isa;
  }
}

}  // namespace
}  // namespace liger::test
