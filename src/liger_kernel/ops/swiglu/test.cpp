// swiglu on the CPU against its definition in fp64: every variant, dtype, width of tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

namespace liger::swiglu {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t rows, cols;
  DType dtype;
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  double gate = 1, down = 1, scale = 1;
  bool in_place = false;  // gradients over a and b
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
// 16 units for products and quotient, |x| for the argument of the exponential.
double relative_error(double x) { return (16 + 2 * std::min(std::abs(x), 100.)) * test::unit_roundoff(DType::kF32); }
constexpr double kUnderflow = 1e-35;

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << name(c.dtype) << ", padding " << c.padding << ", offset "
                                    << c.offset);
  Matrix a(c.dtype, c.rows, c.cols, c.padding, c.offset, c.in_place), b(c.dtype, c.rows, c.cols, 3 * c.padding, 0, c.in_place);
  Matrix dc(c.dtype, c.rows, c.cols, 2 * c.padding, c.offset), out = Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset);
  a.random(1, c.scale), b.random(2, c.scale), dc.random(3);
  Matrix da = c.in_place ? a : Matrix::output(c.dtype, c.rows, c.cols, c.padding, c.offset),
         db = c.in_place ? b : Matrix::output(c.dtype, c.rows, c.cols);

  forward({.a = a.data(),
           .b = b.data(),
           .c = out.data(),
           .rows = c.rows,
           .cols = c.cols,
           .a_stride = a.stride(),
           .b_stride = b.stride(),
           .c_stride = out.stride(),
           .dtype = c.dtype,
           .gate_multiplier = static_cast<float>(c.gate),
           .down_multiplier = static_cast<float>(c.down)},
          host);
  backward({.dc = dc.data(),
            .a = c.in_place ? da.data() : a.data(),
            .b = c.in_place ? db.data() : b.data(),
            .da = da.data(),
            .db = db.data(),
            .rows = c.rows,
            .cols = c.cols,
            .dc_stride = dc.stride(),
            .a_stride = a.stride(),
            .b_stride = b.stride(),
            .da_stride = da.stride(),
            .db_stride = db.stride(),
            .dtype = c.dtype,
            .gate_multiplier = static_cast<float>(c.gate),
            .down_multiplier = static_cast<float>(c.down)},
           host);

  const auto x = [&](int64_t i, int64_t j) { return a.at(i, j) * c.gate; };
  const auto silu = [&](int64_t i, int64_t j) { return x(i, j) * sigmoid(x(i, j)); };
  const auto error = [&](int64_t i, int64_t j, double rounding) {
    return std::abs(silu(i, j)) * (relative_error(x(i, j)) + rounding) + (rounding > 0 ? test::smallest(c.dtype) : 0) + kUnderflow;
  };
  expect_near(
      out, [&](int64_t i, int64_t j) { return silu(i, j) * b.at(i, j) * c.down; },
      [&](int64_t i, int64_t j) { return error(i, j, 1.01 * test::unit_roundoff(c.dtype)) * std::abs(b.at(i, j) * c.down); }, "c");
  expect_near(
      da,
      [&](int64_t i, int64_t j) {
        const double s = sigmoid(x(i, j));
        return dc.at(i, j) * c.down * b.at(i, j) * (s + silu(i, j) * (1 - s)) * c.gate;
      },
      [&](int64_t i, int64_t j) {
        return std::abs(dc.at(i, j) * c.down * b.at(i, j) * c.gate) *
               ((sigmoid(x(i, j)) + std::abs(silu(i, j))) * relative_error(x(i, j)) + kUnderflow);
      },
      "da");
  expect_near(
      db, [&](int64_t i, int64_t j) { return dc.at(i, j) * c.down * silu(i, j); },
      [&](int64_t i, int64_t j) { return error(i, j, 0) * std::abs(dc.at(i, j) * c.down); }, "db");
}

TEST(Swiglu, WidthsAndTypes) {
  for_each_cpu_variant("swiglu", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t cols = 1; cols <= 33; ++cols) check({.rows = 3, .cols = cols, .dtype = dtype}, host);
      for (const int64_t cols : {63, 65, 4095, 4097, 20000}) check({.rows = 2, .cols = cols, .dtype = dtype}, host);
      check({.rows = 500, .cols = 70, .dtype = dtype, .padding = 2}, host);
    }
  });
}

TEST(Swiglu, StridesMisalignmentMultipliersAndScales) {
  for_each_cpu_variant("swiglu", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = padding, .offset = offset}, host);
      }
      for (const double scale : {1e-3, 30.})
        check({.rows = 6, .cols = 200, .dtype = dtype, .gate = 0.25, .down = -1.75, .scale = scale}, host);
    }
  });
}

TEST(Swiglu, GradientsOverTheOperands) {
  for_each_cpu_variant("swiglu", [](const Host& host) {
    for (const DType dtype : test::kDTypes) check({.rows = 5, .cols = 77, .dtype = dtype, .padding = 3, .in_place = true}, host);
  });
}

TEST(Swiglu, GradientsNotWantedAreNotWritten) {
  for_each_cpu_variant("swiglu", [](const Host& host) {
    const int64_t rows = 4, cols = 37;
    Matrix a(DType::kBF16, rows, cols), b(DType::kBF16, rows, cols), dc(DType::kBF16, rows, cols);
    a.random(1), b.random(2), dc.random(3);
    const auto run = [&](Matrix* da, Matrix* db) {
      backward({.dc = dc.data(),
                .a = a.data(),
                .b = b.data(),
                .da = da ? da->data() : nullptr,
                .db = db ? db->data() : nullptr,
                .rows = rows,
                .cols = cols,
                .dc_stride = cols,
                .a_stride = cols,
                .b_stride = cols,
                .da_stride = cols,
                .db_stride = cols,
                .dtype = DType::kBF16},
               host);
    };
    Matrix da = Matrix::output(DType::kBF16, rows, cols), db = da, da_alone = da, db_alone = da;
    run(&da, &db), run(&da_alone, nullptr), run(nullptr, &db_alone), run(nullptr, nullptr);
    expect_near(
        da_alone, [&](int64_t i, int64_t j) { return da.at(i, j); }, [](int64_t, int64_t) { return 0.; }, "da alone");
    expect_near(
        db_alone, [&](int64_t i, int64_t j) { return db.at(i, j); }, [](int64_t, int64_t) { return 0.; }, "db alone");
  });
}

TEST(Swiglu, ZeroRows) {
  for_each_cpu_variant("swiglu", [](const Host& host) {
    check({.rows = 0, .cols = 40, .dtype = DType::kBF16}, host);
    check({.rows = 3, .cols = 0, .dtype = DType::kF32}, host);
  });
}

TEST(Swiglu, ExplainNamesEveryVariantAndThePlan) {
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != "swiglu") continue;
    const std::string text = info.explain({.shape = {8192, 4096}, .dtype = DType::kBF16, .machine = cpu_machine()});
    for (const std::string& variant : info.variants()) EXPECT_NE(text.find('\t' + variant + '\t'), std::string::npos) << text;
    EXPECT_NE(text.find("chosen"), std::string::npos);
    EXPECT_NE(text.find("plan\t"), std::string::npos);
    EXPECT_THROW(info.explain({.shape = {1}, .dtype = DType::kF32, .machine = cpu_machine()}), Error);
    return;
  }
  FAIL() << "swiglu is not registered";
}

}  // namespace
}  // namespace liger::swiglu
