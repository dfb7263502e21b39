// dyt on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/dyt/dyt.h>

namespace liger::dyt {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype, parameter_dtype = DType::kF32;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double scale = 1;
  bool has_beta = true;
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", parameters " << name(c.parameter_dtype)
                                    << ", padding " << c.padding << ", offset " << c.offset);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset), dy(c.dtype, c.rows, c.cols, 2 * c.padding);
  Matrix alpha(c.parameter_dtype, 1, 1), gamma(c.parameter_dtype, 1, c.cols), beta(c.parameter_dtype, 1, c.cols);
  Matrix y = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), dx = Matrix::output(c.dtype, c.rows, c.cols);
  Matrix dalpha = Matrix::output(c.parameter_dtype, 1, 1), dgamma = Matrix::output(c.parameter_dtype, 1, c.cols);
  Matrix dbeta = Matrix::output(c.parameter_dtype, 1, c.cols);
  x.random(1, c.scale), dy.random(2), gamma.random(3), beta.random(4), alpha.set(0, 0, 0.75);

  forward({.x = x.data(),
           .alpha = alpha.data(),
           .gamma = gamma.data(),
           .beta = c.has_beta ? beta.data() : nullptr,
           .y = y.data(),
           .rows = c.rows,
           .cols = c.cols,
           .x_stride = x.stride(),
           .y_stride = y.stride(),
           .dtype = c.dtype,
           .alpha_dtype = c.parameter_dtype,
           .gamma_dtype = c.parameter_dtype,
           .beta_dtype = c.parameter_dtype},
          host);
  backward({.dy = dy.data(),
            .x = x.data(),
            .alpha = alpha.data(),
            .gamma = gamma.data(),
            .dx = dx.data(),
            .dalpha = dalpha.data(),
            .dgamma = dgamma.data(),
            .dbeta = dbeta.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .x_stride = x.stride(),
            .dx_stride = dx.stride(),
            .dtype = c.dtype,
            .alpha_dtype = c.parameter_dtype,
            .gamma_dtype = c.parameter_dtype,
            .beta_dtype = c.parameter_dtype},
           host);

  const double u = test::unit_roundoff(DType::kF32), least = test::smallest(DType::kF32), across = std::sqrt(static_cast<double>(c.rows));
  const auto t = [&](int64_t i, int64_t j) { return std::tanh(0.75 * x.at(i, j)); };
  const auto s = [&](int64_t i, int64_t j) { return dy.at(i, j) * gamma.at(0, j) * (1 - t(i, j) * t(i, j)); };
  double want_dalpha = 0, size_dalpha = 0;
  std::vector<double> want_dgamma(c.cols), size_dgamma(c.cols), want_dbeta(c.cols), size_dbeta(c.cols);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      const double g = dy.at(i, j);
      want_dalpha += s(i, j) * x.at(i, j), size_dalpha += std::abs(g * gamma.at(0, j) * x.at(i, j));
      want_dgamma[j] += g * t(i, j), size_dgamma[j] += std::abs(g * t(i, j));
      want_dbeta[j] += g, size_dbeta[j] += std::abs(g);
    }
  }
  expect_near(
      y, [&](int64_t i, int64_t j) { return t(i, j) * gamma.at(0, j) + (c.has_beta ? beta.at(0, j) : 0); },
      [&](int64_t i, int64_t j) { return 8 * u * (std::abs(t(i, j) * gamma.at(0, j)) + std::abs(beta.at(0, j))) + least; }, "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return s(i, j) * 0.75; },
      [&](int64_t i, int64_t j) { return std::abs(dy.at(i, j) * gamma.at(0, j) * 0.75) * (12 + 6 * (1 - t(i, j) * t(i, j))) * u + least; },
      "dx");
  expect_near(
      dalpha, [&](int64_t, int64_t) { return want_dalpha; }, [&](int64_t, int64_t) { return (24 + across) * u * size_dalpha + least; },
      "dalpha");
  expect_near(
      dgamma, [&](int64_t, int64_t j) { return want_dgamma[j]; },
      [&](int64_t, int64_t j) { return (8 + across) * u * size_dgamma[j] + least; }, "dgamma");
  expect_near(
      dbeta, [&](int64_t, int64_t j) { return want_dbeta[j]; },
      [&](int64_t, int64_t j) { return (8 + across) * u * size_dbeta[j] + least; }, "dbeta");
}

TEST(Dyt, WidthsAndTypes) {
  for_each_cpu_variant("dyt", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 70; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype}, host);
      for (const int64_t cols : {1023, 1025, 4096, 9000}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      for (const DType parameters : test::kDTypes) check({.rows = 300, .cols = 70, .dtype = dtype, .parameter_dtype = parameters}, host);
      check({.rows = 0, .cols = 70, .dtype = dtype}, host);
    }
  });
}

TEST(Dyt, StridesMisalignmentScalesAndNoBeta) {
  for_each_cpu_variant("dyt", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {1e-3, 30.}) check({.rows = 6, .cols = 200, .dtype = dtype, .scale = scale, .has_beta = false}, host);
    }
  });
}

}  // namespace
}  // namespace liger::dyt
