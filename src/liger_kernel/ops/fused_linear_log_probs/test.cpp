// fused_linear_log_probs on the CPU against its definition in fp64: every variant, dtype, width of tail, stride, misalignment and
// transform of the row passes, cut into tiles; then the loops over tiles and chunks.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/ops/fused_linear_log_probs/fused_linear_log_probs.h>

namespace liger::fused_linear_log_probs {
namespace {

using test::expect_near;
using test::for_each_cpu_variant;
using test::Matrix;

constexpr double kU = 0x1p-24;

struct Case {
  int64_t rows, vocab;
  DType dtype;
  int64_t tile = 0;                 // columns; 0: all
  int64_t padding = 0, offset = 0;  // elements between rows, and in front of the first
  Transform transform = {};
  bool beside = false;  // the gradient is not written over the logits
};

struct Row {
  double lse, entropy, size, slope_scale;
  std::vector<double> z, slope;
};

Row row_of(const Case& c, const Matrix& logits, int64_t i) {
  Row r{};
  const Transform& t = c.transform;
  double sum = 0, weighted = 0;
  for (int64_t j = 0; j < c.vocab; ++j) {
    const double v = logits.at(i, j) * t.logit_scale, s = t.softcap > 0 ? std::tanh(v / t.softcap) : 0;
    r.z.push_back((t.softcap > 0 ? t.softcap * s : v) / t.temperature);
    r.slope.push_back((1 - s * s) * t.logit_scale / t.temperature);
    r.size = std::max(r.size, std::abs(r.z.back()));
  }
  for (const double z : r.z) sum += std::exp(z);
  r.lse = std::log(sum);
  for (const double z : r.z) weighted += std::exp(z - r.lse) * (z - r.lse);
  r.entropy = -weighted;
  r.slope_scale = t.logit_scale / t.temperature;
  r.size += std::log(static_cast<double>(c.vocab)) + 1;
  return r;
}

void check(const Case& c, const Host& host) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.vocab << ' ' << name(c.dtype) << ", tile " << c.tile << ", padding "
                                    << c.padding << ", offset " << c.offset << ", softcap " << c.transform.softcap);
  const int64_t tile = c.tile ? c.tile : c.vocab;
  Matrix logits = Matrix::output(c.dtype, c.rows, c.vocab, c.padding, c.offset);
  logits.random(1, 3);
  const Matrix before = logits;
  Matrix grad = Matrix::output(c.dtype, c.rows, c.vocab, c.padding + 1, c.offset + 2);
  Matrix& written = c.beside ? grad : logits;
  std::vector<int64_t> target(2 * c.rows, -7);  // every second one is the label
  for (int64_t i = 0; i < c.rows; ++i) target[2 * i] = i % 4 == 1 ? -100 : (i * 7919 + c.vocab / 2) % c.vocab;
  std::vector<Matrix> out(4, Matrix::output(DType::kF32, 1, c.rows)), up(3, Matrix(DType::kF32, 1, c.rows));
  for (uint32_t k = 0; k < 3; ++k) up[k].random(10 + k);
  std::vector<int64_t> prediction(c.rows, -7);
  std::vector<RowState> state(c.rows);
  const Results results{.logp = out[0].data<float>(),
                        .largest = out[1].data<float>(),
                        .log_sum = out[2].data<float>(),
                        .entropy = out[3].data<float>(),
                        .prediction = prediction.data()};
  const auto at = [&](Matrix& m, int64_t first) { return static_cast<char*>(m.data()) + first * size_of(c.dtype); };
  for (int64_t first = 0; first < c.vocab; first += tile) {
    statistics({.logits = at(logits, first),
                .target = target.data(),
                .state = state.data(),
                .results = results,
                .rows = c.rows,
                .cols = std::min(tile, c.vocab - first),
                .first = first,
                .vocab = c.vocab,
                .logits_stride = logits.stride(),
                .target_stride = 2,
                .dtype = c.dtype,
                .ignore_index = -100,
                .transform = c.transform},
               host);
  }
  for (int64_t first = 0; first < c.vocab; first += tile) {
    gradient({.logits = at(logits, first),
              .grad = at(written, first),
              .target = target.data(),
              .saved = {.logp = results.logp, .largest = results.largest, .log_sum = results.log_sum, .entropy = results.entropy},
              .upstream = {.logp = up[0].data<float>(), .entropy = up[1].data<float>(), .lse = up[2].data<float>()},
              .rows = c.rows,
              .cols = std::min(tile, c.vocab - first),
              .first = first,
              .vocab = c.vocab,
              .logits_stride = logits.stride(),
              .grad_stride = written.stride(),
              .target_stride = 2,
              .dtype = c.dtype,
              .ignore_index = -100,
              .transform = c.transform},
             host);
  }

  std::vector<double> logps(c.rows), entropies(c.rows), sizes(c.rows), grads(c.rows * c.vocab), bounds(c.rows * c.vocab);
  for (int64_t i = 0; i < c.rows; ++i) {
    const int64_t y = target[2 * i];
    if (y == -100) {
      EXPECT_EQ(prediction[i], -1);
      continue;
    }
    const Row r = row_of(c, before, i);
    logps[i] = r.z[y] - r.lse, entropies[i] = r.entropy, sizes[i] = r.size;
    EXPECT_NEAR(out[1].at(0, i) + out[2].at(0, i), r.lse, 16 * kU * r.size);
    for (int64_t j = 0; j < c.vocab; ++j) {
      const double log_p = r.z[j] - r.lse, p = std::exp(log_p), hot = j == y ? 1 : 0;
      const double d_logp = up[0].at(0, i) * (hot - p), d_lse = up[2].at(0, i) * p, lean = -p * (log_p + r.entropy) * up[1].at(0, i);
      grads[i * c.vocab + j] = (d_logp + d_lse + lean) * r.slope[j];
      const double size = std::abs(d_logp) + std::abs(d_lse) + std::abs(up[1].at(0, i)) * p * (r.size + r.entropy);
      bounds[i * c.vocab + j] = size * kU * ((64 + 8 * r.size) * r.slope[j] + 16 * std::abs(r.slope_scale)) + 1e-37;
      EXPECT_LE(before.at(i, j), before.at(i, prediction[i]) + (c.transform.softcap > 0 ? 1e-2 : 0));
    }
  }
  expect_near(
      out[0], [&](int64_t, int64_t i) { return logps[i]; }, [&](int64_t, int64_t i) { return 32 * kU * sizes[i]; }, "logp");
  expect_near(
      out[3], [&](int64_t, int64_t i) { return entropies[i]; }, [&](int64_t, int64_t i) { return 64 * kU * sizes[i] * (1 + entropies[i]); },
      "entropy");
  expect_near(
      written, [&](int64_t i, int64_t j) { return grads[i * c.vocab + j]; }, [&](int64_t i, int64_t j) { return bounds[i * c.vocab + j]; },
      "dz");
}

TEST(FusedLinearLogProbs, WidthsAndTypes) {
  for_each_cpu_variant("fused_linear_log_probs", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (int64_t vocab = 1; vocab <= 34; ++vocab) check({.rows = 5, .vocab = vocab, .dtype = dtype}, host);
      for (const int64_t vocab : {127, 2047, 2048, 2049, 5003}) check({.rows = 5, .vocab = vocab, .dtype = dtype}, host);
    }
  });
}

TEST(FusedLinearLogProbs, TilesLayoutsAndTransforms) {
  for_each_cpu_variant("fused_linear_log_probs", [](const Host& host) {
    for (const DType dtype : test::kDTypes) {
      for (const int64_t tile : {1, 7, 64, 2500}) check({.rows = 5, .vocab = 301, .dtype = dtype, .tile = tile}, host);
      check({.rows = 9, .vocab = 5003, .dtype = dtype, .tile = 2100, .padding = 3, .offset = 1}, host);
      check({.rows = 4, .vocab = 99, .dtype = dtype, .transform = {.temperature = 0.7f}}, host);
      check({.rows = 7, .vocab = 301, .dtype = dtype, .padding = 2, .transform = {.temperature = 0.9f}, .beside = true}, host);
      check({.rows = 4, .vocab = 512, .dtype = dtype, .tile = 128, .beside = true}, host);
      check({.rows = 4, .vocab = 99, .dtype = dtype, .tile = 40, .transform = {.softcap = 5, .logit_scale = 0.5f, .temperature = 2}}, host);
    }
  });
}

// x weight^T through both loops: the same results, and gradients that agree.
TEST(FusedLinearLogProbs, TilesAndChunks) {
  for_each_cpu_variant("fused_linear_log_probs", [](const Host& host) {
    const int64_t rows = 70, hidden = 12, vocab = 2600;
    Matrix x(DType::kF32, rows, hidden), weight(DType::kF32, vocab, hidden), bias(DType::kF32, 1, vocab), up(DType::kF32, 1, rows);
    x.random(1), weight.random(2), bias.random(3), up.random(4);
    std::vector<int64_t> target(rows);
    for (int64_t i = 0; i < rows; ++i) target[i] = i % 5 == 0 ? -100 : i * 37;
    const Problem problem{.x = x.data(),
                          .weight = weight.data(),
                          .bias = bias.data(),
                          .target = target.data(),
                          .rows = rows,
                          .hidden = hidden,
                          .vocab = vocab,
                          .x_stride = x.stride(),
                          .weight_stride = weight.stride(),
                          .target_stride = 1,
                          .dtype = DType::kF32,
                          .logits_bytes = 1};
    std::vector<Matrix> first, second;
    for (std::vector<Matrix>* m : {&first, &second}) {
      for (int k = 0; k < 4; ++k) m->push_back(Matrix::output(DType::kF32, 1, rows));
      m->push_back(Matrix::output(DType::kF32, rows, hidden)), m->push_back(Matrix::output(DType::kF32, vocab, hidden));
      m->push_back(Matrix::output(DType::kF32, 1, vocab));
    }
    const auto results = [](std::vector<Matrix>& m) {
      return Results{m[0].data<float>(), m[1].data<float>(), m[2].data<float>(), m[3].data<float>(), nullptr};
    };
    const auto saved = [](std::vector<Matrix>& m) {
      return SavedResults{m[0].data<float>(), m[1].data<float>(), m[2].data<float>(), m[3].data<float>()};
    };
    const auto gradients = [](std::vector<Matrix>& m) {
      return Gradients{.dx = m[4].data<float>(), .dw = m[5].data(), .db = m[6].data<float>(), .dw_dtype = DType::kF32};
    };
    const Upstream upstream{.logp = up.data<float>(), .entropy = up.data<float>(), .lse = nullptr};
    forward(problem, results(first), host);
    backward(problem, saved(first), upstream, gradients(first), host);
    const Scratch logits = host.scratch(chunk_bytes(problem, host.machine));
    chunk_forward(problem, logits.data, results(second), host);
    chunk_backward(problem, logits.data, saved(second), upstream, gradients(second), host);
    const double scale[] = {20, 20, 20, 20, 100, 100, 100};
    for (size_t k = 0; k < first.size(); ++k) {
      expect_near(
          first[k], [&](int64_t i, int64_t j) { return second[k].at(i, j); }, [&](int64_t, int64_t) { return 64 * kU * scale[k]; },
          "result");
    }
    chunk_forward(problem, logits.data, results(second), host);
    Gradients more = gradients(second);
    more.add_to_sums = true;
    chunk_backward(problem, logits.data, saved(second), upstream, more, host);
    expect_near(
        second[5], [&](int64_t i, int64_t j) { return 2 * first[5].at(i, j); }, [&](int64_t, int64_t) { return 64 * kU * 200; }, "dw");
  });
}

}  // namespace
}  // namespace liger::fused_linear_log_probs
