// geglu on the CPU against its definition in fp64, both forms of GELU: every variant, dtype, width of tail and stride.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/geglu/geglu.h>

namespace liger::geglu {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype;
  bool exact;
  int64_t padding = 0, offset = 0;
  double scale = 1;
};

constexpr double kK1 = 1.5957691216057308, kK3 = kK1 * 0.044715;  // 2 sqrt(2 / pi)
double cdf(double a, bool exact) { return exact ? std::erfc(-a * std::sqrt(0.5)) / 2 : 1 / (1 + std::exp(-a * (kK1 + kK3 * a * a))); }
double slope(double a, bool exact) {
  const double s = cdf(a, exact);
  return s + (exact ? a * std::exp(-a * a / 2) * 0.3989422804014327 : a * s * (1 - s) * (kK1 + 3 * kK3 * a * a));
}
// 16 units for products and polynomials, and four roundings of the argument of the exponential.
double relative_error(double a) {
  const double x = std::min(std::abs(a), 12.);
  return (16 + 4 * (1.6 * x + 0.072 * x * x * x)) * test::unit_roundoff(DType::kF32);
}
constexpr double kUnderflow = 1e-35;

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset << ", exact " << c.exact);
  Matrix a(c.dtype, c.rows, c.cols, c.padding, c.offset), b(c.dtype, c.rows, c.cols, 3 * c.padding),
      dc(c.dtype, c.rows, c.cols, 2 * c.padding);
  a.random(1, c.scale), b.random(2), dc.random(3);
  Matrix out = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), da = out, db = out;
  forward({.a = a.data(),
           .b = b.data(),
           .c = out.data(),
           .rows = c.rows,
           .cols = c.cols,
           .a_stride = a.stride(),
           .b_stride = b.stride(),
           .c_stride = out.stride(),
           .dtype = c.dtype,
           .exact = c.exact},
          host);
  backward({.dc = dc.data(),
            .a = a.data(),
            .b = b.data(),
            .da = da.data(),
            .db = db.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dc_stride = dc.stride(),
            .a_stride = a.stride(),
            .b_stride = b.stride(),
            .da_stride = da.stride(),
            .db_stride = db.stride(),
            .dtype = c.dtype,
            .exact = c.exact},
           host);
  const auto gelu = [&](int64_t i, int64_t j) { return a.at(i, j) * cdf(a.at(i, j), c.exact); };
  const auto error = [&](int64_t i, int64_t j) {
    return std::abs(gelu(i, j)) * (relative_error(a.at(i, j)) + 1.01 * test::unit_roundoff(c.dtype)) + test::smallest(c.dtype) + kUnderflow;
  };
  expect_near(
      out, [&](int64_t i, int64_t j) { return gelu(i, j) * b.at(i, j); },
      [&](int64_t i, int64_t j) { return error(i, j) * std::abs(b.at(i, j)); }, "c");
  expect_near(
      db, [&](int64_t i, int64_t j) { return gelu(i, j) * dc.at(i, j); },
      [&](int64_t i, int64_t j) { return error(i, j) * std::abs(dc.at(i, j)); }, "db");
  expect_near(
      da, [&](int64_t i, int64_t j) { return dc.at(i, j) * b.at(i, j) * slope(a.at(i, j), c.exact); },
      [&](int64_t i, int64_t j) {
        const double x = std::min(std::abs(a.at(i, j)), 12.), s = cdf(a.at(i, j), c.exact);
        return std::abs(dc.at(i, j) * b.at(i, j)) * (s * (1 + x * (1.6 + 0.22 * x * x)) * relative_error(x) + kUnderflow);
      },
      "da");
}

TEST(Geglu, WidthsAndTypes) {
  for_each_cpu_variant("geglu", [](const Host& host) {
    for (const bool exact : {false, true}) {
      for (const DType dtype : test::kDTypes) {
        for (int64_t cols = 1; cols <= 33; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype, .exact = exact}, host);
        for (const int64_t cols : {63, 65, 4095, 4097}) check({.rows = 2, .cols = cols, .dtype = dtype, .exact = exact}, host);
        check({.rows = 500, .cols = 70, .dtype = dtype, .exact = exact, .padding = 2}, host);
      }
    }
  });
}

TEST(Geglu, StridesMisalignmentAndScales) {
  for_each_cpu_variant("geglu", [](const Host& host) {
    for (const bool exact : {false, true}) {
      for (const DType dtype : test::kDTypes) {
        for (const int64_t padding : {0, 1, 8})
          check({.rows = 5, .cols = 77, .dtype = dtype, .exact = exact, .padding = padding, .offset = 1}, host);
        for (const double scale : {1e-3, 4., 1e4}) check({.rows = 6, .cols = 200, .dtype = dtype, .exact = exact, .scale = scale}, host);
      }
    }
  });
}

// Both tails, densely, in fp32: relative accuracy left of zero, where 1 + tanh and 1 + erf cancel.
TEST(Geglu, TheActivationEverywhere) {
  for_each_cpu_variant("geglu", [](const Host& host) {
    const int64_t n = 100'000;
    Matrix a(DType::kF32, 1, n), one(DType::kF32, 1, n), out = Matrix::output(DType::kF32, 1, n);
    for (int64_t j = 0; j < n; ++j) a.set(0, j, -9 + 18. * static_cast<double>(j) / n), one.set(0, j, 1);
    for (const bool exact : {false, true}) {
      forward({.a = a.data(),
               .b = one.data(),
               .c = out.data(),
               .rows = 1,
               .cols = n,
               .a_stride = n,
               .b_stride = n,
               .c_stride = n,
               .dtype = DType::kF32,
               .exact = exact},
              host);
      expect_near(
          out, [&](int64_t, int64_t j) { return a.at(0, j) * cdf(a.at(0, j), exact); },
          [&](int64_t, int64_t j) { return std::abs(a.at(0, j) * cdf(a.at(0, j), exact)) * relative_error(a.at(0, j)); }, "gelu");
    }
  });
}

TEST(Geglu, ZeroRows) {
  for_each_cpu_variant("geglu", [](const Host& host) {
    check({.rows = 0, .cols = 40, .dtype = DType::kBF16, .exact = false}, host);
    check({.rows = 3, .cols = 0, .dtype = DType::kF32, .exact = true}, host);
  });
}

TEST(Geglu, ExplainNamesEveryVariantAndThePlan) {
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != "geglu") continue;
    const std::string text = info.explain({.shape = {8192, 4096}, .dtype = DType::kBF16, .machine = cpu_machine()});
    for (const std::string& variant : info.variants()) EXPECT_NE(text.find('\t' + variant + '\t'), std::string::npos) << text;
    EXPECT_NE(text.find("plan\t"), std::string::npos);
    return;
  }
  FAIL() << "geglu is not registered";
}

}  // namespace
}  // namespace liger::geglu
