// relu_squared on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/relu_squared/relu_squared.h>

namespace liger::relu_squared {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double scale = 1;
  bool in_place = false;  // dx over x
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset, c.in_place), dy(c.dtype, c.rows, c.cols, 2 * c.padding);
  Matrix y = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset);
  x.random(1, c.scale), dy.random(2, c.scale);
  Matrix dx = c.in_place ? x : Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset);

  forward({.x = x.data(), .y = y.data(), .rows = c.rows, .cols = c.cols, .x_stride = x.stride(), .y_stride = y.stride(), .dtype = c.dtype},
          host);
  backward({.dy = dy.data(),
            .x = c.in_place ? dx.data() : x.data(),
            .dx = dx.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .x_stride = x.stride(),
            .dx_stride = dx.stride(),
            .dtype = c.dtype},
           host);

  const auto up = [&](int64_t i, int64_t j) { return std::max(x.at(i, j), 0.); };
  const double u = test::unit_roundoff(DType::kF32), least = test::smallest(DType::kF32);
  expect_near(
      y, [&](int64_t i, int64_t j) { return up(i, j) * up(i, j); }, [&](int64_t i, int64_t j) { return u * up(i, j) * up(i, j) + least; },
      "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return 2 * up(i, j) * dy.at(i, j); },
      [&](int64_t i, int64_t j) { return 2 * u * up(i, j) * std::abs(dy.at(i, j)) + least; }, "dx");
}

TEST(ReluSquared, WidthsAndTypes) {
  for_each_cpu_variant("relu_squared", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 33; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype}, host);
      for (const int64_t cols : {63, 65, 4095, 4097, 20000}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      check({.rows = 500, .cols = 70, .dtype = dtype, .padding = 2}, host);
      check({.rows = 0, .cols = 70, .dtype = dtype}, host);
    }
  });
}

TEST(ReluSquared, StridesMisalignmentScalesAndGradientsOverX) {
  for_each_cpu_variant("relu_squared", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {1e-3, 300.}) check({.rows = 6, .cols = 200, .dtype = dtype, .scale = scale}, host);
      check({.rows = 6, .cols = 200, .dtype = dtype, .padding = 3, .in_place = true}, host);
    }
  });
}

}  // namespace
}  // namespace liger::relu_squared
