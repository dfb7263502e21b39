// group_norm on the CPU against its definition in fp64: every variant, dtype, size of plane and of group, misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/group_norm/group_norm.h>

namespace liger::group_norm {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t batch, channels, spatial, groups;
  DType dtype, parameter_dtype = DType::kF32;
  int64_t offset = 0;  // elements in front of the first
  double scale = 1, shift = 0;
};

constexpr float kEps = 1e-6f;

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.batch << " x " << c.channels << " x " << c.spatial << ", " << c.groups << " groups, "
                                    << name(c.dtype) << ", parameters " << name(c.parameter_dtype) << ", offset " << c.offset);
  const int64_t planes = c.batch * c.channels, group_channels = c.channels / c.groups, size = group_channels * c.spatial;
  Matrix x(c.dtype, planes, c.spatial, 0, c.offset), dy(c.dtype, planes, c.spatial);
  Matrix weight(c.parameter_dtype, 1, c.channels), bias(c.parameter_dtype, 1, c.channels);
  Matrix y = Matrix::output(c.dtype, planes, c.spatial, 0, c.offset), dx = Matrix::output(c.dtype, planes, c.spatial);
  Matrix dw = Matrix::output(c.parameter_dtype, 1, c.channels), db = Matrix::output(c.parameter_dtype, 1, c.channels);
  std::vector<float> mean(c.batch * c.groups), rstd(c.batch * c.groups);
  x.random(1, c.scale), dy.random(2), weight.random(3), bias.random(4);
  for (int64_t i = 0; c.shift != 0 && i < planes; ++i) {
    for (int64_t j = 0; j < c.spatial; ++j) x.set(i, j, x.at(i, j) + c.shift);
  }

  forward({.x = x.data(),
           .weight = weight.data(),
           .bias = bias.data(),
           .y = y.data(),
           .mean = mean.data(),
           .rstd = rstd.data(),
           .batch = c.batch,
           .channels = c.channels,
           .spatial = c.spatial,
           .groups = c.groups,
           .dtype = c.dtype,
           .weight_dtype = c.parameter_dtype,
           .bias_dtype = c.parameter_dtype,
           .eps = kEps},
          host);
  backward({.dy = dy.data(),
            .x = x.data(),
            .weight = weight.data(),
            .mean = mean.data(),
            .rstd = rstd.data(),
            .dx = dx.data(),
            .dw = dw.data(),
            .db = db.data(),
            .batch = c.batch,
            .channels = c.channels,
            .spatial = c.spatial,
            .groups = c.groups,
            .dtype = c.dtype,
            .weight_dtype = c.parameter_dtype,
            .bias_dtype = c.parameter_dtype},
           host);

  const double u = test::unit_roundoff(DType::kF32), least = test::smallest(DType::kF32);
  // Of each group: its statistics, the error of hat beside 16 units of its own size, and means of g, |g|, g hat, |g hat|, |g| e_hat.
  struct Group {
    double mean, rstd, error, g, size_g, product, size_product, error_product;
  };
  const auto each = [&](int64_t group, auto&& body) {
    for (int64_t i = group * group_channels; i < (group + 1) * group_channels; ++i) {
      for (int64_t j = 0; j < c.spatial; ++j) body(i, j, x.at(i, j), dy.at(i, j) * weight.at(0, i % c.channels));
    }
  };
  std::vector<Group> groups(c.batch * c.groups);
  const auto n = static_cast<double>(size);
  for (int64_t k = 0; k < c.batch * c.groups; ++k) {
    Group& q = groups[k];
    double sizes = 0, squares = 0;
    each(k, [&](int64_t, int64_t, double v, double) { q.mean += v / n, sizes += std::abs(v) / n; });
    each(k, [&](int64_t, int64_t, double v, double) { squares += (v - q.mean) * (v - q.mean) / n; });
    q.rstd = 1 / std::sqrt(squares + kEps);
    q.error = 16 * u + 8 * u * q.rstd * sizes;
    each(k, [&](int64_t, int64_t, double v, double g) {
      const double hat = (v - q.mean) * q.rstd;
      q.g += g / n, q.size_g += std::abs(g) / n, q.product += g * hat / n, q.size_product += std::abs(g * hat) / n;
      q.error_product += std::abs(g) * (q.error + 16 * u * std::abs(hat)) / n;
    });
  }
  const auto group_of = [&](int64_t plane) -> const Group& { return groups[plane / group_channels]; };
  const auto hat = [&](int64_t i, int64_t j) { return (x.at(i, j) - group_of(i).mean) * group_of(i).rstd; };
  const auto e_hat = [&](int64_t i, int64_t j) { return group_of(i).error + 16 * u * std::abs(hat(i, j)); };
  const auto w = [&](int64_t i) { return weight.at(0, i % c.channels); };
  const auto b = [&](int64_t i) { return bias.at(0, i % c.channels); };
  expect_near(
      y, [&](int64_t i, int64_t j) { return hat(i, j) * w(i) + b(i); },
      [&](int64_t i, int64_t j) { return std::abs(w(i)) * e_hat(i, j) + 4 * u * (std::abs(hat(i, j) * w(i)) + std::abs(b(i))) + least; },
      "y");
  expect_near(
      dx, [&](int64_t i, int64_t j) { return group_of(i).rstd * (dy.at(i, j) * w(i) - group_of(i).g - hat(i, j) * group_of(i).product); },
      [&](int64_t i, int64_t j) {
        const Group& q = group_of(i);
        const double h = std::abs(hat(i, j));
        return q.rstd * (32 * u * (std::abs(dy.at(i, j) * w(i)) + q.size_g + h * q.size_product) + e_hat(i, j) * q.size_product +
                         h * q.error_product) +
               least;
      },
      "dx");
  const double across = (16 + std::sqrt(static_cast<double>(c.batch * c.spatial))) * u;
  const auto over_channel = [&](int64_t channel, auto&& term) {
    double total = 0;
    for (int64_t i = channel; i < planes; i += c.channels) {
      for (int64_t j = 0; j < c.spatial; ++j) total += term(i, j);
    }
    return total;
  };
  expect_near(
      dw, [&](int64_t, int64_t k) { return over_channel(k, [&](int64_t i, int64_t j) { return dy.at(i, j) * hat(i, j); }); },
      [&](int64_t, int64_t k) {
        return least +
               over_channel(k, [&](int64_t i, int64_t j) { return std::abs(dy.at(i, j)) * (e_hat(i, j) + across * std::abs(hat(i, j))); });
      },
      "dw");
  expect_near(
      db, [&](int64_t, int64_t k) { return over_channel(k, [&](int64_t i, int64_t j) { return dy.at(i, j); }); },
      [&](int64_t, int64_t k) { return least + across * over_channel(k, [&](int64_t i, int64_t j) { return std::abs(dy.at(i, j)); }); },
      "db");
}

TEST(GroupNorm, SizesGroupsAndTypes) {
  for_each_cpu_variant("group_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      const auto small = [&](int64_t spatial, int64_t groups) {
        check({.batch = 2, .channels = 6, .spatial = spatial, .groups = groups, .dtype = dtype}, host);
      };
      for (int64_t spatial = 1; spatial <= 35; ++spatial) small(spatial, spatial % 2 ? 3 : 2);
      for (const int64_t groups : {1, 2, 3, 6}) small(40, groups);
      for (const int64_t spatial : {1023, 1025, 4500}) small(spatial, 3);
      for (const DType parameters : test::kDTypes) {
        check({.batch = 40, .channels = 4, .spatial = 19, .groups = 2, .dtype = dtype, .parameter_dtype = parameters}, host);
      }
      check({.batch = 0, .channels = 4, .spatial = 19, .groups = 2, .dtype = dtype}, host);
    }
  });
}

TEST(GroupNorm, MisalignmentScalesAndRowsFarFromZero) {
  for_each_cpu_variant("group_norm", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t offset : {1, 3}) {
        check({.batch = 2, .channels = 4, .spatial = 77, .groups = 2, .dtype = dtype, .offset = offset}, host);
      }
      for (const double scale : {1e-2, 30.}) {
        check({.batch = 2, .channels = 4, .spatial = 77, .groups = 2, .dtype = dtype, .scale = scale}, host);
      }
      check({.batch = 2, .channels = 4, .spatial = 777, .groups = 2, .dtype = dtype, .shift = 1000}, host);
    }
  });
}

TEST(GroupNorm, ChannelsThatDoNotDivideAreAnError) {
  for_each_cpu_variant("group_norm", [](const Host& host) {
    EXPECT_THROW(check({.batch = 1, .channels = 4, .spatial = 2, .groups = 3, .dtype = DType::kF32}, host), Error);
  });
}

}  // namespace
}  // namespace liger::group_norm
