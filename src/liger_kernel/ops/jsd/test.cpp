// jsd on the CPU against its definition in fp64: every variant, dtype, width of tail, stride, misalignment and beta.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/jsd/jsd.h>

namespace liger::jsd {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kU = 0x1p-24;

void check(int64_t rows, int64_t cols, DType dtype, float beta, int64_t padding, int64_t offset, const Host& host) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << cols << ' ' << name(dtype) << ", beta " << beta << ", padding " << padding
                                    << ", offset " << offset);
  Matrix x(dtype, rows, cols, padding, offset), y(dtype, rows, cols, padding + 1, offset + 1);
  x.random(1, 3), y.random(2, 3);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) x.set(i, j, x.at(i, j) - 6), y.set(i, j, y.at(i, j) - 6);
  }
  Matrix dx = Matrix::output(dtype, rows, cols, padding + 2, offset), loss = Matrix::output(DType::kF32, 1, rows);
  std::vector<int64_t> target(2 * rows, -7);  // every second one is the label
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) target[2 * i] = i % 4 == 1 ? -100 : i, count += i % 4 != 1;
  const cross_entropy::LabelStats stats{1.f / static_cast<float>(count), 0, 0, 0, 0, 0};
  forward({.log_q = x.data(),
           .log_p = y.data(),
           .target = target.data(),
           .stats = &stats,
           .dx = dx.data(),
           .loss = loss.data<float>(),
           .rows = rows,
           .cols = cols,
           .q_stride = x.stride(),
           .p_stride = y.stride(),
           .dx_stride = dx.stride(),
           .target_stride = 2,
           .dtype = dtype,
           .beta = beta},
          host);
  std::vector<double> losses(rows), bounds(rows), grads(rows * cols), grad_bounds(rows * cols);
  for (int64_t i = 0; i < rows; ++i) {
    if (target[2 * i] == -100) continue;
    for (int64_t j = 0; j < cols; ++j) {
      const double q = std::exp(x.at(i, j)), p = std::exp(y.at(i, j)), d = y.at(i, j) - x.at(i, j), m = beta * p + (1 - beta) * q;
      const double b = x.at(i, j) - std::log(m), value = beta == 0 ? p * d : beta == 1 ? -q * d : beta * p * (b + d) + (1 - beta) * q * b;
      const double slope = beta == 0 ? -p : beta == 1 ? q - q * d : (1 - beta) * q * b;
      losses[i] += value / count, grads[i * cols + j] = slope / count;
      const double size = (32 + 2 * std::abs(x.at(i, j)) + 2 * std::abs(y.at(i, j))) * kU / count;
      bounds[i] += size * (p + q) * (1 + std::abs(d)), grad_bounds[i * cols + j] = size * (beta == 0 ? p : q * (1 + std::abs(d)));
    }
  }
  expect_near(
      loss, [&](int64_t, int64_t i) { return losses[i]; }, [&](int64_t, int64_t i) { return bounds[i]; }, "loss");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return grads[i * cols + j]; }, [&](int64_t i, int64_t j) { return grad_bounds[i * cols + j]; }, "dx");
}

TEST(Jsd, EveryVariant) {
  for_each_cpu_variant("jsd", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const float beta : {0.f, 0.3f, 1.f}) {
        for (const int64_t cols : {1, 7, 16, 33, 2047, 2049}) check(6, cols, dtype, beta, cols % 3, cols % 2, host);
      }
    }
  });
}

TEST(Jsd, RefusesBeta) {
  const StandaloneHost host(cpu_machine(), nullptr, 1);
  ForwardArgs args{};
  args.beta = 1.5f;
  EXPECT_THROW(forward(args, host), Error);
}

}  // namespace
}  // namespace liger::jsd
