// softmax on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment; how CUDA rows are
// planned.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double scale = 2;
};

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset);
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

  const double u = test::unit_roundoff(DType::kF32), least = std::ldexp(1, -125), across = std::sqrt(static_cast<double>(c.cols));
  std::vector<double> top(c.rows, -HUGE_VAL), total(c.rows), dot(c.rows), size(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) top[i] = std::max(top[i], x.at(i, j));
    for (int64_t j = 0; j < c.cols; ++j) {
      total[i] += std::exp(x.at(i, j) - top[i]);
      dot[i] += dy.at(i, j) * y.at(i, j), size[i] += std::abs(dy.at(i, j) * y.at(i, j));
    }
  }
  const auto truth = [&](int64_t i, int64_t j) { return std::exp(x.at(i, j) - top[i]) / total[i]; };
  expect_near(
      y, truth, [&](int64_t i, int64_t j) { return (16 + 3 * (top[i] - x.at(i, j)) + across) * u * truth(i, j) + least; }, "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return y.at(i, j) * (dy.at(i, j) - dot[i]); },
      [&](int64_t i, int64_t j) { return y.at(i, j) * u * (4 * std::abs(dy.at(i, j)) + (8 + across) * size[i]) + least; }, "dx");
}

TEST(Softmax, WidthsAndTypes) {
  for_each_cpu_variant("softmax", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 70; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype}, host);
      for (const int64_t cols : {1023, 1025, 4096, 9000, 70001}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      check({.rows = 0, .cols = 70, .dtype = dtype}, host);
    }
  });
}

TEST(Softmax, StridesMisalignmentAndScales) {
  for_each_cpu_variant("softmax", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {1e-3, 100.}) check({.rows = 6, .cols = 200, .dtype = dtype, .scale = scale}, host);
    }
  });
}

// Every vector of a row belongs to one block; registers hold what the plan says they do.
TEST(Softmax, RowPlans) {
  constexpr int64_t kShared = 227 << 10;
  const Machine machine{.backend = Backend::kCuda, .floor = 90, .multiprocessors = 132, .shared_memory = kShared};
  for (const int operands : {1, 2}) {
    for (const int64_t rows : {1, 8, 100000}) {
      for (int64_t vectors = 0; vectors < 300000; vectors += 1 + vectors / 7) {
        const int cluster = cluster_for(rows, vectors, operands, machine);
        for (const int blocks : {1, cluster}) {
          const HeldRowPlan p = choose_row(vectors, operands, blocks, kShared);
          SCOPED_TRACE(::testing::Message() << operands << " operands, " << rows << " x " << vectors << " vectors: " << describe(p));
          EXPECT_GE(p.slice * blocks, vectors);
          EXPECT_TRUE(p.threads % 32 == 0 && p.threads <= (p.rest ? kRestThreads : kMaxRowThreads) &&
                      (p.rows_per_block == 1 || p.threads == 32));
          EXPECT_EQ(p.rest, p.slice > int64_t{most_held(operands)} * kMaxRowThreads);
          if (!p.rest) {
            EXPECT_GE(int64_t{p.held} * p.threads, p.slice);
          }
          EXPECT_LE(p.held, most_held(operands, p.rest));
          EXPECT_EQ(p.shared_bytes, p.shared * operands * 16);
          EXPECT_LE(p.shared_bytes, kShared - kRowOwnMemory);
          const int64_t held = int64_t{p.held} * p.threads;
          EXPECT_TRUE(held + p.shared >= p.slice ||
                      p.shared_bytes + operands * 16 > kShared - kRowOwnMemory);  // read again: memory is full
          EXPECT_TRUE(p.shared == 0 || (p.rest && held + p.shared <= p.slice));
          EXPECT_EQ(choose_row(vectors, operands, blocks, kShared, 2).shared, 0);  // single elements
          if (p.rest && blocks == cluster) {
            EXPECT_TRUE(held + p.shared >= p.slice || blocks == kMaxRowCluster);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace liger::softmax
