// The layers of a Llama, forward and backward, on the library's ops. A layer keeps what its backward needs; temporaries are
// scratch of the host. Matrices are row-major and dense unless a stride is named; rows = batch * tokens.
#pragma once
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>
#include <liger_kernel/ops/fused_add_rms_norm/fused_add_rms_norm.h>
#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>
#include <liger_kernel/ops/rms_norm/rms_norm.h>
#include <liger_kernel/ops/rope/rope.h>
#include <liger_kernel/ops/softmax/softmax.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

#include <cmath>

#include "device.h"
#include "kernels.h"

namespace example {

using liger::DType;

struct Config {
  int64_t vocab = 256, hidden = 128, intermediate = 352, layers = 2, heads = 4, kv_heads = 4;

  int64_t head_dim() const { return hidden / heads; }
  int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim(); }
};

// y [rows, out] = x [rows, in] w^T, w [out, in]
inline void linear(const liger::Host& host, const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t out) {
  host.gemm({.a = x,
             .b = w,
             .c = y,
             .m = rows,
             .n = out,
             .k = in,
             .lda = in,
             .ldb = in,
             .ldc = out,
             .transpose_b = true,
             .in = DType::kF32,
             .out = DType::kF32});
}

// dx = dy w, dw = dy^T x
inline void linear_backward(const liger::Host& host, const float* dy, const float* x, const float* w, float* dx, float* dw, int64_t rows,
                            int64_t in, int64_t out) {
  host.gemm(
      {.a = dy, .b = w, .c = dx, .m = rows, .n = in, .k = out, .lda = out, .ldb = in, .ldc = in, .in = DType::kF32, .out = DType::kF32});
  host.gemm({.a = dy,
             .b = x,
             .c = dw,
             .m = out,
             .n = in,
             .k = rows,
             .lda = out,
             .ldb = in,
             .ldc = in,
             .transpose_a = true,
             .in = DType::kF32,
             .out = DType::kF32});
}

// The residual addition and the norm that follows it: s = x + residual, y = rms_norm(s). The model's first norm has no residual.
class Norm {
 public:
  Norm(const Device& device, int64_t rows, int64_t cols)
      : host_(device.host()),
        rows_(rows),
        cols_(cols),
        sum_(device.buffer<float>(rows * cols)),
        y_(device.buffer<float>(rows * cols)),
        rstd_(device.buffer<float>(rows)) {}

  // The norm's output; s() is what it normalised. Without a residual x must stay until backward.
  const float* forward(const float* x, const float* residual, const float* weight) {
    s_ = residual ? sum_ : x;
    if (residual) {
      liger::fused_add_rms_norm::forward({.x = x,
                                          .residual = residual,
                                          .weight = weight,
                                          .y = y_,
                                          .s = sum_,
                                          .rstd = rstd_,
                                          .rows = rows_,
                                          .cols = cols_,
                                          .x_stride = cols_,
                                          .residual_stride = cols_,
                                          .y_stride = cols_,
                                          .s_stride = cols_,
                                          .dtype = DType::kF32,
                                          .weight_dtype = DType::kF32,
                                          .eps = kEps},
                                         host_);
    } else {
      liger::rms_norm::forward({.x = x,
                                .weight = weight,
                                .y = y_,
                                .rstd = rstd_,
                                .rows = rows_,
                                .cols = cols_,
                                .x_stride = cols_,
                                .y_stride = cols_,
                                .dtype = DType::kF32,
                                .weight_dtype = DType::kF32,
                                .eps = kEps},
                               host_);
    }
    return y_;
  }

  // dx, the gradient of x and of the residual alike, from that of y and that which s has from elsewhere (nullptr: none).
  void backward(const float* dy, const float* ds, const float* weight, float* dx, float* dw) const {
    liger::fused_add_rms_norm::backward({.dy = dy,
                                         .ds = ds,
                                         .s = s_,
                                         .weight = weight,
                                         .rstd = rstd_,
                                         .dx = dx,
                                         .dw = dw,
                                         .rows = rows_,
                                         .cols = cols_,
                                         .dy_stride = cols_,
                                         .ds_stride = cols_,
                                         .s_stride = cols_,
                                         .dx_stride = cols_,
                                         .dtype = DType::kF32,
                                         .weight_dtype = DType::kF32},
                                        host_);
  }

  const float* s() const { return s_; }
  const float* y() const { return y_; }

 private:
  static constexpr float kEps = 1e-6f;
  const liger::Host& host_;
  int64_t rows_, cols_;
  Buffer<float> sum_, y_, rstd_;
  const float* s_ = nullptr;
};

// Causal attention with rotary positions. Query heads share the key and value heads in groups (heads = kv_heads: none share). All
// heads lie side by side in a row, q then k then v, so that a head is a matrix with the row's length as its stride.
class Attention {
 public:
  Attention(const Device& device, const Config& config, int64_t batch, int64_t tokens)
      : device_(device),
        host_(device.host()),
        c_(config),
        batch_(batch),
        tokens_(tokens),
        qkv_(device.buffer<float>(batch * tokens * c_.qkv())),
        turned_(device.buffer<float>(batch * tokens * turned_cols())),
        probs_(device.buffer<float>(batch * c_.heads * tokens * tokens)),
        context_(device.buffer<float>(batch * tokens * c_.hidden)),
        cos_(device.buffer<float>(tokens * c_.head_dim() / 2)),
        sin_(device.buffer<float>(tokens * c_.head_dim() / 2)) {
    std::vector<float> cos, sin;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < c_.head_dim() / 2; ++i) {  // in fp32, as transformers does
        const float frequency = 1 / std::pow(kTheta, static_cast<float>(2 * i) / static_cast<float>(c_.head_dim()));
        cos.push_back(std::cos(static_cast<float>(t) * frequency));
        sin.push_back(std::sin(static_cast<float>(t) * frequency));
      }
    }
    device.upload<float>(cos_, cos);
    device.upload<float>(sin_, sin);
  }

  // y [rows, hidden] from x [rows, hidden]
  void forward(const float* x, const float* w_qkv, const float* w_o, float* y) {
    linear(host_, x, w_qkv, qkv_, rows(), c_.hidden, c_.qkv());
    rotate(qkv_, c_.qkv(), turned_, turned_cols(), false);
    {
      const Buffer<float> scores = device_.buffer<float>(probs_.size);
      for_each_head([&](const Head& h) { product(h.q(turned_), false, h.k(turned_), true, h.matrix(scores), scale(), 0); });
      for_each(host_, batch_ * c_.heads * tokens_, tokens_, CausalMask{scores, tokens_});
      liger::softmax::forward({.x = scores,
                               .y = probs_,
                               .rows = batch_ * c_.heads * tokens_,
                               .cols = tokens_,
                               .x_stride = tokens_,
                               .y_stride = tokens_,
                               .dtype = DType::kF32},
                              host_);
    }
    for_each_head([&](const Head& h) { product(h.matrix(probs_), false, h.v(qkv_), false, h.q(context_, c_.hidden), 1, 0); });
    linear(host_, context_, w_o, y, rows(), c_.hidden, c_.hidden);
  }

  void backward(const float* dy, const float* x, const float* w_qkv, const float* w_o, float* dx, float* dw_qkv, float* dw_o) const {
    const Buffer<float> dcontext = device_.buffer<float>(context_.size), dqkv = device_.buffer<float>(qkv_.size),
                        dturned = device_.buffer<float>(turned_.size), dprobs = device_.buffer<float>(probs_.size),
                        dscores = device_.buffer<float>(probs_.size);
    linear_backward(host_, dy, context_, w_o, dcontext, dw_o, rows(), c_.hidden, c_.hidden);
    // A key or value head sums over the query heads of its group: the first one stores, the others add.
    for_each_head([&](const Head& h) {
      product(h.matrix(probs_), true, h.q(dcontext, c_.hidden), false, h.v(dqkv), 1, h.first ? 0 : 1);
      product(h.q(dcontext, c_.hidden), false, h.v(qkv_), true, h.matrix(dprobs), 1, 0);
    });
    liger::softmax::backward({.dy = dprobs,
                              .y = probs_,
                              .dx = dscores,
                              .rows = batch_ * c_.heads * tokens_,
                              .cols = tokens_,
                              .dy_stride = tokens_,
                              .y_stride = tokens_,
                              .dx_stride = tokens_,
                              .dtype = DType::kF32},
                             host_);
    for_each_head([&](const Head& h) {
      product(h.matrix(dscores), false, h.k(turned_), false, h.q(dturned), scale(), 0);
      product(h.matrix(dscores), true, h.q(turned_), false, h.k(dturned), scale(), h.first ? 0 : 1);
    });
    rotate(dturned, turned_cols(), dqkv, c_.qkv(), true);
    linear_backward(host_, dqkv, x, w_qkv, dx, dw_qkv, rows(), c_.hidden, c_.qkv());
  }

 private:
  struct Matrix {
    float* data;
    int64_t rows, cols, stride;
  };

  // One query head of one sample and where its matrices are.
  struct Head {
    const Attention& a;
    int64_t sample, head;
    bool first;  // of its group

    Matrix q(float* rows, int64_t stride) const { return at(rows, stride, head); }
    Matrix q(const Buffer<float>& rows) const { return q(rows, a.stride(rows)); }
    Matrix k(const Buffer<float>& rows) const { return at(rows, a.stride(rows), a.c_.heads + group()); }
    Matrix v(const Buffer<float>& rows) const { return at(rows, a.stride(rows), a.c_.heads + a.c_.kv_heads + group()); }
    Matrix matrix(float* p) const { return {p + (sample * a.c_.heads + head) * a.tokens_ * a.tokens_, a.tokens_, a.tokens_, a.tokens_}; }

   private:
    int64_t group() const { return head / (a.c_.heads / a.c_.kv_heads); }
    Matrix at(float* rows, int64_t stride, int64_t place) const {
      return {rows + sample * a.tokens_ * stride + place * a.c_.head_dim(), a.tokens_, a.c_.head_dim(), stride};
    }
  };

  // c = alpha op(a) op(b) + beta c
  void product(const Matrix& a, bool transpose_a, const Matrix& b, bool transpose_b, const Matrix& c, float alpha, float beta) const {
    host_.gemm({.a = a.data,
                .b = b.data,
                .c = c.data,
                .m = c.rows,
                .n = c.cols,
                .k = transpose_a ? a.rows : a.cols,
                .lda = a.stride,
                .ldb = b.stride,
                .ldc = c.stride,
                .transpose_a = transpose_a,
                .transpose_b = transpose_b,
                .in = DType::kF32,
                .out = DType::kF32,
                .alpha = alpha,
                .beta = beta});
  }

  // The groups go over the threads of the CPU; on CUDA the products follow one another on the stream.
  template <class F>
  void for_each_head(const F& f) const {
    const int64_t size = c_.heads / c_.kv_heads;
    const auto groups = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * size; i < end * size; ++i) f(Head{*this, i / c_.heads, i % c_.heads, i % size == 0});
    };
    if (host_.machine.backend == liger::Backend::kCuda) return groups(0, batch_ * c_.kv_heads);
    host_.parallel_for(batch_ * c_.kv_heads, 1, groups);
  }

  // q and k at once, from rows of `from_stride` elements to rows of `to_stride`.
  void rotate(const float* from, int64_t from_stride, float* to, int64_t to_stride, bool inverse) const {
    const int64_t d = c_.head_dim(), k = c_.heads * d;
    const liger::rope::Strides in{tokens_ * from_stride, d, from_stride}, out{tokens_ * to_stride, d, to_stride};
    liger::rope::rotate({.q = from,
                         .k = from + k,
                         .cos = cos_,
                         .sin = sin_,
                         .q_out = to,
                         .k_out = to + k,
                         .batch = batch_,
                         .tokens = tokens_,
                         .q_heads = c_.heads,
                         .k_heads = c_.kv_heads,
                         .head_dim = d,
                         .rotary_dim = d,
                         .q_strides = in,
                         .k_strides = in,
                         .q_out_strides = out,
                         .k_out_strides = out,
                         .cos_strides = {0, d / 2},
                         .sin_strides = {0, d / 2},
                         .dtype = DType::kF32,
                         .table_dtype = DType::kF32,
                         .table = liger::rope::Order::kShared,
                         .inverse = inverse},
                        host_);
  }

  int64_t rows() const { return batch_ * tokens_; }
  int64_t turned_cols() const { return (c_.heads + c_.kv_heads) * c_.head_dim(); }
  int64_t stride(const Buffer<float>& b) const { return b.size / rows(); }
  float scale() const { return 1 / std::sqrt(static_cast<float>(c_.head_dim())); }

  static constexpr float kTheta = 10000;
  const Device& device_;
  const liger::Host& host_;
  Config c_;
  int64_t batch_, tokens_;
  Buffer<float> qkv_;        // [rows, (heads + 2 kv_heads) head_dim]
  Buffer<float> turned_;     // [rows, (heads + kv_heads) head_dim], q and k after rope
  Buffer<float> probs_;      // [batch, heads, tokens, tokens]
  Buffer<float> context_;    // [rows, hidden]
  Buffer<float> cos_, sin_;  // [tokens, head_dim / 2]
};

// down(silu(gate(x)) * up(x)); gate and up are one product.
class Mlp {
 public:
  Mlp(const Device& device, const Config& config, int64_t rows)
      : device_(device),
        host_(device.host()),
        rows_(rows),
        hidden_(config.hidden),
        inner_(config.intermediate),
        gate_up_(device.buffer<float>(rows * 2 * inner_)),
        product_(device.buffer<float>(rows * inner_)) {}

  void forward(const float* x, const float* w_gate_up, const float* w_down, float* y) {
    linear(host_, x, w_gate_up, gate_up_, rows_, hidden_, 2 * inner_);
    liger::swiglu::forward({.a = gate_up_,
                            .b = gate_up_ + inner_,
                            .c = product_,
                            .rows = rows_,
                            .cols = inner_,
                            .a_stride = 2 * inner_,
                            .b_stride = 2 * inner_,
                            .c_stride = inner_,
                            .dtype = DType::kF32},
                           host_);
    linear(host_, product_, w_down, y, rows_, inner_, hidden_);
  }

  // The gradients of gate and up take the place of gate and up.
  void backward(const float* dy, const float* x, const float* w_gate_up, const float* w_down, float* dx, float* dw_gate_up,
                float* dw_down) {
    const Buffer<float> dproduct = device_.buffer<float>(product_.size);
    linear_backward(host_, dy, product_, w_down, dproduct, dw_down, rows_, inner_, hidden_);
    liger::swiglu::backward({.dc = dproduct,
                             .a = gate_up_,
                             .b = gate_up_ + inner_,
                             .da = gate_up_,
                             .db = gate_up_ + inner_,
                             .rows = rows_,
                             .cols = inner_,
                             .dc_stride = inner_,
                             .a_stride = 2 * inner_,
                             .b_stride = 2 * inner_,
                             .da_stride = 2 * inner_,
                             .db_stride = 2 * inner_,
                             .dtype = DType::kF32},
                            host_);
    linear_backward(host_, gate_up_, x, w_gate_up, dx, dw_gate_up, rows_, hidden_, 2 * inner_);
  }

 private:
  const Device& device_;
  const liger::Host& host_;
  int64_t rows_, hidden_, inner_;
  Buffer<float> gate_up_, product_;
};

}  // namespace example
