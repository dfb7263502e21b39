// fused_add_rms_norm on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/fused_add_rms_norm/fused_add_rms_norm.h>

namespace liger::fused_add_rms_norm {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kEps = 1e-6;
constexpr const char* kOp = "fused_add_rms_norm";
// fp32 sum, rsqrt and products of one row; long sums of bf16 squares lose their ties to one side.
double row_error(int64_t cols) { return (32 + static_cast<double>(cols) / 256) * test::unit_roundoff(DType::kF32); }

struct Case {
  int64_t rows, cols;
  DType dtype, weight_dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  Rounding rounding = Rounding::kLast;
  double weight_offset = 0;
  bool weight = true, ds = true;
  double scale = 1;
};

// Relative error that the casting mode's own roundings add: "each step" rounds the mean, eps, rstd, hat and the weight.
double mode_rounding(const Case& c, double mean) {
  if (c.rounding == Rounding::kLast) return 0;
  const double u = test::unit_roundoff(c.dtype);
  return c.rounding == Rounding::kBeforeWeight ? 1.01 * u : 4.1 * u + test::smallest(c.dtype) / (mean + kEps);
}

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", weight " << name(c.weight_dtype)
                                    << ", padding " << c.padding << ", offset " << c.offset << ", rounding " << static_cast<int>(c.rounding)
                                    << ", ds " << c.ds);
  // Each matrix has a row stride of its own.
  const auto input = [&](int64_t k) { return Matrix(c.dtype, c.rows, c.cols, k * c.padding, c.offset); };
  const auto output = [&](int64_t k) { return Matrix::output(c.dtype, c.rows, c.cols, k * c.padding, c.offset); };
  Matrix x = input(1), residual = input(2), dy = input(3), ds = input(4), weight(c.weight_dtype, 1, c.cols, 0, c.offset);
  x.random(1, c.scale), residual.random(2, c.scale), dy.random(3), ds.random(4), weight.random(5);
  Matrix y = output(1), s = output(2), dx = output(3);
  Matrix rstd = Matrix::output(DType::kF32, 1, c.rows), dw = Matrix::output(DType::kF32, 1, c.cols);

  forward({.x = x.data(),
           .residual = residual.data(),
           .weight = c.weight ? weight.data() : nullptr,
           .y = y.data(),
           .s = s.data(),
           .rstd = rstd.data<float>(),
           .rows = c.rows,
           .cols = c.cols,
           .x_stride = x.stride(),
           .residual_stride = residual.stride(),
           .y_stride = y.stride(),
           .s_stride = s.stride(),
           .dtype = c.dtype,
           .weight_dtype = c.weight_dtype,
           .eps = static_cast<float>(kEps),
           .weight_offset = static_cast<float>(c.weight_offset),
           .rounding = c.rounding},
          host);
  backward({.dy = dy.data(),
            .ds = c.ds ? ds.data() : nullptr,
            .s = s.data(),
            .weight = c.weight ? weight.data() : nullptr,
            .rstd = rstd.data<float>(),
            .dx = dx.data(),
            .dw = dw.data<float>(),
            .rows = c.rows,
            .cols = c.cols,
            .dy_stride = dy.stride(),
            .ds_stride = ds.stride(),
            .s_stride = s.stride(),
            .dx_stride = dx.stride(),
            .dtype = c.dtype,
            .weight_dtype = c.weight_dtype,
            .weight_offset = static_cast<float>(c.weight_offset),
            .rounding = c.rounding},
           host);

  // s exactly: the sum rounded as fp32 (exact or correctly rounded) and then as the type, as eager code does.
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      const float sum = static_cast<float>(x.at(i, j)) + static_cast<float>(residual.at(i, j));
      ASSERT_EQ(s.at(i, j), test::rounded_to(c.dtype, sum)) << "s[" << i << ", " << j << ']';
    }
  }
  EXPECT_TRUE(s.untouched());

  const auto w = [&](int64_t j) { return c.weight ? weight.at(0, j) + c.weight_offset : 1.; };
  const auto upstream = [&](int64_t i, int64_t j) { return c.ds ? ds.at(i, j) : 0.; };
  std::vector<double> mean(c.rows), r(c.rows), product(c.rows), product_size(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) mean[i] += s.at(i, j) * s.at(i, j) / static_cast<double>(c.cols);
    r[i] = 1 / std::sqrt(mean[i] + kEps);
    for (int64_t j = 0; j < c.cols; ++j) {
      const double p = dy.at(i, j) * w(j) * s.at(i, j) * r[i] / static_cast<double>(c.cols);
      product[i] += p, product_size[i] += std::abs(p);
    }
  }
  const double fp32 = row_error(c.cols);
  const auto extra = [&](int64_t i) { return mode_rounding(c, mean[i]); };
  expect_near(
      rstd, [&](int64_t, int64_t i) { return r[i]; }, [&](int64_t, int64_t i) { return r[i] * (fp32 + extra(i)); }, "rstd");
  const auto y_truth = [&](int64_t i, int64_t j) { return s.at(i, j) * r[i] * w(j); };
  expect_near(
      y, y_truth, [&](int64_t i, int64_t j) { return std::abs(y_truth(i, j)) * (fp32 + extra(i)); }, "y");
  // dx - ds is a difference, so the bound is on the sum of the sizes; only "each step" has rounded rstd. One more rounding for ds.
  expect_near(
      dx, [&](int64_t i, int64_t j) { return r[i] * (dy.at(i, j) * w(j) - s.at(i, j) * r[i] * product[i]) + upstream(i, j); },
      [&](int64_t i, int64_t j) {
        const double size = r[i] * (std::abs(dy.at(i, j) * w(j)) + std::abs(s.at(i, j)) * r[i] * product_size[i]);
        return size * (fp32 + (c.rounding == Rounding::kEachStep ? 3 * extra(i) : 0)) +
               (size + std::abs(upstream(i, j))) * test::unit_roundoff(DType::kF32);
      },
      "dx");
  const auto dw_sum = [&](int64_t j, auto&& term) {
    double total = 0;
    for (int64_t i = 0; i < c.rows; ++i) total += term(dy.at(i, j) * s.at(i, j) * r[i], i);
    return total;
  };
  expect_near(
      dw, [&](int64_t, int64_t j) { return dw_sum(j, [](double t, int64_t) { return t; }); },
      [&](int64_t, int64_t j) {
        const double sum = fp32 + static_cast<double>(c.rows) * test::unit_roundoff(DType::kF32);
        return dw_sum(
            j, [&](double t, int64_t i) { return std::abs(t) * (sum + extra(i)) + std::abs(dy.at(i, j)) * test::smallest(c.dtype); });
      },
      "dw");
}

TEST(FusedAddRmsNorm, WidthsAndTypes) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const DType weight : test::kDTypes) {
        // Every tail of a 16-lane vector, then widths around the unrolled loops.
        for (int64_t cols = 1; cols <= 33; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype, .weight_dtype = weight}, host);
        for (const int64_t cols : {63, 64, 65, 127, 128, 129, 1000}) {
          check({.rows = 2, .cols = cols, .dtype = dtype, .weight_dtype = weight, .ds = cols % 2 == 0}, host);
        }
      }
      check({.rows = 1, .cols = 33000, .dtype = dtype, .weight_dtype = dtype}, host);
    }
  });
}

TEST(FusedAddRmsNorm, ManyRowsAreSplitOverThreads) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const int64_t rows : {37, 256}) check({.rows = rows, .cols = 520, .dtype = DType::kBF16, .weight_dtype = DType::kF32}, host);
  });
}

TEST(FusedAddRmsNorm, StridesAndMisalignment) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3})
          check({.rows = 5, .cols = 77, .dtype = dtype, .weight_dtype = dtype, .padding = padding, .offset = offset}, host);
      }
    }
  });
}

TEST(FusedAddRmsNorm, RoundingModesOffsetsAndScales) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const Rounding rounding : {Rounding::kEachStep, Rounding::kBeforeWeight, Rounding::kLast}) {
        for (const double scale : {1e-3, 1., 100.}) {
          check({.rows = 6, .cols = 200, .dtype = dtype, .weight_dtype = dtype, .rounding = rounding, .scale = scale}, host);
        }
        check({.rows = 6, .cols = 200, .dtype = dtype, .weight_dtype = dtype, .rounding = rounding, .weight = false, .ds = false}, host);
      }
      check({.rows = 6, .cols = 200, .dtype = dtype, .weight_dtype = dtype, .weight_offset = 1}, host);
    }
  });
}

// No rows: nothing to write forward; the weight's gradient is zero, not left as it was.
TEST(FusedAddRmsNorm, ZeroRows) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    check({.rows = 0, .cols = 40, .dtype = DType::kBF16, .weight_dtype = DType::kBF16}, host);
    check({.rows = 0, .cols = 0, .dtype = DType::kF32, .weight_dtype = DType::kF32}, host);
  });
}

TEST(FusedAddRmsNorm, GradientsNotWantedAreNotWritten) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    const int64_t rows = 9, cols = 50;
    Matrix s(DType::kBF16, rows, cols), dy(DType::kBF16, rows, cols), ds(DType::kBF16, rows, cols), weight(DType::kBF16, 1, cols),
        rstd(DType::kF32, 1, rows);
    s.random(1), dy.random(2), ds.random(3), weight.random(4), rstd.random(5);
    const auto run = [&](Matrix* dx, Matrix* dw) {
      backward({.dy = dy.data(),
                .ds = ds.data(),
                .s = s.data(),
                .weight = weight.data(),
                .rstd = rstd.data<float>(),
                .dx = dx ? dx->data() : nullptr,
                .dw = dw ? dw->data<float>() : nullptr,
                .rows = rows,
                .cols = cols,
                .dy_stride = cols,
                .ds_stride = cols,
                .s_stride = cols,
                .dx_stride = cols,
                .dtype = DType::kBF16,
                .weight_dtype = DType::kBF16},
               host);
    };
    Matrix dx = Matrix::output(DType::kBF16, rows, cols), dw = Matrix::output(DType::kF32, 1, cols);
    Matrix dx_alone = dx, dw_alone = dw;
    run(&dx, &dw), run(&dx_alone, nullptr), run(nullptr, &dw_alone), run(nullptr, nullptr);
    const auto exactly = [](int64_t, int64_t) { return 0.; };
    expect_near(
        dx_alone, [&](int64_t i, int64_t j) { return dx.at(i, j); }, exactly, "dx alone");
    expect_near(
        dw_alone, [&](int64_t i, int64_t j) { return dw.at(i, j); }, exactly, "dw alone");
  });
}

// Infinity and NaN stay in their rows; two infinities of opposite sign make a NaN.
TEST(FusedAddRmsNorm, NonFiniteRows) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      const int64_t rows = 4, cols = 37;
      Matrix x(dtype, rows, cols), residual(dtype, rows, cols),
          y = Matrix::output(dtype, rows, cols), s = Matrix::output(dtype, rows, cols), rstd = Matrix::output(DType::kF32, 1, rows);
      x.random(1), residual.random(2);
      x.set(1, 36, INFINITY), residual.set(1, 36, -INFINITY), x.set(2, 0, INFINITY);
      forward({.x = x.data(),
               .residual = residual.data(),
               .weight = nullptr,
               .y = y.data(),
               .s = s.data(),
               .rstd = rstd.data<float>(),
               .rows = rows,
               .cols = cols,
               .x_stride = cols,
               .residual_stride = cols,
               .y_stride = cols,
               .s_stride = cols,
               .dtype = dtype,
               .weight_dtype = dtype,
               .eps = static_cast<float>(kEps)},
              host);
      for (int64_t j = 0; j < cols; ++j) {
        EXPECT_TRUE(std::isfinite(y.at(0, j)) && std::isfinite(y.at(3, j)));
        EXPECT_TRUE(std::isnan(y.at(1, j)));
        EXPECT_EQ(y.at(2, j) == 0, j != 0) << j;  // s / inf; the infinity itself is inf * 0
      }
      EXPECT_TRUE(std::isnan(s.at(1, 36)) && std::isfinite(s.at(1, 0)) && std::isinf(s.at(2, 0)) && std::isnan(y.at(2, 0)));
    }
  });
}

TEST(FusedAddRmsNorm, ExplainNamesEveryVariantAndThePlan) {
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != kOp) continue;
    const std::string text = info.explain({.shape = {8192, 4096}, .dtype = DType::kBF16, .machine = cpu_machine()});
    for (const std::string& variant : info.variants()) EXPECT_NE(text.find('\t' + variant + '\t'), std::string::npos) << text;
    EXPECT_NE(text.find("chosen"), std::string::npos);
    EXPECT_NE(text.find("plan\t"), std::string::npos);
    EXPECT_THROW(info.explain({.shape = {1}, .dtype = DType::kF32, .machine = cpu_machine()}), Error);
    return;
  }
  FAIL() << kOp << " is not registered";
}

}  // namespace
}  // namespace liger::fused_add_rms_norm
