// rope on the CPU against its definition in fp64, and its inverse back to the input: every variant, dtype, order of channels and
// table, tail, stride and misalignment.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/rope/rope.h>

namespace liger::rope {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

struct Case {
  int64_t batch, tokens, q_heads, k_heads, head_dim, rotary_dim;
  DType dtype, table_dtype;
  Order input = Order::kHalves, output = Order::kHalves, table = Order::kHalves;
  int64_t padding = 0, offset = 0;  // elements between tokens, and in front of the first
  bool heads_outer = false;         // [batch, heads, tokens, head_dim] in memory, not [batch, tokens, heads, head_dim]
  bool shared_positions = false;    // one table for all samples
};

// q or k: one row of the matrix per token, or per head and token.
struct Heads {
  int64_t tokens, heads, dim;
  bool outer;
  Matrix matrix;

  Heads(const Case& c, int64_t heads, bool output)
      : tokens(c.tokens),
        heads(heads),
        dim(c.head_dim),
        outer(c.heads_outer),
        matrix(c.dtype, c.batch * c.tokens * (outer ? heads : 1), outer ? dim : heads * dim, c.padding, c.offset, output) {}
  Strides strides() const {
    const int64_t row = matrix.stride();
    return outer ? Strides{.batch = heads * tokens * row, .head = tokens * row, .token = row}
                 : Strides{.batch = tokens * row, .head = dim, .token = row};
  }
  // (sample, token, head, channel) of the element at (i, j).
  struct Position {
    int64_t b, t, h, d;
  };
  Position position(int64_t i, int64_t j) const {
    if (outer) return {i / tokens / heads, i % tokens, i / tokens % heads, j};
    return {i / tokens, i % tokens, j / dim, j % dim};
  }
  double at(Position p) const {
    return outer ? matrix.at((p.b * heads + p.h) * tokens + p.t, p.d) : matrix.at(p.b * tokens + p.t, p.h * dim + p.d);
  }
};

// Channel or column of pair i's first (0) or second (1) element, and the pair and element of a channel.
int64_t place(Order order, int64_t i, int64_t which, int64_t half) {
  return order == Order::kPairs ? 2 * i + which : order == Order::kHalves ? i + which * half : i;
}
std::pair<int64_t, int64_t> pair_of(Order order, int64_t channel, int64_t half) {
  return order == Order::kPairs ? std::pair{channel / 2, channel % 2} : std::pair{channel % half, channel / half};
}

void run(const Case& c, Heads& q, Heads& k, Heads& q_out, Heads& k_out, Matrix& cos, Matrix& sin, bool inverse, const Host& host) {
  const TableStrides table{.batch = c.shared_positions ? 0 : c.tokens * cos.stride(), .token = cos.stride()};
  rotate({.q = q.matrix.data(),
          .k = k.matrix.data(),
          .cos = cos.data(),
          .sin = sin.data(),
          .q_out = q_out.matrix.data(),
          .k_out = k_out.matrix.data(),
          .batch = c.batch,
          .tokens = c.tokens,
          .q_heads = c.q_heads,
          .k_heads = c.k_heads,
          .head_dim = c.head_dim,
          .rotary_dim = c.rotary_dim,
          .q_strides = q.strides(),
          .k_strides = k.strides(),
          .q_out_strides = q_out.strides(),
          .k_out_strides = k_out.strides(),
          .cos_strides = table,
          .sin_strides = table,
          .dtype = c.dtype,
          .table_dtype = c.table_dtype,
          .input = inverse ? c.output : c.input,
          .output = inverse ? c.input : c.output,
          .table = c.table,
          .inverse = inverse},
         host);
}

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.batch << " x " << c.tokens << " x " << c.q_heads << '+' << c.k_heads << " x " << c.head_dim << ", "
                                    << c.rotary_dim << " turned, " << name(c.dtype) << ", table " << name(c.table_dtype) << ", orders "
                                    << static_cast<int>(c.input) << static_cast<int>(c.output) << static_cast<int>(c.table) << ", padding "
                                    << c.padding << ", offset " << c.offset << ", heads outer " << c.heads_outer);
  const int64_t half = c.rotary_dim / 2, columns = c.table == Order::kShared ? half : c.rotary_dim;
  Heads q(c, c.q_heads, false), k(c, c.k_heads, false), q_out(c, c.q_heads, true), k_out(c, c.k_heads, true);
  Heads q_back(c, c.q_heads, true), k_back(c, c.k_heads, true);
  q.matrix.random(1), k.matrix.random(2);
  Matrix cos(c.table_dtype, (c.shared_positions ? 1 : c.batch) * c.tokens, columns, c.padding, c.offset), sin = cos;
  for (int64_t row = 0; row < cos.rows(); ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = 0.7 * static_cast<double>(row + 1) * std::pow(0.9, i % 97);
      for (int64_t which = 0; which < 2; ++which) {
        if (c.table == Order::kComplex) {
          cos.set(row, 2 * i + which, which ? std::sin(angle) : std::cos(angle));
        } else {
          cos.set(row, place(c.table, i, which, half), std::cos(angle)), sin.set(row, place(c.table, i, which, half), std::sin(angle));
        }
      }
    }
  }
  run(c, q, k, q_out, k_out, cos, sin, false, host);
  run(c, q_out, k_out, q_back, k_back, cos, sin, true, host);

  const auto check_side = [&](const Heads& x, const Heads& y, const Heads& back, const char* what) {
    // (value, sum of the sizes of its terms)
    const auto truth = [&](int64_t row, int64_t column) -> std::pair<double, double> {
      auto p = y.position(row, column);
      if (p.d >= c.rotary_dim) return {x.at(p), 0};
      const auto [i, which] = pair_of(c.output, p.d, half);
      const int64_t line = (c.shared_positions ? 0 : p.b * c.tokens) + p.t, at = place(c.table, i, which, half);
      const bool complex = c.table == Order::kComplex;  // sin is NaN then
      p.d = place(c.input, i, which, half);
      const double own = x.at(p) * cos.at(line, complex ? 2 * i : at);
      p.d = place(c.input, i, 1 - which, half);
      const double other = x.at(p) * (complex ? cos.at(line, 2 * i + 1) : sin.at(line, at));
      return {which ? own + other : own - other, std::abs(own) + std::abs(other)};
    };
    const double fp32 = 3 * test::unit_roundoff(DType::kF32);
    expect_near(
        y.matrix, [&](int64_t i, int64_t j) { return truth(i, j).first; }, [&](int64_t i, int64_t j) { return truth(i, j).second * fp32; },
        what);
    // cos^2 + sin^2 is 1 but for the roundings of the table; y was rounded in between.
    const double u = 4 * (test::unit_roundoff(c.table_dtype) + test::unit_roundoff(c.dtype) + test::unit_roundoff(DType::kF32));
    expect_near(
        back.matrix, [&](int64_t i, int64_t j) { return x.at(x.position(i, j)); },
        [&](int64_t i, int64_t j) {
          auto p = x.position(i, j);
          if (p.d >= c.rotary_dim) return 0.;
          const auto [pair, which] = pair_of(c.input, p.d, half);
          const double own = std::abs(x.at(p));
          p.d = place(c.input, pair, 1 - which, half);
          return u * (own + std::abs(x.at(p))) + test::smallest(c.dtype);
        },
        "back");
  };
  check_side(q, q_out, q_back, "q");
  check_side(k, k_out, k_back, "k");
}

TEST(Rope, WidthsAndTypes) {
  for_each_cpu_variant("rope", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const DType table : test::kDTypes) {
        const auto small = [&](int64_t dim, int64_t rotary) {
          check({.batch = 2,
                 .tokens = 3,
                 .q_heads = 3,
                 .k_heads = 1,
                 .head_dim = dim,
                 .rotary_dim = rotary,
                 .dtype = dtype,
                 .table_dtype = table},
                host);
        };
        for (int64_t rotary = 2; rotary <= 70; rotary += 2) small(rotary + rotary % 3, rotary);
        for (const int64_t rotary : {72, 80, 128, 510, 512, 514, 1048}) small(rotary, rotary);
      }
    }
  });
}

TEST(Rope, OrdersOfChannelsAndTable) {
  for_each_cpu_variant("rope", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const Order input : {Order::kHalves, Order::kPairs}) {
        for (const Order output : {Order::kHalves, Order::kPairs}) {
          for (const Order table : {Order::kHalves, Order::kPairs, Order::kShared, Order::kComplex}) {
            for (const int64_t rotary : {2, 8, 30, 34, 64, 520}) {
              check({.batch = 2,
                     .tokens = 3,
                     .q_heads = 2,
                     .k_heads = 2,
                     .head_dim = rotary + 3,
                     .rotary_dim = rotary,
                     .dtype = dtype,
                     .table_dtype = DType::kF32,
                     .input = input,
                     .output = output,
                     .table = table},
                    host);
            }
          }
        }
      }
    }
  });
}

TEST(Rope, StridesMisalignmentAndBatches) {
  for_each_cpu_variant("rope", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t padding : {0, 1, 8}) {
        for (const int64_t offset : {0, 1, 3}) {
          for (const bool outer : {false, true}) {
            check({.batch = 3,
                   .tokens = 40,
                   .q_heads = 4,
                   .k_heads = 1,
                   .head_dim = 36,
                   .rotary_dim = 36,
                   .dtype = dtype,
                   .table_dtype = dtype,
                   .padding = padding,
                   .offset = offset,
                   .heads_outer = outer,
                   .shared_positions = offset == 1},
                  host);
          }
        }
      }
    }
  });
}

TEST(Rope, NothingToDo) {
  for_each_cpu_variant("rope", [](const Host& host) {
    const Case c{.batch = 1,
                 .tokens = 2,
                 .q_heads = 1,
                 .k_heads = 1,
                 .head_dim = 8,
                 .rotary_dim = 8,
                 .dtype = DType::kF32,
                 .table_dtype = DType::kF32};
    for (int64_t Case::*size : {&Case::batch, &Case::tokens, &Case::q_heads, &Case::k_heads}) {
      Case empty = c;
      empty.*size = 0;
      check(empty, host);
    }
  });
}

TEST(Rope, RotaryDimOutsideTheHeadIsAnError) {
  for (const int64_t rotary : {0, 3, 10}) {
    RotateArgs a{};
    a.batch = a.tokens = a.q_heads = a.k_heads = 1, a.head_dim = 8, a.rotary_dim = rotary;
    EXPECT_THROW(rotate(a, cpu_host()), Error);
  }
}

TEST(Rope, ExplainNamesEveryVariantAndThePlan) {
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != "rope") continue;
    const std::string text = info.explain({.shape = {4, 4096, 32, 8, 128}, .dtype = DType::kBF16, .machine = cpu_machine()});
    for (const std::string& variant : info.variants()) EXPECT_NE(text.find('\t' + variant + '\t'), std::string::npos) << text;
    EXPECT_NE(text.find("plan\t"), std::string::npos);
    EXPECT_THROW(info.explain({.shape = {1}, .dtype = DType::kF32, .machine = cpu_machine()}), Error);
    return;
  }
  FAIL() << "rope is not registered";
}

}  // namespace
}  // namespace liger::rope
