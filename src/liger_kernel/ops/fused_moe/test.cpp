// fused_moe on the CPU: routing against a stable sort, the passes and the products against their definitions in fp64, every variant.
#include <algorithm>
#include <numeric>

#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/fused_moe/fused_moe.h>

namespace liger::fused_moe {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Routing {
  Routing(int64_t tokens, int64_t experts, int64_t top_k, const Host& host)
      : experts(experts), index(tokens * top_k), starts(experts + 1), token(index.size()), order(index.size()), place(index.size()) {
    std::mt19937 generator(7);
    std::uniform_int_distribution<int64_t> choose(-1, experts + 1);
    for (int64_t& e : index) e = choose(generator);
    route({.index = index.data(),
           .starts = starts.data(),
           .token = token.data(),
           .order = order.data(),
           .place = place.data(),
           .slots = slots(),
           .experts = experts,
           .top_k = top_k,
           .wide = true},
          host);
  }
  int64_t slots() const { return static_cast<int64_t>(index.size()); }
  int64_t used() const { return starts[experts]; }
  int64_t expert(int64_t choice) const { return index[choice] < 0 || index[choice] >= experts ? experts : index[choice]; }

  int64_t experts;
  std::vector<int64_t> index;
  std::vector<int32_t> starts, token, order, place;
};

std::vector<float> random_weights(int64_t n) {
  std::mt19937 generator(3);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> out(n);
  for (float& w : out) w = uniform(generator);
  return out;
}

TEST(FusedMoe, RouteIsAStableSort) {
  for_each_cpu_variant("fused_moe", [](const Host& host) {
    for (const auto& [tokens, experts, top_k] : {std::tuple{0, 3, 2}, {1, 1, 1}, {50, 7, 3}, {9, 200, 4}}) {
      const Routing r(tokens, experts, top_k, host);
      std::vector<int32_t> order(r.slots());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return r.expert(a) < r.expert(b); });
      EXPECT_EQ(r.order, order);
      for (int64_t e = 0; e <= experts; ++e) {
        const auto before = std::count_if(order.begin(), order.end(), [&](int32_t i) { return r.expert(i) < e; });
        EXPECT_EQ(r.starts[e], before);
      }
      for (int32_t slot = 0; slot < r.slots(); ++slot) {
        EXPECT_EQ(r.place[r.order[slot]], slot);
        EXPECT_EQ(r.token[slot], r.order[slot] / top_k);
      }
    }
  });
}

TEST(FusedMoe, Combine) {
  for_each_cpu_variant("fused_moe", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t cols : {1, 7, 16, 33, 100}) {
        for (const bool weighted : {false, true}) {
          const int64_t tokens = 20, top_k = 3;
          const Routing r(tokens, 5, top_k, host);
          Matrix y(dtype, r.slots(), cols), out = Matrix::output(dtype, tokens, cols);
          y.random(1);
          for (int64_t slot = r.used(); slot < r.slots(); ++slot) {
            for (int64_t j = 0; j < cols; ++j) y.set(slot, j, std::nan(""));  // of no expert: not read
          }
          const std::vector<float> weight = random_weights(r.slots());
          combine({.y = y.data(),
                   .place = r.place.data(),
                   .starts = r.starts.data(),
                   .weight = weighted ? weight.data() : nullptr,
                   .out = out.data(),
                   .tokens = tokens,
                   .top_k = top_k,
                   .cols = cols,
                   .experts = r.experts,
                   .dtype = dtype},
                  host);
          const auto sum = [&](int64_t t, int64_t j, bool sizes) {
            double total = 0;
            for (int64_t k = 0; k < top_k; ++k) {
              const int64_t choice = t * top_k + k;
              if (r.place[choice] >= r.used()) continue;
              const double v = (weighted ? weight[choice] : 1.) * y.at(r.place[choice], j);
              total += sizes ? std::abs(v) : v;
            }
            return total;
          };
          const double u = test::unit_roundoff(DType::kF32);
          expect_near(
              out, [&](int64_t t, int64_t j) { return sum(t, j, false); }, [&](int64_t t, int64_t j) { return 5 * u * sum(t, j, true); },
              "out");
        }
      }
    }
  });
}

void check_gate_gradient(DType dtype, int64_t cols, const Host& host) {
  SCOPED_TRACE(::testing::Message() << cols << " columns " << name(dtype));
  const Routing r(13, 4, 2, host);
  Matrix da(dtype, r.slots(), cols), h(dtype, r.slots(), 2 * cols);
  da.random(1), h.random(2);
  Matrix dh = Matrix::output(dtype, r.used(), 2 * cols), weighted = Matrix::output(dtype, r.used(), cols);  // no row of no expert
  const std::vector<float> weight = random_weights(r.slots());
  std::vector<float> dweight(r.slots(), NAN);
  GateGradientArgs args{.da = da.data(),
                        .h = h.data(),
                        .order = r.order.data(),
                        .starts = r.starts.data(),
                        .weight = weight.data(),
                        .dh = dh.data(),
                        .weighted = weighted.data(),
                        .dweight = dweight.data(),
                        .slots = r.slots(),
                        .cols = cols,
                        .experts = r.experts,
                        .dtype = dtype};
  gate_gradient(args, host);
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  const auto w = [&](int64_t slot) { return static_cast<double>(weight[r.order[slot]]); };
  const auto a = [&](int64_t slot, int64_t j) { return h.at(slot, j) * sigmoid(h.at(slot, j)) * h.at(slot, cols + j); };
  const double u = test::unit_roundoff(dtype);
  expect_near(
      weighted, [&](int64_t s, int64_t j) { return w(s) * a(s, j); },
      [&](int64_t s, int64_t j) {
        return 2.2 * u * std::abs(w(s) * a(s, j)) + 32 * test::unit_roundoff(DType::kF32) + test::smallest(dtype);
      },
      "weighted");
  expect_near(
      dh,
      [&](int64_t s, int64_t j) {
        const int64_t c = j % cols;
        const double g = h.at(s, c), p = sigmoid(g), d = w(s) * da.at(s, c);
        return j < cols ? d * h.at(s, cols + c) * p * (1 + g * (1 - p)) : d * g * p;
      },
      [&](int64_t s, int64_t j) {
        return 64 * test::unit_roundoff(DType::kF32) * (1 + std::abs(da.at(s, j % cols)) * (1 + std::abs(h.at(s, cols + j % cols))));
      },
      "dh");
  for (int64_t slot = 0; slot < r.slots(); ++slot) {
    double dot = 0, size = 0;
    for (int64_t j = 0; j < cols && slot < r.used(); ++j) {
      dot += da.at(slot, j) * a(slot, j);
      size += std::abs(da.at(slot, j) * a(slot, j));
    }
    EXPECT_NEAR(dweight[r.order[slot]], dot, (2.2 * u + 1e-5) * size + 1e-5);
  }
  // The product alone: nothing else is read or written.
  Matrix again = Matrix::output(dtype, r.used(), cols);
  args.da = nullptr, args.dh = nullptr, args.dweight = nullptr, args.weighted = again.data();
  gate_gradient(args, host);
  expect_near(
      again, [&](int64_t s, int64_t j) { return weighted.at(s, j); }, [](int64_t, int64_t) { return 0.; }, "weighted alone");
}

TEST(FusedMoe, GateGradient) {
  for_each_cpu_variant("fused_moe", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t cols : {1, 7, 16, 33, 200}) check_gate_gradient(dtype, cols, host);
    }
  });
}

TEST(FusedMoe, ProductsOfEachExpertsRows) {
  const Host& host = cpu_host();
  const int64_t n = 6, k = 9;
  const Routing r(17, 4, 2, host);
  for (const bool transpose : {true, false}) {
    const int64_t rows = transpose ? n : k, columns = transpose ? k : n, padding = 3;
    Matrix x(DType::kF32, r.slots(), k), w(DType::kF32, r.experts * rows, columns, padding), y = Matrix::output(DType::kF32, r.used(), n);
    x.random(1), w.random(2);
    project({.x = x.data(),
             .w = w.data(),
             .y = y.data(),
             .starts = r.starts.data(),
             .slots = r.slots(),
             .experts = r.experts,
             .n = n,
             .k = k,
             .expert_stride = rows * w.stride(),
             .row_stride = w.stride(),
             .transpose = transpose,
             .dtype = DType::kF32},
            host);
    expect_near(
        y,
        [&](int64_t slot, int64_t j) {
          const int64_t e = r.expert(r.order[slot]);
          double total = 0;
          for (int64_t i = 0; i < k; ++i) total += x.at(slot, i) * (transpose ? w.at(e * rows + j, i) : w.at(e * rows + i, j));
          return total;
        },
        [](int64_t, int64_t) { return 1e-5; }, "y");
  }
  Matrix a(DType::kF32, r.slots(), n), b(DType::kF32, r.slots(), k), out = Matrix::output(DType::kF32, (r.experts + 1) * n, k);
  a.random(3), b.random(4);
  std::vector<int32_t> starts(r.starts);
  starts.push_back(starts.back());  // one more expert, without rows
  weight_gradient({.a = a.data(),
                   .b = b.data(),
                   .out = out.data(),
                   .starts = starts.data(),
                   .experts = r.experts + 1,
                   .m = n,
                   .n = k,
                   .dtype = DType::kF32},
                  host);
  expect_near(
      out,
      [&](int64_t row, int64_t j) {
        double total = 0;
        for (int64_t slot = starts[row / n]; slot < starts[row / n + 1]; ++slot) total += a.at(slot, row % n) * b.at(slot, j);
        return total;
      },
      [](int64_t, int64_t) { return 1e-5; }, "out");
}

}  // namespace
}  // namespace liger::fused_moe
