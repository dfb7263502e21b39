// sparsemax on the CPU against its definition in fp64, by sorting: every variant, dtype, width of tail, stride and misalignment.
#include <algorithm>

#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/sparsemax/sparsemax.h>

namespace liger::sparsemax {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double scale = 1;
};

// tau of x relative to its largest element.
double threshold(std::vector<double> z) {
  std::sort(z.begin(), z.end(), std::greater<>());
  double sum = 0, tau = 0;
  for (size_t k = 0; k < z.size(); ++k) {
    sum += z[k];
    if (1 + static_cast<double>(k + 1) * z[k] > sum) tau = (sum - 1) / static_cast<double>(k + 1);
  }
  return tau;
}

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset << ", scale " << c.scale);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset), dy(c.dtype, c.rows, c.cols, 2 * c.padding);
  Matrix y = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), dx = Matrix::output(c.dtype, c.rows, c.cols);
  x.random(1, c.scale), dy.random(2);
  forward({.x = x.data(), .y = y.data(), .rows = c.rows, .cols = c.cols, .x_stride = x.stride(), .y_stride = y.stride(), .dtype = c.dtype},
          host);
  backward({.dy = dy.data(),
            .y = y.data(),
            .dx = dx.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .y_stride = y.stride(),
            .dx_stride = dx.stride(),
            .dtype = c.dtype},
           host);

  const double u = test::unit_roundoff(DType::kF32), across = std::sqrt(static_cast<double>(c.cols));
  std::vector<double> top(c.rows, -HUGE_VAL), tau(c.rows), mean(c.rows), size(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    std::vector<double> z(c.cols);
    for (int64_t j = 0; j < c.cols; ++j) top[i] = std::max(top[i], x.at(i, j));
    double sum = 0, sizes = 0, count = 0;
    for (int64_t j = 0; j < c.cols; ++j) {
      z[j] = x.at(i, j) - top[i];
      if (y.at(i, j) > 0) sum += dy.at(i, j), sizes += std::abs(dy.at(i, j)), count += 1;
    }
    tau[i] = threshold(z), mean[i] = sum / count, size[i] = sizes / count;
  }
  expect_near(
      y, [&](int64_t i, int64_t j) { return std::max(x.at(i, j) - top[i] - tau[i], 0.); },
      [&](int64_t, int64_t) { return (8 + across) * u; }, "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return y.at(i, j) > 0 ? dy.at(i, j) - mean[i] : 0; },
      [&](int64_t i, int64_t j) { return y.at(i, j) > 0 ? u * (4 * std::abs(dy.at(i, j)) + (8 + across) * size[i]) : 0; }, "dx");
}

TEST(Sparsemax, WidthsAndTypes) {
  for_each_cpu_variant("sparsemax", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 70; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype, .scale = 0.3}, host);
      for (const int64_t cols : {1023, 1025, 4096, 9000, 70001}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      check({.rows = 0, .cols = 70, .dtype = dtype}, host);
    }
  });
}

TEST(Sparsemax, StridesMisalignmentAndScales) {
  for_each_cpu_variant("sparsemax", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {0., 1e-3, 0.03, 0.3, 100.}) check({.rows = 6, .cols = 2000, .dtype = dtype, .scale = scale}, host);
    }
  });
}

}  // namespace
}  // namespace liger::sparsemax
