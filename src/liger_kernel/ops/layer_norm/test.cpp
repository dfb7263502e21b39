// layer_norm on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/layer_norm/layer_norm.h>

namespace liger::layer_norm {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kEps = 1e-6;
constexpr double kU32 = 0x1p-24;

struct Case {
  int64_t rows, cols;
  DType dtype = DType::kF32, weight_dtype = DType::kF32, bias_dtype = DType::kF32;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  bool weight = true, bias = true;
  double weight_offset = 0, mean = 0, scale = 1;
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", weight " << name(c.weight_dtype) << ", bias "
                                    << name(c.bias_dtype) << ", padding " << c.padding << ", offset " << c.offset << ", mean " << c.mean);
  Matrix x(c.dtype, c.rows, c.cols, c.padding, c.offset), dy(c.dtype, c.rows, c.cols, 2 * c.padding, c.offset);
  Matrix weight(c.weight_dtype, 1, c.cols, 0, c.offset), bias(c.bias_dtype, 1, c.cols, 0, c.offset);
  x.random(1, c.scale), dy.random(2), weight.random(3), bias.random(4);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) x.set(i, j, x.at(i, j) + c.mean);
  }
  Matrix y = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset),
         dx = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset);
  Matrix mean = Matrix::output(DType::kF32, 1, c.rows), rstd = Matrix::output(DType::kF32, 1, c.rows);
  Matrix dw = Matrix::output(c.weight_dtype, 1, c.cols), db = Matrix::output(c.bias_dtype, 1, c.cols);

  forward({.x = x.data(),
           .weight = c.weight ? weight.data() : nullptr,
           .bias = c.bias ? bias.data() : nullptr,
           .y = y.data(),
           .mean = mean.data<float>(),
           .rstd = rstd.data<float>(),
           .rows = c.rows,
           .cols = c.cols,
           .x_stride = x.stride(),
           .y_stride = y.stride(),
           .dtype = c.dtype,
           .weight_dtype = c.weight_dtype,
           .bias_dtype = c.bias_dtype,
           .eps = static_cast<float>(kEps),
           .weight_offset = static_cast<float>(c.weight_offset)},
          host);
  backward({.dy = dy.data(),
            .x = x.data(),
            .weight = c.weight ? weight.data() : nullptr,
            .mean = mean.data<float>(),
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
            .weight_dtype = c.weight_dtype,
            .bias_dtype = c.bias_dtype,
            .weight_offset = static_cast<float>(c.weight_offset)},
           host);

  // The definition, and the sizes that its errors are relative to.
  const auto n = static_cast<double>(c.cols);
  const auto w = [&](int64_t j) { return c.weight ? weight.at(0, j) + c.weight_offset : 1.; };
  const auto g = [&](int64_t i, int64_t j) { return dy.at(i, j) * w(j); };
  std::vector<double> m(c.rows), r(c.rows), mean_g(c.rows), mean_gh(c.rows), size_g(c.rows), size_gh(c.rows);
  const auto hat = [&](int64_t i, int64_t j) { return (x.at(i, j) - m[i]) * r[i]; };
  for (int64_t i = 0; i < c.rows; ++i) {
    double variance = 0;
    for (int64_t j = 0; j < c.cols; ++j) m[i] += x.at(i, j) / n;
    for (int64_t j = 0; j < c.cols; ++j) variance += (x.at(i, j) - m[i]) * (x.at(i, j) - m[i]) / n;
    r[i] = 1 / std::sqrt(variance + kEps);
    for (int64_t j = 0; j < c.cols; ++j) {
      mean_g[i] += g(i, j) / n, size_g[i] += std::abs(g(i, j)) / n;
      mean_gh[i] += g(i, j) * hat(i, j) / n, size_gh[i] += std::abs(g(i, j) * hat(i, j)) / n;
    }
  }
  // In backward, mean is a rounded fp32 number.
  const auto hat_error = [&](int64_t i) { return kU32 * (32 + 1.01 * std::abs(m[i]) * r[i]); };

  expect_near(
      mean, [&](int64_t, int64_t i) { return m[i]; }, [&](int64_t, int64_t i) { return 32 * kU32 / r[i]; }, "mean");
  expect_near(
      rstd, [&](int64_t, int64_t i) { return r[i]; }, [&](int64_t, int64_t i) { return 32 * kU32 * r[i]; }, "rstd");
  const auto y_truth = [&](int64_t i, int64_t j) { return hat(i, j) * w(j) + (c.bias ? bias.at(0, j) : 0); };
  expect_near(
      y, y_truth,
      [&](int64_t i, int64_t j) { return kU32 * (32 * std::abs(w(j)) * (std::abs(hat(i, j)) + 1) + 2 * std::abs(y_truth(i, j))); }, "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return r[i] * (g(i, j) - mean_g[i] - hat(i, j) * mean_gh[i]); },
      [&](int64_t i, int64_t j) {
        const double h = std::abs(hat(i, j)), size = std::abs(g(i, j)) + size_g[i] + h * size_gh[i];
        return r[i] * (64 * kU32 * size + hat_error(i) * (size_gh[i] + h * size_g[i]));
      },
      "dx");
  const auto sum = [&](auto&& term) {
    double total = 0;
    for (int64_t i = 0; i < c.rows; ++i) total += term(i);
    return total;
  };
  const double chain = kU32 * (40 + static_cast<double>(c.rows));
  expect_near(
      dw, [&](int64_t, int64_t j) { return sum([&](int64_t i) { return dy.at(i, j) * hat(i, j); }); },
      [&](int64_t, int64_t j) {
        return sum([&](int64_t i) { return std::abs(dy.at(i, j)) * (std::abs(hat(i, j)) * chain + hat_error(i)); });
      },
      "dw");
  expect_near(
      db, [&](int64_t, int64_t j) { return sum([&](int64_t i) { return dy.at(i, j); }); },
      [&](int64_t, int64_t j) { return chain * sum([&](int64_t i) { return std::abs(dy.at(i, j)); }); }, "db");
}

void check_same(DType t, Case c, const Host& host) {
  c.dtype = c.weight_dtype = c.bias_dtype = t;
  check(c, host);
}

TEST(LayerNorm, WidthsAndTypes) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const DType weight : test::kDTypes) {
        for (const DType bias : test::kDTypes) {
          for (const int64_t cols : {1, 5, 33, 128}) {
            check({.rows = 3, .cols = cols, .dtype = dtype, .weight_dtype = weight, .bias_dtype = bias}, host);
          }
        }
      }
      // Every tail of a 16-lane vector, then widths around the unrolled loops and their runs.
      for (int64_t cols = 1; cols <= 33; ++cols) check_same(dtype, {.rows = 3, .cols = cols}, host);
      for (const int64_t cols : {63, 64, 65, 127, 129, 1000, 1024, 1025}) check_same(dtype, {.rows = 2, .cols = cols}, host);
      check_same(dtype, {.rows = 1, .cols = 33000}, host);
    }
  });
}

TEST(LayerNorm, ManyRowsAreSplitOverThreads) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const int64_t rows : {37, 256}) check_same(DType::kBF16, {.rows = rows, .cols = 520}, host);
  });
}

TEST(LayerNorm, StridesAndMisalignment) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check_same(dtype, {.rows = 5, .cols = 77, .padding = padding, .offset = offset}, host);
      }
    }
  });
}

TEST(LayerNorm, MeansAndScales) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const double scale : {1e-3, 1., 100.}) check_same(dtype, {.rows = 6, .cols = 200, .scale = scale}, host);
      check_same(dtype, {.rows = 6, .cols = 200, .mean = 10}, host);
      check_same(dtype, {.rows = 3, .cols = 200, .mean = 100, .scale = 0}, host);  // constant rows
    }
    for (const int64_t cols : {7, 200, 5000}) {
      for (const double mean : {1e2, -1e4, 1e6}) check_same(DType::kF32, {.rows = 4, .cols = cols, .mean = mean}, host);
    }
  });
}

TEST(LayerNorm, WithoutWeightOrBias) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const bool weight : {false, true}) {
        for (const bool bias : {false, true}) check_same(dtype, {.rows = 6, .cols = 200, .weight = weight, .bias = bias}, host);
      }
      check_same(dtype, {.rows = 6, .cols = 200, .weight_offset = 1}, host);
    }
  });
}

// No rows: nothing to write forward; the gradients of weight and bias are zero, not left as they were.
TEST(LayerNorm, ZeroRows) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    check_same(DType::kBF16, {.rows = 0, .cols = 40}, host);
    check_same(DType::kF32, {.rows = 0, .cols = 0}, host);
  });
}

TEST(LayerNorm, GradientsNotWantedAreNotWritten) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    const int64_t rows = 9, cols = 50;
    Matrix x(DType::kBF16, rows, cols), dy(DType::kBF16, rows, cols), weight(DType::kBF16, 1, cols);
    Matrix mean(DType::kF32, 1, rows), rstd(DType::kF32, 1, rows);
    x.random(1), dy.random(2), weight.random(3), mean.random(4), rstd.random(5);
    const auto run = [&](Matrix* dx, Matrix* dw, Matrix* db) {
      backward({.dy = dy.data(),
                .x = x.data(),
                .weight = weight.data(),
                .mean = mean.data<float>(),
                .rstd = rstd.data<float>(),
                .dx = dx ? dx->data() : nullptr,
                .dw = dw ? dw->data() : nullptr,
                .db = db ? db->data() : nullptr,
                .rows = rows,
                .cols = cols,
                .dy_stride = cols,
                .x_stride = cols,
                .dx_stride = cols,
                .dtype = DType::kBF16,
                .weight_dtype = DType::kBF16,
                .bias_dtype = DType::kF32},
               host);
    };
    const Matrix no_dx = Matrix::output(DType::kBF16, rows, cols), no_dw = Matrix::output(DType::kBF16, 1, cols),
                 no_db = Matrix::output(DType::kF32, 1, cols);
    Matrix dx = no_dx, dw = no_dw, db = no_db;
    run(&dx, &dw, &db);
    for (int wanted = 0; wanted < 8; ++wanted) {
      Matrix some_dx = no_dx, some_dw = no_dw, some_db = no_db;
      run(wanted & 1 ? &some_dx : nullptr, wanted & 2 ? &some_dw : nullptr, wanted & 4 ? &some_db : nullptr);
      const auto expect_same = [&](const Matrix& got, const Matrix& want, const char* what) {
        expect_near(
            got, [&](int64_t i, int64_t j) { return want.at(i, j); }, [](int64_t, int64_t) { return 0.; }, what);
      };
      if (wanted & 1) expect_same(some_dx, dx, "dx");
      if (wanted & 2) expect_same(some_dw, dw, "dw");
      if (wanted & 4) expect_same(some_db, db, "db");
    }
  });
}

// Infinity and NaN fill their rows, wherever they stand, and no others.
TEST(LayerNorm, NonFiniteRows) {
  for_each_cpu_variant("layer_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      const int64_t rows = 4, cols = 37;
      Matrix x(dtype, rows, cols), y = Matrix::output(dtype, rows, cols);
      Matrix mean = Matrix::output(DType::kF32, 1, rows), rstd = Matrix::output(DType::kF32, 1, rows);
      x.random(1);
      x.set(1, 36, NAN), x.set(2, 0, INFINITY);
      forward({.x = x.data(),
               .weight = nullptr,
               .bias = nullptr,
               .y = y.data(),
               .mean = mean.data<float>(),
               .rstd = rstd.data<float>(),
               .rows = rows,
               .cols = cols,
               .x_stride = cols,
               .y_stride = cols,
               .dtype = dtype,
               .weight_dtype = dtype,
               .bias_dtype = dtype,
               .eps = static_cast<float>(kEps)},
              host);
      for (int64_t j = 0; j < cols; ++j) {
        EXPECT_TRUE(std::isfinite(y.at(0, j)) && std::isfinite(y.at(3, j)));
        EXPECT_TRUE(std::isnan(y.at(1, j)) && std::isnan(y.at(2, j)));
      }
    }
  });
}

TEST(LayerNorm, ExplainNamesEveryVariantAndThePlan) {
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != "layer_norm") continue;
    const Problem problem{.shape = {8192, 4096}, .dtype = DType::kBF16, .machine = cpu_machine()};
    for (const std::string& variant : info.variants()) EXPECT_NE(info.explain(problem).find('\t' + variant + '\t'), std::string::npos);
    EXPECT_NE(info.explain(problem).find("plan\t"), std::string::npos);
    // What GPUs of 227 and 163 KB would do: rows of up to 64 KiB are staged at least once.
    for (const int64_t shared : {227 << 10, 163 << 10}) {
      for (const int64_t cols : {8, 136, 1024, 4096, 4104, 8192, 12288, 16384}) {
        for (const DType dtype : test::kDTypes) {
          const Machine gpu{.backend = Backend::kCuda, .floor = 90, .multiprocessors = 132, .shared_memory = shared, .device = 0};
          const std::string text = info.explain({.shape = {8192, cols}, .dtype = dtype, .machine = gpu});
          EXPECT_NE(text.find(" stages of "), std::string::npos) << text;
          EXPECT_EQ(text.find(" 0 stages of "), std::string::npos) << text;
        }
      }
    }
    EXPECT_THROW(info.explain({.shape = {1}, .dtype = DType::kF32, .machine = cpu_machine()}), Error);
    return;
  }
  FAIL() << "layer_norm is not registered";
}

TEST(LayerNorm, ForcedVariantThatDoesNotExistListsThoseThatDo) {
  const test::Environment forced("LIGER_LAYER_NORM", "cpu_mmx");
  try {
    check_same(DType::kF32, {.rows = 1, .cols = 1}, cpu_host());
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("cpu_avx2"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace liger::layer_norm
