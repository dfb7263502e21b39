// fused_linear_jsd on the CPU against its definition in fp64: the pass over the logits with every variant, dtype, divergence, width of
// tail, stride and misalignment, a larger teacher and a hard loss; then the loop over chunks with ignored rows.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/fused_linear_jsd/fused_linear_jsd.h>

namespace liger::fused_linear_jsd {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kU = 0x1p-24;

// Soft and hard loss of a row and the derivative of their weighted sum, with the sizes that errors are relative to.
struct Row {
  double soft = 0, hard = 0, size = 0;
  std::vector<double> grad, terms;
};

Row row_of(const std::vector<double>& s, const std::vector<double>& t, const Loss& loss, int64_t label) {
  const auto log_softmax = [](std::vector<double> z) {
    double sum = 0;
    for (const double v : z) sum += std::exp(v);
    for (double& v : z) v -= std::log(sum);
    return z;
  };
  Row r;
  std::vector<double> x(t.size()), y = t;
  for (size_t j = 0; j < t.size(); ++j) x[j] = j < s.size() ? s[j] / loss.temperature : 0, y[j] /= loss.temperature;
  for (const double v : x) r.size = std::max(r.size, std::abs(v));
  for (const double v : y) r.size = std::max(r.size, std::abs(v));
  r.size += std::log(static_cast<double>(t.size())) + 1;
  std::vector<double> g(t.size()), terms(t.size());
  if (loss.divergence == Divergence::kCosine) {
    double ss = 0, tt = 0, st = 0;
    for (size_t j = 0; j < t.size(); ++j) ss += x[j] * x[j], tt += y[j] * y[j], st += x[j] * y[j];
    const double norms = std::sqrt(ss * tt), cosine = st / norms;
    r.soft = loss.beta * (1 - cosine);
    for (size_t j = 0; j < t.size(); ++j) {
      g[j] = loss.beta * (cosine * x[j] / ss - y[j] / norms), terms[j] = loss.beta * (std::abs(x[j]) / ss + std::abs(y[j]) / norms);
    }
  } else if (loss.divergence == Divergence::kProbabilities) {
    x = log_softmax(x);
    double total = 0;
    for (size_t j = 0; j < t.size(); ++j) {
      total += t[j];
      if (t[j] > 0) r.soft += t[j] * (std::log(std::max<double>(t[j], loss.eps)) - x[j]);
    }
    for (size_t j = 0; j < t.size(); ++j) g[j] = std::exp(x[j]) * total - t[j], terms[j] = std::exp(x[j]) * total + t[j];
  } else {
    x = log_softmax(x), y = log_softmax(y);
    double sum = 0;
    for (size_t j = 0; j < t.size(); ++j) {
      const double q = std::exp(x[j]), p = std::exp(y[j]), d = y[j] - x[j], b = x[j] - std::log(loss.beta * p + (1 - loss.beta) * q);
      r.soft += loss.beta == 0 ? p * d : loss.beta == 1 ? -q * d : loss.beta * p * (b + d) + (1 - loss.beta) * q * b;
      g[j] = loss.beta == 0 ? -p : loss.beta == 1 ? -q * d + q : (1 - loss.beta) * q * b;
      sum += g[j], terms[j] = (p + q) * (2 + std::abs(d));
    }
    for (size_t j = 0; j < t.size(); ++j) g[j] -= std::exp(x[j]) * sum;
  }
  const std::vector<double> plain = log_softmax(s);
  r.hard = -plain[label];
  for (size_t j = 0; j < s.size(); ++j) {
    const double hard = std::exp(plain[j]) - (static_cast<int64_t>(j) == label ? 1 : 0);
    r.grad.push_back(loss.soft_scale * g[j] / loss.temperature + loss.hard_scale * hard);
    r.terms.push_back(loss.soft_scale * terms[j] / loss.temperature + loss.hard_scale * (std::exp(plain[j]) + std::abs(hard)));
  }
  return r;
}

struct Case {
  int64_t rows, vocab, more = 0;    // entries of the teacher beyond the student's
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
};

void check(const Case& c, const Loss& loss, DType dtype, DType teacher_dtype, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.vocab << " + " << c.more << ' ' << name(dtype) << ' ' << name(teacher_dtype)
                                    << ", divergence " << static_cast<int>(loss.divergence) << ", beta " << loss.beta << ", temperature "
                                    << loss.temperature << ", padding " << c.padding << ", offset " << c.offset);
  const bool probabilities = loss.divergence == Divergence::kProbabilities;
  Matrix student = Matrix::output(dtype, c.rows, c.vocab, c.padding, c.offset);
  Matrix teacher(teacher_dtype, c.rows, c.vocab + c.more, c.padding + 1, c.offset);
  student.random(1, 3), teacher.random(2, 3);
  if (probabilities) {
    for (int64_t i = 0; i < c.rows; ++i) {
      for (int64_t j = 0; j < c.vocab; ++j) teacher.set(i, j, j % 5 == 2 ? 0 : std::abs(teacher.at(i, j)) / static_cast<double>(c.vocab));
    }
  }
  const Matrix before = student;
  std::vector<int64_t> target(2 * c.rows, -7), row(c.rows);  // every second one is the label
  for (int64_t i = 0; i < c.rows; ++i) target[2 * i] = i % 4 == 1 ? -100 : (i * 7919 + c.vocab / 2) % c.vocab, row[i] = c.rows - 1 - i;
  Matrix soft = Matrix::output(DType::kF32, 1, c.rows), hard = soft;
  const LabelStats stats{0.25f, 0, 0, 0, 0, 0};
  divergence({.student = student.data(),
              .teacher = teacher.data(),
              .teacher_row = probabilities ? row.data() : nullptr,
              .target = target.data(),
              .stats = &stats,
              .soft = soft.data<float>(),
              .hard = hard.data<float>(),
              .rows = c.rows,
              .vocab = c.vocab,
              .teacher_vocab = c.vocab + c.more,
              .student_stride = student.stride(),
              .teacher_stride = teacher.stride(),
              .target_stride = 2,
              .dtype = dtype,
              .teacher_dtype = teacher_dtype,
              .ignore_index = -100,
              .loss = loss,
              .gradient = true},
             host);
  std::vector<Row> rows(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    if (target[2 * i] == -100) {
      rows[i].grad.resize(c.vocab), rows[i].terms.resize(c.vocab);
      continue;
    }
    std::vector<double> s, t;
    for (int64_t j = 0; j < c.vocab; ++j) s.push_back(before.at(i, j));
    for (int64_t j = 0; j < c.vocab + c.more; ++j) t.push_back(teacher.at(probabilities ? row[i] : i, j));
    rows[i] = row_of(s, t, loss, target[2 * i]);
  }
  const auto size = [&](int64_t i) { return 64 * kU * rows[i].size * (1 + rows[i].size); };
  expect_near(
      soft, [&](int64_t, int64_t i) { return rows[i].soft; }, [&](int64_t, int64_t i) { return size(i); }, "soft");
  expect_near(
      hard, [&](int64_t, int64_t i) { return rows[i].hard; }, [&](int64_t, int64_t i) { return size(i); }, "hard");
  expect_near(
      student, [&](int64_t i, int64_t j) { return rows[i].grad[j] / 4; },
      [&](int64_t i, int64_t j) { return size(i) * rows[i].terms[j] / 4 + 1e-37; }, "gradient");
}

TEST(FusedLinearJsd, EveryVariantOfThePass) {
  for_each_cpu_variant("fused_linear_jsd", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t vocab : {1, 7, 16, 33, 2047, 2049}) {
        const Case c{5, vocab, vocab == 7 ? 3 : vocab == 2047 ? 40 : 0, vocab % 3, vocab % 2};
        for (const float beta : {0.f, 0.3f, 1.f}) {
          check(c, {.beta = beta, .temperature = 2, .soft_scale = 0.7f, .hard_scale = 0.5f}, dtype, dtype, host);
        }
        check(c, {.beta = 0.5f, .soft_scale = 1, .hard_scale = 1}, dtype, dtype, host);
        check(c, {.divergence = Divergence::kCosine, .beta = 1.5f, .temperature = 2, .hard_scale = 0.5f}, dtype, dtype, host);
        for (const DType other : test::kDTypes) {
          check({5, vocab, 0, vocab % 3, vocab % 2}, {.divergence = Divergence::kProbabilities, .temperature = 2}, dtype, other, host);
        }
      }
    }
  });
}

// dx and dw of a call are those of its rows that count, whatever the chunks; ignored rows get 0.
TEST(FusedLinearJsd, ChunksAndIgnoredRows) {
  const StandaloneHost host(cpu_machine(), nullptr, 2);
  constexpr int64_t kRows = 230, kHidden = 9, kVocab = 33;
  Matrix x(DType::kF32, kRows, kHidden), w(DType::kF32, kVocab, kHidden), t(DType::kF32, kRows, kHidden), tw(DType::kF32, kVocab, kHidden);
  x.random(1), w.random(2), t.random(3), tw.random(4);
  std::vector<int64_t> target(kRows);
  int64_t valid = 0;
  for (int64_t i = 0; i < kRows; ++i) target[i] = i % 3 == 1 ? -100 : i % kVocab, valid += target[i] >= 0;
  const LabelStats stats{1.f / static_cast<float>(valid), 0, 0, 0, 0, 0};
  std::vector<Matrix> dx(3, Matrix::output(DType::kF32, kRows, kHidden)), dw(3, Matrix::output(DType::kF32, kVocab, kHidden));
  std::vector<Matrix> soft(3, Matrix::output(DType::kF32, 1, kRows));
  for (int k = 0; k < 3; ++k) {
    ForwardArgs args{};
    args.student = {x.data(), w.data(), nullptr, kHidden, kVocab, x.stride(), w.stride()};
    args.teacher = {t.data(), tw.data(), nullptr, kHidden, kVocab, t.stride(), tw.stride()};
    args.target = target.data(), args.stats = &stats, args.soft = soft[k].data<float>();
    args.dx = dx[k].data(), args.dw = dw[k].data(), args.rows = kRows, args.target_stride = 1;
    args.valid_rows = k == 0 ? -1 : valid, args.logits_bytes = k == 2 ? 1 : 0;
    forward(args, host);
  }
  for (int k = 1; k < 3; ++k) {
    const auto near = [&](const Matrix& a, const Matrix& b, const char* what) {
      expect_near(
          a, [&](int64_t i, int64_t j) { return b.at(i, j); }, [](int64_t, int64_t) { return 1e-6; }, what);
    };
    near(dx[k], dx[0], "dx"), near(dw[k], dw[0], "dw"), near(soft[k], soft[0], "soft");
  }
  EXPECT_EQ(dx[1].at(1, 0), 0);
  EXPECT_EQ(soft[1].at(0, 1), 0);
}

TEST(FusedLinearJsd, Refuses) {
  const StandaloneHost host(cpu_machine(), nullptr, 1);
  DivergenceArgs args{};
  args.vocab = 8, args.teacher_vocab = 7;
  EXPECT_THROW(divergence(args, host), Error);
  args.teacher_vocab = 8, args.loss.temperature = 0;
  EXPECT_THROW(divergence(args, host), Error);
  args.loss.temperature = 1, args.loss.beta = 2;
  EXPECT_THROW(divergence(args, host), Error);
}

}  // namespace
}  // namespace liger::fused_linear_jsd
