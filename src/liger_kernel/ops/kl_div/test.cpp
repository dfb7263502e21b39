// kl_div on the CPU against its definition in fp64: every variant, pair of dtypes, width of tail, stride and misalignment, with and
// without a reduction.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/kl_div/kl_div.h>

namespace liger::kl_div {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype, target_dtype;
  bool log_target = false;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ' ' << name(c.target_dtype) << ", log_target "
                                    << c.log_target << ", padding " << c.padding << ", offset " << c.offset);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset), t(c.target_dtype, c.rows, c.cols, 2 * c.padding);
  Matrix loss = Matrix::output(DType::kF32, c.rows, c.cols, c.padding), total = Matrix::output(DType::kF32, 1, 1);
  Matrix grad = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), late = Matrix::output(c.dtype, c.rows, c.cols);
  Matrix dy(DType::kF32, c.rows, c.cols, c.padding);
  x.random(1, 3), t.random(2, 3), dy.random(3);
  // Probabilities from 0 to 1, or their logarithms, over many magnitudes.
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      const double v = -std::abs(t.at(i, j)) * 3;
      t.set(i, j, c.log_target ? v : (i + j) % 7 == 0 ? 0 : std::exp(v)), x.set(i, j, -std::abs(x.at(i, j)));
    }
  }
  ForwardArgs f{.input = x.data(),
                .target = t.data(),
                .loss = loss.data<float>(),
                .total = nullptr,
                .grad = nullptr,
                .rows = c.rows,
                .cols = c.cols,
                .input_stride = x.stride(),
                .target_stride = t.stride(),
                .loss_stride = loss.stride(),
                .grad_stride = grad.stride(),
                .dtype = c.dtype,
                .target_dtype = c.target_dtype,
                .factor = 1,
                .log_target = c.log_target,
                .eps = 1e-10f};
  forward(f, host);
  f.loss = nullptr, f.total = total.data<float>(), f.grad = grad.data(), f.factor = 0.25f;
  forward(f, host);
  backward({.dy = dy.data<float>(),
            .of_total = false,
            .target = t.data(),
            .grad = late.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .target_stride = t.stride(),
            .grad_stride = late.stride(),
            .dtype = c.dtype,
            .target_dtype = c.target_dtype,
            .log_target = c.log_target},
           host);

  const double u = test::unit_roundoff(DType::kF32), least = test::smallest(DType::kF32);
  const auto p = [&](int64_t i, int64_t j) { return c.log_target ? std::exp(t.at(i, j)) : t.at(i, j); };
  const auto own = [&](int64_t i, int64_t j) { return c.log_target ? t.at(i, j) : std::log(std::max(t.at(i, j), 1e-10)); };
  const auto value = [&](int64_t i, int64_t j) { return p(i, j) * (own(i, j) - x.at(i, j)); };
  const auto bound = [&](int64_t i, int64_t j) { return 8 * u * p(i, j) * (std::abs(own(i, j)) + std::abs(x.at(i, j)) + 1) + least; };
  double want = 0, size = least;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) want += value(i, j), size += bound(i, j);
  }
  expect_near(loss, value, bound, "loss");
  const auto across = 1 + std::sqrt(static_cast<double>(c.rows * c.cols));
  expect_near(
      total, [&](int64_t, int64_t) { return want / 4; }, [&](int64_t, int64_t) { return size * across; }, "total");
  expect_near(
      grad, [&](int64_t i, int64_t j) { return -p(i, j) / 4; }, [&](int64_t i, int64_t j) { return 4 * u * p(i, j) + least; }, "grad");
  expect_near(
      late, [&](int64_t i, int64_t j) { return -p(i, j) * dy.at(i, j); },
      [&](int64_t i, int64_t j) { return 4 * u * p(i, j) * std::abs(dy.at(i, j)) + least; }, "grad of elements");
}

TEST(KlDiv, WidthsAndTypes) {
  for_each_cpu_variant("kl_div", [](const Host& host) {
    for (const bool log_target : {false, true}) {
      for (const DType dtype : test::kDTypes) {
        for (int64_t cols = 1; cols <= 70; ++cols) {
          check({.rows = 3, .cols = cols, .dtype = dtype, .target_dtype = dtype, .log_target = log_target}, host);
        }
        for (const int64_t cols : {4095, 4096, 4097, 9000}) {
          check({.rows = 2, .cols = cols, .dtype = dtype, .target_dtype = dtype, .log_target = log_target}, host);
        }
        for (const DType target : test::kDTypes) {
          check({.rows = 30, .cols = 70, .dtype = dtype, .target_dtype = target, .log_target = log_target}, host);
        }
        check({.rows = 0, .cols = 70, .dtype = dtype, .target_dtype = dtype, .log_target = log_target}, host);
      }
    }
  });
}

TEST(KlDiv, StridesAndMisalignment) {
  for_each_cpu_variant("kl_div", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) {
          check({.rows = 5, .cols = 77, .dtype = dtype, .target_dtype = dtype, .padding = padding, .offset = offset}, host);
        }
      }
    }
  });
}

}  // namespace
}  // namespace liger::kl_div
