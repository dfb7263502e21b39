// A Llama: where its weights lie, a training step, AdamW.
#pragma once
#include <random>

#include "layers.h"

namespace example {

// The parts of one flat buffer, in the order of the weights file. Weights, gradients and AdamW's two moments have the same parts.
struct Parts {
  struct Layer {
    float* norm1;    // [hidden]
    float* qkv;      // [(heads + 2 kv_heads) head_dim, hidden]
    float* o;        // [hidden, hidden]
    float* norm2;    // [hidden]
    float* gate_up;  // [2 intermediate, hidden]
    float* down;     // [hidden, intermediate]
  };
  float* embedding;  // [vocab, hidden]
  std::vector<Layer> layers;
  float* norm;  // [hidden]
  float* head;  // [vocab, hidden]
  int64_t size = 0;

  explicit Parts(const Config& c, float* start = nullptr) {
    const auto take = [&](int64_t rows) {
      float* p = start ? start + size : nullptr;
      size += rows * c.hidden;
      return p;
    };
    embedding = take(c.vocab);
    for (int64_t i = 0; i < c.layers; ++i) {
      Layer l{};
      l.norm1 = take(1), l.qkv = take(c.qkv()), l.o = take(c.hidden);
      l.norm2 = take(1), l.gate_up = take(2 * c.intermediate), l.down = take(c.intermediate);
      layers.push_back(l);
    }
    norm = take(1);
    head = take(c.vocab);
  }
};

// Normal with deviation 0.02; norms start at one.
inline std::vector<float> random_weights(const Config& config, uint64_t seed) {
  std::vector<float> w(Parts(config).size);
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  for (float& x : w) x = normal(generator);
  const Parts parts(config, w.data());
  const auto ones = [&](float* p) { std::fill(p, p + config.hidden, 1.f); };
  for (const Parts::Layer& layer : parts.layers) ones(layer.norm1), ones(layer.norm2);
  ones(parts.norm);
  return w;
}

// Tokens and the tokens that follow them, both [batch, tokens].
struct Batch {
  std::vector<int32_t> inputs;
  std::vector<int64_t> targets;
};

struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, decay = 0.01;
};

class Model {
 public:
  Model(const Device& device, const Config& config, const std::vector<float>& weights, int64_t batch, int64_t tokens)
      : device_(device),
        host_(device.host()),
        c_(config),
        rows_(batch * tokens),
        weights_(device.buffer<float>(weights.size())),
        gradients_(device.buffer<float>(weights.size())),
        m_(device.buffer<float>(weights.size())),
        v_(device.buffer<float>(weights.size())),
        w_(config, weights_),
        d_(config, gradients_),
        inputs_(device.buffer<int32_t>(rows_)),
        order_(device.buffer<int32_t>(rows_)),
        first_(device.buffer<int32_t>(config.vocab + 1)),
        targets_(device.buffer<int64_t>(rows_)),
        embedded_(device.buffer<float>(rows_ * config.hidden)),
        branch_(device.buffer<float>(rows_ * config.hidden)),
        dstream_{device.buffer<float>(rows_ * config.hidden), device.buffer<float>(rows_ * config.hidden)},
        dnormed_(device.buffer<float>(rows_ * config.hidden)),
        row_loss_(device.buffer<float>(rows_)),
        loss_(device.buffer<float>(1)),
        stats_(device.buffer<liger::cross_entropy::LabelStats>(1)) {
    LIGER_CHECK(w_.size == static_cast<int64_t>(weights.size()), "a model of these sizes has ", w_.size, " weights, not ", weights.size());
    device.upload<float>(weights_, weights);
    const std::vector<float> zeros(weights.size());
    device.upload<float>(m_, zeros);
    device.upload<float>(v_, zeros);
    norms_.emplace_back(device, rows_, config.hidden);
    for (int64_t i = 0; i < config.layers; ++i) {
      attention_.emplace_back(device, config, batch, tokens);
      norms_.emplace_back(device, rows_, config.hidden);
      mlp_.emplace_back(device, config, rows_);
      norms_.emplace_back(device, rows_, config.hidden);
    }
  }

  // The mean loss of the batch; every gradient is written.
  float forward_backward(const Batch& batch) {
    load(batch);
    forward();
    loss();
    backward();
    return device_.download<float>(loss_, 1)[0];
  }

  void update(const AdamWOptions& o) {
    ++step_;
    const double rest1 = 1 - std::pow(o.beta1, step_), rest2 = 1 - std::pow(o.beta2, step_);
    for_each(host_, w_.size / c_.hidden, c_.hidden,
             AdamW{.w = weights_,
                   .g = gradients_,
                   .m = m_,
                   .v = v_,
                   .cols = c_.hidden,
                   .keep = static_cast<float>(1 - o.lr * o.decay),
                   .beta1_rest = static_cast<float>(1 - o.beta1),
                   .beta2 = static_cast<float>(o.beta2),
                   .beta2_rest = static_cast<float>(1 - o.beta2),
                   .step = static_cast<float>(o.lr / rest1),
                   .inverse_root = static_cast<float>(1 / std::sqrt(rest2)),
                   .eps = static_cast<float>(o.eps)});
  }

  std::vector<float> weights() const { return device_.download<float>(weights_, w_.size); }

 private:
  // The batch, and the rows in the order of their tokens for the embedding's gradient.
  void load(const Batch& batch) {
    std::vector<int32_t> first(c_.vocab + 1), order(rows_);
    for (const int32_t token : batch.inputs) ++first[token + 1];
    for (int64_t v = 0; v < c_.vocab; ++v) first[v + 1] += first[v];
    std::vector<int32_t> next = first;
    for (int64_t row = 0; row < rows_; ++row) order[next[batch.inputs[row]]++] = static_cast<int32_t>(row);
    device_.upload<int32_t>(inputs_, batch.inputs);
    device_.upload<int64_t>(targets_, batch.targets);
    device_.upload<int32_t>(first_, first);
    device_.upload<int32_t>(order_, order);
  }

  // The residual stream is the norms' s(): each norm adds the branch before it. Layer i has norms 2 i and 2 i + 1; the norm that
  // ends a layer is the next layer's first, and the last one is the model's.
  void forward() {
    for_each(host_, rows_, c_.hidden, Embed{inputs_, w_.embedding, embedded_, c_.hidden});
    norms_[0].forward(embedded_, nullptr, norm_weight(w_, 0));
    for (int64_t i = 0; i < c_.layers; ++i) {
      const Parts::Layer& w = w_.layers[i];
      Norm &before = norms_[2 * i], &middle = norms_[2 * i + 1], &after = norms_[2 * i + 2];
      attention_[i].forward(before.y(), w.qkv, w.o, branch_);
      middle.forward(branch_, before.s(), w.norm2);
      mlp_[i].forward(middle.y(), w.gate_up, w.down, branch_);
      after.forward(branch_, middle.s(), norm_weight(w_, i + 1));
    }
  }

  // The logits never exist as a whole: the library goes through chunks of rows and forms both gradients with the loss.
  void loss() {
    liger::cross_entropy::label_stats(
        {.target = targets_, .class_weight = nullptr, .stats = stats_, .rows = rows_, .vocab = c_.vocab, .target_stride = 1}, host_);
    liger::fused_linear_cross_entropy::forward({.x = norms_.back().y(),
                                                .weight = w_.head,
                                                .bias = nullptr,
                                                .target = targets_,
                                                .class_weight = nullptr,
                                                .stats = stats_,
                                                .row_scale = nullptr,
                                                .loss = row_loss_,
                                                .z_loss = nullptr,
                                                .hit = nullptr,
                                                .prediction = nullptr,
                                                .dx = dnormed_,
                                                .dw = d_.head,
                                                .db = nullptr,
                                                .rows = rows_,
                                                .hidden = c_.hidden,
                                                .vocab = c_.vocab,
                                                .x_stride = c_.hidden,
                                                .weight_stride = c_.hidden,
                                                .target_stride = 1,
                                                .dtype = DType::kF32,
                                                .dw_result = DType::kF32,
                                                .valid_rows = rows_},
                                               host_);
    liger::cross_entropy::totals({.loss = row_loss_,
                                  .z_loss = nullptr,
                                  .hit = nullptr,
                                  .stats = stats_,
                                  .total = loss_,
                                  .z_total = nullptr,
                                  .accuracy = nullptr,
                                  .rows = rows_,
                                  .dtype = DType::kF32},
                                 host_);
  }

  // dnormed_ holds the gradient of the last norm's output, then of each branch's input.
  void backward() {
    const float* dstream = nullptr;  // of the stream behind the norm at hand; nothing follows the last one
    for (int64_t i = c_.layers - 1; i >= 0; --i) {
      const Parts::Layer &w = w_.layers[i], &d = d_.layers[i];
      const Norm &before = norms_[2 * i], &middle = norms_[2 * i + 1], &after = norms_[2 * i + 2];
      after.backward(dnormed_, dstream, norm_weight(w_, i + 1), dstream_[0], norm_weight(d_, i + 1));
      mlp_[i].backward(dstream_[0], middle.y(), w.gate_up, w.down, dnormed_, d.gate_up, d.down);
      middle.backward(dnormed_, dstream_[0], w.norm2, dstream_[1], d.norm2);
      attention_[i].backward(dstream_[1], before.y(), w.qkv, w.o, dnormed_, d.qkv, d.o);
      dstream = dstream_[1];
    }
    norms_[0].backward(dnormed_, dstream, norm_weight(w_, 0), dstream_[0], norm_weight(d_, 0));
    for_each(host_, c_.vocab, c_.hidden, EmbedBackward{order_, first_, dstream_[0], d_.embedding, c_.hidden});
  }

  // Of the norm before layer i; i = layers: the last one.
  float* norm_weight(const Parts& parts, int64_t i) const { return i < c_.layers ? parts.layers[i].norm1 : parts.norm; }

  const Device& device_;
  const liger::Host& host_;
  Config c_;
  int64_t rows_;
  int64_t step_ = 0;
  Buffer<float> weights_, gradients_, m_, v_;
  Parts w_, d_;
  Buffer<int32_t> inputs_, order_, first_;
  Buffer<int64_t> targets_;
  Buffer<float> embedded_, branch_, dstream_[2], dnormed_, row_loss_, loss_;
  Buffer<liger::cross_entropy::LabelStats> stats_;
  std::vector<Norm> norms_;
  std::vector<Attention> attention_;
  std::vector<Mlp> mlp_;
};

}  // namespace example
