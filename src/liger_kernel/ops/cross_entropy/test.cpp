// cross_entropy on the CPU against its definition in fp64: every variant, dtype, width of tail, stride, misalignment and option.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::cross_entropy {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, vocab;
  DType dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double smoothing = 0, z = 0, softcap = 0, logit_scale = 1;
  bool weight = false, row_scale = false, mean = true, token_scaling = false, in_place = false;
};

// x and its slope.
double capped(const Case& c, double logit) {
  const double v = logit * c.logit_scale;
  return c.softcap > 0 ? c.softcap * std::tanh(v / c.softcap) : v;
}
double slope(const Case& c, double logit) {
  const double t = c.softcap > 0 ? std::tanh(logit * c.logit_scale / c.softcap) : 0;
  return (1 - t * t) * c.logit_scale;
}

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.vocab << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset << ", smoothing " << c.smoothing << ", z " << c.z << ", softcap " << c.softcap
                                    << ", weight " << c.weight);
  Matrix logits(c.dtype, c.rows, c.vocab, c.padding, c.offset, c.in_place), weight(DType::kF32, 1, c.vocab),
      row_scale(DType::kF32, 1, c.rows);
  logits.random(1, 3), weight.random(2), row_scale.random(3);
  for (int64_t j = 0; j < c.vocab; ++j) weight.set(0, j, std::abs(weight.at(0, j)) + 0.1);
  const Matrix before = logits;
  std::vector<int64_t> target(2 * c.rows, -7);  // every second one is the label
  for (int64_t i = 0; i < c.rows; ++i) target[2 * i] = i % 4 == 1 ? -100 : (i * 7919 + c.vocab / 2) % c.vocab;
  Matrix grad = Matrix::output(c.dtype, c.rows, c.vocab, c.padding, c.offset), loss = Matrix::output(DType::kF32, 1, c.rows);
  Matrix z_loss = Matrix::output(DType::kF32, 1, c.rows), hit = Matrix::output(DType::kF32, 1, c.rows);
  std::vector<int64_t> prediction(c.rows, -7);
  LabelStats stats;

  const float* class_weight = c.weight ? weight.data<float>() : nullptr;
  label_stats(
      {.target = target.data(), .class_weight = class_weight, .stats = &stats, .rows = c.rows, .vocab = c.vocab, .target_stride = 2}, host);
  Matrix& out = c.in_place ? logits : grad;
  forward({.logits = logits.data(),
           .target = target.data(),
           .class_weight = class_weight,
           .stats = &stats,
           .row_scale = c.row_scale ? row_scale.data<float>() : nullptr,
           .grad = out.data(),
           .loss = loss.data<float>(),
           .z_loss = z_loss.data<float>(),
           .hit = hit.data<float>(),
           .prediction = prediction.data(),
           .rows = c.rows,
           .vocab = c.vocab,
           .logits_stride = logits.stride(),
           .grad_stride = out.stride(),
           .target_stride = 2,
           .dtype = c.dtype,
           .label_smoothing = static_cast<float>(c.smoothing),
           .lse_square_scale = static_cast<float>(c.z),
           .softcap = static_cast<float>(c.softcap),
           .logit_scale = static_cast<float>(c.logit_scale),
           .mean = c.mean,
           .token_scaling = c.token_scaling},
          host);

  const auto w = [&](int64_t j) { return c.weight ? weight.at(0, j) : 1.; };
  double weight_sum = 0, chosen = 0, count = 0;
  for (int64_t j = 0; j < c.vocab; ++j) weight_sum += w(j);
  for (int64_t i = 0; i < c.rows; ++i) {
    if (target[2 * i] != -100) chosen += w(target[2 * i]), ++count;
  }
  EXPECT_EQ(stats.count, count);
  EXPECT_EQ(stats.below + stats.above, 0);
  const double s = c.smoothing, eps = s / static_cast<double>(c.vocab), u = test::unit_roundoff(DType::kF32);
  std::vector<double> losses(c.rows), zs(c.rows), loss_bounds(c.rows), grads(c.rows * c.vocab), bounds(c.rows * c.vocab);
  for (int64_t i = 0; i < c.rows; ++i) {
    const int64_t y = target[2 * i];
    if (y == -100) {
      EXPECT_EQ(prediction[i], -1);
      EXPECT_EQ(hit.at(0, i), 0);
      continue;
    }
    double sum = 0, weighted = 0, largest = 0;
    for (int64_t j = 0; j < c.vocab; ++j) {
      const double x = capped(c, before.at(i, j));
      sum += std::exp(x), weighted += w(j) * x, largest = std::max(largest, std::abs(x));
    }
    const double lse = std::log(sum), x_y = capped(c, before.at(i, y)), p_y = std::exp(x_y - lse);
    const double factor = (c.row_scale ? row_scale.at(0, i) : 1.) * (c.token_scaling ? p_y : 1.);
    const double scale = factor / (c.mean ? chosen : 1.), scale_z = factor / (c.mean ? count : 1.);
    zs[i] = c.z * lse * lse * scale_z;
    losses[i] = ((1 - s) * w(y) * (lse - x_y) + eps * (lse * weight_sum - weighted)) * scale + zs[i];
    loss_bounds[i] =
        32 * u * (largest + std::abs(lse) + 1) * (((1 - s) * w(y) + eps * weight_sum) * std::abs(scale) + c.z * std::abs(lse * scale_z));
    for (int64_t j = 0; j < c.vocab; ++j) {
      const double x = capped(c, before.at(i, j)), p = std::exp(x - lse), slide = slope(c, before.at(i, j));
      const double hot = j == y ? 1 : 0;
      const double own = (1 - s) * w(y) * (p - hot) * scale, smooth = eps * (p * weight_sum - w(j)) * scale,
                   dz = 2 * c.z * lse * p * scale_z;
      const double size = std::abs(own) + eps * (p * weight_sum + w(j)) * std::abs(scale) + std::abs(dz);
      grads[i * c.vocab + j] = (own + smooth + dz) * slide;
      bounds[i * c.vocab + j] = size * u * ((64 + 8 * largest) * slide + 16 * c.logit_scale) + 1e-37;
    }
    // The first largest: equal capped values cannot be told apart here, so only its value is compared.
    ASSERT_TRUE(prediction[i] >= 0 && prediction[i] < c.vocab);
    for (int64_t j = 0; j < c.vocab; ++j) EXPECT_LE(before.at(i, j), before.at(i, prediction[i]) + (c.softcap > 0 ? 1e-2 : 0));
    EXPECT_EQ(hit.at(0, i), prediction[i] == y ? 1 : 0);
  }
  const auto bound = [&](int64_t, int64_t i) { return loss_bounds[i]; };
  expect_near(
      loss, [&](int64_t, int64_t i) { return losses[i]; }, bound, "loss");
  expect_near(
      z_loss, [&](int64_t, int64_t i) { return zs[i]; }, bound, "z");
  expect_near(
      out, [&](int64_t i, int64_t j) { return grads[i * c.vocab + j]; }, [&](int64_t i, int64_t j) { return bounds[i * c.vocab + j]; },
      "grad");
}

TEST(CrossEntropy, WidthsAndTypes) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t vocab = 1; vocab <= 34; ++vocab) check({.rows = 5, .vocab = vocab, .dtype = dtype}, host);
      for (const int64_t vocab : {63, 64, 65, 127, 129, 1000, 2048, 2049, 4097, 6200})
        check({.rows = 3, .vocab = vocab, .dtype = dtype}, host);
    }
  });
}

TEST(CrossEntropy, StridesMisalignmentAndInPlace) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) {
          check({.rows = 9, .vocab = 77, .dtype = dtype, .padding = padding, .offset = offset, .in_place = padding + offset > 3}, host);
        }
      }
    }
  });
}

TEST(CrossEntropy, Options) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t vocab : {37, 2100}) {
        check({.rows = 6, .vocab = vocab, .dtype = dtype, .smoothing = 0.1}, host);
        check({.rows = 6, .vocab = vocab, .dtype = dtype, .z = 0.01, .mean = false}, host);
        check({.rows = 6, .vocab = vocab, .dtype = dtype, .softcap = 5}, host);
        check({.rows = 6, .vocab = vocab, .dtype = dtype, .logit_scale = 0.25, .weight = true}, host);
        check({.rows = 6, .vocab = vocab, .dtype = dtype, .row_scale = true, .token_scaling = true}, host);
        check({.rows = 6,
               .vocab = vocab,
               .dtype = dtype,
               .smoothing = 0.3,
               .z = 0.001,
               .softcap = 20,
               .logit_scale = 2,
               .weight = true,
               .row_scale = true,
               .in_place = true},
              host);
      }
    }
  });
}

// A label out of range reads nothing, whatever its value, and gives NaN; zero rows and no row left give zeros.
TEST(CrossEntropy, LabelsOutOfRangeAndEmptyCalls) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    const int64_t vocab = 19;
    Matrix logits(DType::kF32, 3, vocab), grad = Matrix::output(DType::kF32, 3, vocab), loss = Matrix::output(DType::kF32, 1, 3);
    logits.random(1);
    const int64_t target[3] = {int64_t{1} << 62, -5, 3};
    LabelStats stats;
    label_stats({.target = target, .class_weight = nullptr, .stats = &stats, .rows = 3, .vocab = vocab, .target_stride = 1}, host);
    EXPECT_EQ(stats.count, 3);
    EXPECT_EQ(stats.below, 1);
    EXPECT_EQ(stats.above, 1);
    ForwardArgs args{.logits = logits.data(),
                     .target = target,
                     .class_weight = nullptr,
                     .stats = &stats,
                     .row_scale = nullptr,
                     .grad = grad.data(),
                     .loss = loss.data<float>(),
                     .z_loss = nullptr,
                     .hit = nullptr,
                     .prediction = nullptr,
                     .rows = 3,
                     .vocab = vocab,
                     .logits_stride = vocab,
                     .grad_stride = vocab,
                     .target_stride = 1,
                     .dtype = DType::kF32};
    forward(args, host);
    EXPECT_TRUE(std::isnan(loss.at(0, 0)) && std::isnan(loss.at(0, 1)) && std::isfinite(loss.at(0, 2)));
    EXPECT_TRUE(std::isnan(grad.at(0, 0)) && std::isnan(grad.at(1, vocab - 1)) && std::isfinite(grad.at(2, 0)));
    EXPECT_TRUE(grad.untouched() && loss.untouched());

    label_stats({.target = nullptr, .class_weight = nullptr, .stats = &stats, .rows = 0, .vocab = vocab, .target_stride = 1}, host);
    EXPECT_EQ(stats.count, 0);
    EXPECT_EQ(stats.inverse_count, 0);
    args.rows = 0, args.loss = nullptr, args.grad = nullptr;
    forward(args, host);
  });
}

TEST(CrossEntropy, Totals) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    for (const int64_t rows : {0, 1, 1000}) {
      Matrix loss(DType::kF32, 1, rows), z(DType::kF32, 1, rows), hit(DType::kF32, 1, rows);
      loss.random(1), z.random(2);
      double sum = 0, z_sum = 0;
      for (int64_t i = 0; i < rows; ++i) hit.set(0, i, i % 4 == 0), sum += loss.at(0, i), z_sum += z.at(0, i);
      LabelStats stats{};
      stats.count = static_cast<int32_t>(rows / 2);
      float total = -1, z_total = -1, accuracy = -1;
      TotalsArgs args{.loss = loss.data<float>(),
                      .z_loss = z.data<float>(),
                      .hit = hit.data<float>(),
                      .stats = &stats,
                      .total = &total,
                      .z_total = &z_total,
                      .accuracy = &accuracy,
                      .rows = rows,
                      .dtype = DType::kF32};
      totals(args, host);
      EXPECT_FLOAT_EQ(total, static_cast<float>(sum));
      EXPECT_FLOAT_EQ(z_total, static_cast<float>(z_sum));
      EXPECT_FLOAT_EQ(accuracy, rows == 1000 ? 0.5f : rows == 1 ? 1.f : 0.f);
      args.z_total = nullptr, args.accuracy = nullptr, z_total = accuracy = -1;
      totals(args, host);
      EXPECT_EQ(z_total, -1);
      EXPECT_EQ(accuracy, -1);
    }
  });
}

TEST(CrossEntropy, Scale) {
  for_each_cpu_variant("cross_entropy", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      Matrix grad(dtype, 4, 45, 2, 1), out = Matrix::output(dtype, 4, 45, 3), factor(DType::kF32, 1, 4);
      grad.random(1), factor.random(2);
      for (const bool per_row : {false, true}) {
        scale({.grad = grad.data(),
               .grad_out = out.data(),
               .factor = factor.data<float>(),
               .factor_dtype = DType::kF32,
               .per_row = per_row,
               .rows = 4,
               .vocab = 45,
               .grad_stride = grad.stride(),
               .out_stride = out.stride(),
               .dtype = dtype},
              host);
        expect_near(
            out, [&](int64_t i, int64_t j) { return grad.at(i, j) * factor.at(0, per_row ? i : 0); },
            [&](int64_t, int64_t) { return test::smallest(dtype); }, "scaled");
      }
    }
  });
}

}  // namespace
}  // namespace liger::cross_entropy
