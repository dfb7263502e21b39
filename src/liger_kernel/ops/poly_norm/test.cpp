// poly_norm on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/poly_norm/poly_norm.h>

namespace liger::poly_norm {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype, parameter_dtype = DType::kF32;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double scale = 1;
};

constexpr float kEps = 1e-6f;

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", parameters " << name(c.parameter_dtype)
                                    << ", padding " << c.padding << ", offset " << c.offset);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset), dy(c.dtype, c.rows, c.cols, 2 * c.padding);
  Matrix weight(c.parameter_dtype, 1, 3), bias(c.parameter_dtype, 1, 1);
  Matrix y = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), dx = Matrix::output(c.dtype, c.rows, c.cols);
  Matrix dw = Matrix::output(c.parameter_dtype, 1, 3), db = Matrix::output(c.parameter_dtype, 1, 1);
  Matrix rstd = Matrix::output(DType::kF32, c.rows, 3);
  x.random(1, c.scale), dy.random(2), weight.random(3), bias.random(4);

  forward({.x = x.data(),
           .weight = weight.data(),
           .bias = bias.data(),
           .y = y.data(),
           .rstd = rstd.data<float>(),
           .rows = c.rows,
           .cols = c.cols,
           .x_stride = x.stride(),
           .y_stride = y.stride(),
           .dtype = c.dtype,
           .weight_dtype = c.parameter_dtype,
           .bias_dtype = c.parameter_dtype,
           .eps = kEps},
          host);
  backward({.dy = dy.data(),
            .x = x.data(),
            .weight = weight.data(),
            .rstd = rstd.data<float>(),
            .dx = dx.data(),
            .dw = dw.data(),
            .db = db.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .x_stride = x.stride(),
            .dx_stride = dx.stride(),
            .dtype = c.dtype,
            .weight_dtype = c.parameter_dtype,
            .bias_dtype = c.parameter_dtype},
           host);

  // Of each row and power p = 3 - i: 1 / rms, mean(g x^p) and mean|g x^p|.
  struct Row {
    double rstd[3], mean[3], size[3];
  };
  std::vector<Row> rows(c.rows);
  double want_dw[3] = {}, size_dw[3] = {}, want_db = 0, size_db = 0;
  const auto n = static_cast<double>(c.cols);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int k = 0; k < 3; ++k) {
      double squares = 0, products = 0, sizes = 0;
      for (int64_t j = 0; j < c.cols; ++j) {
        const double power = std::pow(x.at(i, j), 3 - k);
        squares += power * power, products += dy.at(i, j) * power, sizes += std::abs(dy.at(i, j) * power);
      }
      const double r = 1 / std::sqrt(squares / n + kEps);
      rows[i].rstd[k] = r, rows[i].mean[k] = products / n, rows[i].size[k] = sizes / n;
      want_dw[k] += r * products, size_dw[k] += r * sizes;
    }
    for (int64_t j = 0; j < c.cols; ++j) want_db += dy.at(i, j), size_db += std::abs(dy.at(i, j));
  }
  const double u = test::unit_roundoff(DType::kF32), least = test::smallest(DType::kF32);
  // Sums of the terms, and of their sizes.
  const auto forward_sum = [&](int64_t i, int64_t j, bool sizes) {
    double total = sizes ? std::abs(bias.at(0, 0)) : bias.at(0, 0);
    for (int k = 0; k < 3; ++k) {
      const double term = weight.at(0, k) * rows[i].rstd[k] * std::pow(x.at(i, j), 3 - k);
      total += sizes ? std::abs(term) : term;
    }
    return total;
  };
  const auto backward_sum = [&](int64_t i, int64_t j, bool sizes) {
    double total = 0;
    for (int k = 0; k < 3; ++k) {
      const int p = 3 - k;
      const double r = rows[i].rstd[k], scale = p * weight.at(0, k) * r, own = dy.at(i, j) * std::pow(x.at(i, j), p - 1);
      const double pull = r * r * std::pow(x.at(i, j), 2 * p - 1);
      total += sizes ? std::abs(scale) * (std::abs(own) + std::abs(pull) * rows[i].size[k]) : scale * (own - pull * rows[i].mean[k]);
    }
    return total;
  };
  expect_near(
      y, [&](int64_t i, int64_t j) { return forward_sum(i, j, false); },
      [&](int64_t i, int64_t j) { return 40 * u * forward_sum(i, j, true) + least; }, "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return backward_sum(i, j, false); },
      [&](int64_t i, int64_t j) { return 60 * u * backward_sum(i, j, true) + least; }, "dx");
  expect_near(
      rstd, [&](int64_t i, int64_t k) { return rows[i].rstd[k]; }, [&](int64_t i, int64_t k) { return 36 * u * rows[i].rstd[k]; }, "rstd");
  const double across = (40 + std::sqrt(static_cast<double>(c.rows))) * u;
  expect_near(
      dw, [&](int64_t, int64_t k) { return want_dw[k]; }, [&](int64_t, int64_t k) { return across * size_dw[k] + least; }, "dw");
  expect_near(
      db, [&](int64_t, int64_t) { return want_db; }, [&](int64_t, int64_t) { return across * size_db + least; }, "db");
}

TEST(PolyNorm, WidthsAndTypes) {
  for_each_cpu_variant("poly_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 70; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype}, host);
      for (const int64_t cols : {1023, 1025, 4096, 9000}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      for (const DType parameters : test::kDTypes) check({.rows = 300, .cols = 70, .dtype = dtype, .parameter_dtype = parameters}, host);
      check({.rows = 0, .cols = 70, .dtype = dtype}, host);
    }
  });
}

TEST(PolyNorm, StridesMisalignmentAndScales) {
  for_each_cpu_variant("poly_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {1e-2, 30.}) check({.rows = 6, .cols = 200, .dtype = dtype, .scale = scale}, host);
    }
  });
}

}  // namespace
}  // namespace liger::poly_norm
