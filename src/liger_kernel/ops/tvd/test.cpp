// tvd on the CPU against its definition in fp64: every variant, pair of dtypes, width of tail, stride and misalignment, with and without
// labels and a reduction.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/tvd/tvd.h>

namespace liger::tvd {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype, target_dtype;
  bool labelled = false;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ' ' << name(c.target_dtype) << ", labels "
                                    << c.labelled << ", padding " << c.padding << ", offset " << c.offset);
  Matrix p(c.dtype, c.rows, c.cols, c.padding, c.offset), q(c.target_dtype, c.rows, c.cols, 2 * c.padding);
  Matrix loss = Matrix::output(DType::kF32, c.rows, c.cols, c.padding), total = Matrix::output(DType::kF32, 1, 1);
  Matrix grad = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset), late = Matrix::output(c.dtype, c.rows, c.cols);
  Matrix dy(DType::kF32, c.rows, c.cols, c.padding);
  p.random(1), q.random(2), dy.random(3);
  for (int64_t i = 0; i < c.rows; ++i) q.set(i, i % c.cols, 0.25), p.set(i, i % c.cols, 0.25);  // a tie
  std::vector<int64_t> labels(c.rows * 2);  // every other one counts; -100 marks rows to leave out
  for (int64_t i = 0; i < c.rows; ++i) labels[2 * i] = i % 3 == 1 ? -100 : i;
  const float scale = 0.5f;
  ForwardArgs f{.input = p.data(),
                .target = q.data(),
                .labels = c.labelled ? labels.data() : nullptr,
                .scale = nullptr,
                .loss = loss.data<float>(),
                .total = nullptr,
                .grad = nullptr,
                .rows = c.rows,
                .cols = c.cols,
                .input_stride = p.stride(),
                .target_stride = q.stride(),
                .loss_stride = loss.stride(),
                .grad_stride = grad.stride(),
                .labels_stride = 2,
                .dtype = c.dtype,
                .target_dtype = c.target_dtype};
  forward(f, host);
  f.loss = nullptr, f.total = total.data<float>(), f.grad = grad.data(), f.factor = 0.25f, f.scale = &scale;
  forward(f, host);
  backward({.dy = dy.data<float>(),
            .of_total = false,
            .input = p.data(),
            .target = q.data(),
            .labels = f.labels,
            .scale = nullptr,
            .grad = late.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .input_stride = p.stride(),
            .target_stride = q.stride(),
            .grad_stride = late.stride(),
            .labels_stride = 2,
            .dtype = c.dtype,
            .target_dtype = c.target_dtype},
           host);

  const double u = test::unit_roundoff(DType::kF32);
  const auto counts = [&](int64_t i) { return !c.labelled || i % 3 != 1; };
  const auto value = [&](int64_t i, int64_t j) { return counts(i) ? std::abs(p.at(i, j) - q.at(i, j)) / 2 : 0; };
  const auto slope = [&](int64_t i, int64_t j) {
    const double d = p.at(i, j) - q.at(i, j);
    return counts(i) ? (d > 0) * 0.5 - (d < 0) * 0.5 : 0;
  };
  double want = 0;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) want += value(i, j);
  }
  expect_near(
      loss, value, [&](int64_t i, int64_t j) { return 2 * u * value(i, j); }, "loss");
  const auto across = 4 + std::sqrt(static_cast<double>(c.rows * c.cols));
  expect_near(
      total, [&](int64_t, int64_t) { return want / 8; }, [&](int64_t, int64_t) { return u * across * want; }, "total");
  expect_near(
      grad, [&](int64_t i, int64_t j) { return slope(i, j) / 8; }, [](int64_t, int64_t) { return 0; }, "grad");
  expect_near(
      late, [&](int64_t i, int64_t j) { return slope(i, j) * dy.at(i, j); }, [](int64_t, int64_t) { return 0; }, "grad of elements");
}

TEST(Tvd, WidthsAndTypes) {
  for_each_cpu_variant("tvd", [](const Host& host) {
    for (const bool labelled : {false, true}) {
      for (const DType dtype : test::kDTypes) {
        for (int64_t cols = 1; cols <= 70; ++cols) {
          check({.rows = 4, .cols = cols, .dtype = dtype, .target_dtype = dtype, .labelled = labelled}, host);
        }
        for (const int64_t cols : {4095, 4096, 4097, 9000}) {
          check({.rows = 3, .cols = cols, .dtype = dtype, .target_dtype = dtype, .labelled = labelled}, host);
        }
        for (const DType target : test::kDTypes) {
          check({.rows = 30, .cols = 70, .dtype = dtype, .target_dtype = target, .labelled = labelled}, host);
        }
        check({.rows = 0, .cols = 70, .dtype = dtype, .target_dtype = dtype, .labelled = labelled}, host);
      }
    }
  });
}

TEST(Tvd, StridesAndMisalignment) {
  for_each_cpu_variant("tvd", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) {
          for (const bool labelled : {false, true}) {
            const Case c{
                .rows = 5, .cols = 77, .dtype = dtype, .target_dtype = dtype, .labelled = labelled, .padding = padding, .offset = offset};
            check(c, host);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace liger::tvd
