// rms_norm_gated on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment, group, order and
// activation.
#include <algorithm>

#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/rms_norm_gated/plan.h>

namespace liger::rms_norm_gated {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kEps = 1e-6;
constexpr const char* kOp = "rms_norm_gated";
constexpr double kU32 = 0x1p-24;
constexpr double kUnderflow = 1e-35;
constexpr double kFlushed = 0x1p-126;  // AVX-512 rounds smaller numbers to a bf16 zero

struct Case {
  int64_t rows, cols;
  DType dtype, weight_dtype;
  int64_t groups = 1;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  Activation activation = Activation::kSilu;
  bool gate = true, norm_first = true;
  Rounding rounding = Rounding::kBeforeWeight;
  bool weight = true;
  double scale = 1;
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", weight " << name(c.weight_dtype) << ", "
                                    << c.groups << " groups, padding " << c.padding << ", offset " << c.offset << ", activation "
                                    << static_cast<int>(c.activation) << ", norm first " << c.norm_first << ", rounding "
                                    << static_cast<int>(c.rounding));
  // Each matrix has a row stride of its own.
  const auto input = [&](int64_t k) { return Matrix(c.dtype, c.rows, c.cols, k * c.padding, c.offset); };
  const auto output = [&](int64_t k) { return Matrix::output(c.dtype, c.rows, c.cols, k * c.padding, c.offset); };
  Matrix x = input(1), gate = input(2), dy = input(3), weight(c.weight_dtype, 1, c.cols, 0, c.offset);
  x.random(1, c.scale), gate.random(2, 2), dy.random(3), weight.random(4);
  Matrix y = output(1), dx = output(3), dgate = output(2);
  Matrix rstd = Matrix::output(DType::kF32, c.rows, c.groups), dw = Matrix::output(DType::kF32, 1, c.cols);
  const bool gated = c.gate;
  const int64_t size = c.cols / c.groups;

  forward({.x = x.data(),
           .gate = gated ? gate.data() : nullptr,
           .weight = c.weight ? weight.data() : nullptr,
           .y = y.data(),
           .rstd = rstd.data<float>(),
           .rows = c.rows,
           .cols = c.cols,
           .group_size = size,
           .x_stride = x.stride(),
           .gate_stride = gate.stride(),
           .y_stride = y.stride(),
           .dtype = c.dtype,
           .weight_dtype = c.weight_dtype,
           .eps = static_cast<float>(kEps),
           .activation = c.activation,
           .norm_first = c.norm_first,
           .rounding = c.rounding},
          host);
  backward({.dy = dy.data(),
            .x = x.data(),
            .gate = gated ? gate.data() : nullptr,
            .weight = c.weight ? weight.data() : nullptr,
            .rstd = rstd.data<float>(),
            .dx = dx.data(),
            .dgate = gated ? dgate.data() : nullptr,
            .dw = dw.data<float>(),
            .rows = c.rows,
            .cols = c.cols,
            .group_size = size,
            .dy_stride = dy.stride(),
            .x_stride = x.stride(),
            .gate_stride = gate.stride(),
            .dx_stride = dx.stride(),
            .dgate_stride = dgate.stride(),
            .dtype = c.dtype,
            .weight_dtype = c.weight_dtype,
            .activation = c.activation,
            .norm_first = c.norm_first,
            .rounding = c.rounding},
           host);

  // The definition, and the errors of its parts: e of the activation, e1 of a rounded hat, e2 of a rounded product too.
  const auto z = [&](int64_t i, int64_t j) { return gate.at(i, j); };
  const auto s = [&](int64_t i, int64_t j) { return 1 / (1 + std::exp(-z(i, j))); };
  const auto e = [&](int64_t i, int64_t j) { return gated ? (16 + 2 * std::abs(z(i, j))) * kU32 : 0; };
  const auto a = [&](int64_t i, int64_t j) { return !gated ? 1. : c.activation == Activation::kSilu ? z(i, j) * s(i, j) : s(i, j); };
  const auto slope = [&](int64_t i, int64_t j) {
    const double rest = 1 / (1 + std::exp(z(i, j)));
    return c.activation == Activation::kSilu ? s(i, j) * (1 + z(i, j) * rest) : s(i, j) * rest;
  };
  const auto slope_error = [&](int64_t i, int64_t j) {
    return 2 * (s(i, j) + (c.activation == Activation::kSilu ? std::abs(a(i, j)) : 0)) * e(i, j) + kUnderflow;
  };
  const auto w = [&](int64_t j) { return c.weight ? weight.at(0, j) : 1.; };
  const auto h = [&](int64_t i, int64_t j) { return c.norm_first ? x.at(i, j) : x.at(i, j) * a(i, j); };
  const auto g = [&](int64_t i, int64_t j) { return dy.at(i, j) * w(j) * (c.norm_first ? a(i, j) : 1.); };
  const bool before = c.rounding == Rounding::kBeforeWeight;
  const double least = before ? test::smallest(c.dtype) : 0, e1 = before ? 1.01 * test::unit_roundoff(c.dtype) : 0;
  const double e2 = c.norm_first && c.weight && c.weight_dtype == c.dtype ? 2 * e1 : e1;
  // fp32 sum, rsqrt and products of a row; long sums of bf16 squares lose their ties to one side.
  const double e32 = (32 + static_cast<double>(size) / 256) * kU32;
  struct Group {
    double r = 0, product = 0, product_size = 0, e = 0;
  };
  std::vector<Group> groups(c.rows * c.groups);
  const auto group_of = [&](int64_t i, int64_t j) -> Group& { return groups[i * c.groups + j / size]; };
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) group_of(i, j).r += h(i, j) * h(i, j) / static_cast<double>(size);
    for (int64_t k = 0; k < c.groups; ++k) group_of(i, k * size).r = 1 / std::sqrt(group_of(i, k * size).r + kEps);
    for (int64_t j = 0; j < c.cols; ++j) {
      Group& group = group_of(i, j);
      const double p = g(i, j) * h(i, j) * group.r / static_cast<double>(size);
      group.product += p, group.product_size += std::abs(p), group.e = std::max(group.e, e(i, j));
    }
  }
  const auto hat = [&](int64_t i, int64_t j) { return h(i, j) * group_of(i, j).r; };
  const auto dh = [&](int64_t i, int64_t j) {
    const Group& group = group_of(i, j);
    return group.r * (g(i, j) - hat(i, j) * group.product);
  };
  // dh is a difference, so its bound is on the sum of the two sizes.
  const auto dh_size = [&](int64_t i, int64_t j) {
    const Group& group = group_of(i, j);
    return group.r * (std::abs(g(i, j)) + std::abs(hat(i, j)) * group.product_size);
  };
  const auto dh_error = [&](int64_t i, int64_t j) { return dh_size(i, j) * (e32 + 4 * group_of(i, j).e) + kFlushed; };

  expect_near(
      rstd, [&](int64_t i, int64_t k) { return groups[i * c.groups + k].r; },
      [&](int64_t i, int64_t k) { return groups[i * c.groups + k].r * (e32 + groups[i * c.groups + k].e); }, "rstd");
  const auto factor = [&](int64_t i, int64_t j) { return c.norm_first ? a(i, j) : 1.; };
  expect_near(
      y, [&](int64_t i, int64_t j) { return hat(i, j) * w(j) * factor(i, j); },
      [&](int64_t i, int64_t j) {
        return std::abs(hat(i, j) * w(j) * factor(i, j)) * (e32 + 2 * group_of(i, j).e + e2) +
               least * (std::abs(w(j)) + 1) * std::abs(factor(i, j)) + std::abs(hat(i, j) * w(j)) * kUnderflow + kFlushed;
      },
      "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return dh(i, j) * (c.norm_first ? 1. : a(i, j)); },
      [&](int64_t i, int64_t j) { return c.norm_first ? dh_error(i, j) : dh_error(i, j) * (std::abs(a(i, j)) + kUnderflow) + kFlushed; },
      "dx");
  if (gated) {
    expect_near(
        dgate, [&](int64_t i, int64_t j) { return (c.norm_first ? dy.at(i, j) * hat(i, j) * w(j) : dh(i, j) * x.at(i, j)) * slope(i, j); },
        [&](int64_t i, int64_t j) {
          const double steep = std::abs(slope(i, j)), wrong = slope_error(i, j);
          if (!c.norm_first) return std::abs(x.at(i, j)) * (dh_error(i, j) * steep + dh_size(i, j) * wrong) + kFlushed;
          const double n = std::abs(hat(i, j) * w(j));
          return std::abs(dy.at(i, j)) * (n * (steep * (e32 + e2) + wrong) + least * (std::abs(w(j)) + 1) * steep) + kFlushed;
        },
        "dgate");
  } else {
    EXPECT_TRUE(dgate.untouched());
  }
  const auto dw_sum = [&](int64_t j, auto&& term) {
    double total = 0;
    for (int64_t i = 0; i < c.rows; ++i) total += term(i, dy.at(i, j) * factor(i, j));
    return total;
  };
  expect_near(
      dw, [&](int64_t, int64_t j) { return dw_sum(j, [&](int64_t i, double t) { return t * hat(i, j); }); },
      [&](int64_t, int64_t j) {
        return dw_sum(j, [&](int64_t i, double t) {
          return std::abs(t * hat(i, j)) * (e32 + static_cast<double>(c.rows) * kU32 + 2 * group_of(i, j).e + e1) + std::abs(t) * least;
        });
      },
      "dw");
}

template <class Body>
void for_each_kind(Body&& body) {
  for (const bool norm_first : {true, false}) {
    for (const Rounding rounding : {Rounding::kBeforeWeight, Rounding::kLast}) body(norm_first, rounding);
  }
}

TEST(RmsNormGated, WidthsAndTypes) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for_each_kind([&](bool norm_first, Rounding rounding) {
        Case c{.rows = 3, .cols = 1, .dtype = dtype, .weight_dtype = dtype, .norm_first = norm_first, .rounding = rounding};
        // Every tail of a 16-lane vector, then widths around the unrolled loops.
        for (c.cols = 1; c.cols <= 33; ++c.cols) check(c, host);
        for (const int64_t cols : {63, 64, 65, 128, 1000}) {
          c.cols = cols;
          for (const DType weight : test::kDTypes) c.weight_dtype = weight, check(c, host);
        }
        check({.rows = 1, .cols = 33000, .dtype = dtype, .weight_dtype = dtype, .norm_first = norm_first, .rounding = rounding}, host);
      });
    }
  });
}

TEST(RmsNormGated, ManyRowsAreSplitOverThreads) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const bool norm_first : {true, false}) {
      for (const int64_t rows : {37, 256}) {
        check({.rows = rows, .cols = 520, .dtype = DType::kBF16, .weight_dtype = DType::kF32, .groups = 4, .norm_first = norm_first}, host);
      }
    }
  });
}

TEST(RmsNormGated, StridesMisalignmentAndGroups) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for_each_kind([&](bool norm_first, Rounding rounding) {
        for (const int64_t padding : {0, 1, 8}) {
          for (const int64_t groups : {1, 3, 6, 66}) {
            check({.rows = 5,
                   .cols = 66,
                   .dtype = dtype,
                   .weight_dtype = dtype,
                   .groups = groups,
                   .padding = padding,
                   .offset = padding % 4,
                   .norm_first = norm_first,
                   .rounding = rounding},
                  host);
          }
        }
      });
    }
  });
}

TEST(RmsNormGated, ActivationsScalesAndNoWeight) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for_each_kind([&](bool norm_first, Rounding rounding) {
        for (const int kind : {0, 1, 2}) {
          const Activation activation = kind == 1 ? Activation::kSigmoid : Activation::kSilu;
          Case c{.rows = 6, .cols = 200, .dtype = dtype, .weight_dtype = dtype, .groups = 2, .activation = activation};
          c.norm_first = norm_first, c.rounding = rounding, c.gate = kind < 2;
          for (const double scale : {1e-3, 1., 100.}) c.scale = scale, check(c, host);
          c.weight = false;
          check(c, host);
        }
      });
    }
  });
}

TEST(RmsNormGated, GradientsNotWantedAreNotWritten) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    for (const bool norm_first : {true, false}) {
      const int64_t rows = 4, cols = 37;
      Matrix x(DType::kBF16, rows, cols), gate = x, dy = x, weight(DType::kBF16, 1, cols), rstd(DType::kF32, rows, 1);
      x.random(1), gate.random(2), dy.random(3), weight.random(4);
      for (int64_t i = 0; i < rows; ++i) rstd.set(i, 0, 1);
      const auto run = [&](Matrix* dx, Matrix* dgate, Matrix* dw) {
        backward({.dy = dy.data(),
                  .x = x.data(),
                  .gate = gate.data(),
                  .weight = weight.data(),
                  .rstd = rstd.data<float>(),
                  .dx = dx ? dx->data() : nullptr,
                  .dgate = dgate ? dgate->data() : nullptr,
                  .dw = dw ? dw->data() : nullptr,
                  .rows = rows,
                  .cols = cols,
                  .group_size = cols,
                  .dy_stride = cols,
                  .x_stride = cols,
                  .gate_stride = cols,
                  .dx_stride = cols,
                  .dgate_stride = cols,
                  .dtype = DType::kBF16,
                  .weight_dtype = DType::kBF16,
                  .dw_dtype = DType::kBF16,
                  .norm_first = norm_first},
                 host);
      };
      const Matrix blank = Matrix::output(DType::kBF16, rows, cols);
      Matrix dx = blank, dgate = blank, dw = Matrix::output(DType::kBF16, 1, cols);
      Matrix dx_alone = blank, dgate_alone = blank, dw_alone = dw;
      run(&dx, &dgate, &dw), run(&dx_alone, nullptr, nullptr), run(nullptr, &dgate_alone, nullptr), run(nullptr, nullptr, &dw_alone);
      run(nullptr, nullptr, nullptr);
      const auto same = [](const Matrix& alone, const Matrix& all, const char* what) {
        expect_near(
            alone, [&](int64_t i, int64_t j) { return all.at(i, j); }, [](int64_t, int64_t) { return 0.; }, what);
      };
      same(dx_alone, dx, "dx alone"), same(dgate_alone, dgate, "dgate alone"), same(dw_alone, dw, "dw alone");
    }
  });
}

TEST(RmsNormGated, ZeroRowsAndErrors) {
  for_each_cpu_variant(kOp, [](const Host& host) {
    check({.rows = 0, .cols = 40, .dtype = DType::kBF16, .weight_dtype = DType::kBF16}, host);
    const Case c{.rows = 1, .cols = 7, .dtype = DType::kF32, .weight_dtype = DType::kF32, .groups = 2};  // 7 is no multiple of 3
    EXPECT_THROW(check(c, host), Error);
    EXPECT_THROW(check({.rows = 1, .cols = 7, .dtype = DType::kF32, .weight_dtype = DType::kF32, .rounding = Rounding::kEachStep}, host),
                 Error);
  });
}

// What the CUDA launchers rely on: threads cover a group, a kernel's launch bounds hold its block, shared memory holds the stages and, at
// the end, dw of every row of threads.
TEST(RmsNormGated, PlansFitTheirKernels) {
  for (const int64_t shared : {99 << 10, 163 << 10, 227 << 10}) {
    const Machine m{.backend = Backend::kCuda, .floor = 90, .multiprocessors = 132, .shared_memory = shared};
    for (const DType dtype : test::kDTypes) {
      const int64_t width = 16 / size_of(dtype);
      for (int64_t needed = 1; needed <= kRowMaxVectors; needed += needed < 300 ? 1 : 37) {
        for (const int64_t groups : {1, 8, 1000}) {
          const int64_t cols = needed * width;
          ForwardArgs f{};
          f.rows = 1000, f.cols = cols * groups, f.group_size = cols, f.dtype = dtype;
          const RowPlan a = choose(f);
          EXPECT_GE(int64_t{a.lanes} * a.vectors, needed);
          EXPECT_LE(a.threads, kRowMaxForwardThreads);
          EXPECT_EQ(a.threads % a.lanes, 0);
          BackwardArgs g{};
          g.rows = 1000, g.cols = cols * groups, g.group_size = cols, g.dtype = dtype;
          const RowPlan b = choose(g, m);
          EXPECT_GE(int64_t{b.lanes} * b.vectors, needed);
          EXPECT_LE(b.threads, b.vectors == 1 ? 256 : 1024);
          EXPECT_TRUE(b.vectors != 4 || b.threads <= 128 || b.threads > 512) << b.threads;
          EXPECT_EQ(b.threads % b.lanes, 0);
          EXPECT_GE(b.blocks, 1);
          if (b.stages == 0) continue;
          EXPECT_LE(b.shared + kRowOwnShared, shared);
          EXPECT_GE(b.shared, b.threads / b.lanes * cols * 4);
          EXPECT_EQ(b.shared, int64_t{16} * b.stages * 3 * b.vectors * b.threads);
        }
      }
    }
  }
}

TEST(RmsNormGated, ExplainNamesEveryVariantAndThePlan) {
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
}  // namespace liger::rms_norm_gated
