// What the model needs and the library does not have: looking up embeddings, the causal mask, AdamW. Each is a struct whose call
// operator computes one element (row, column) of a matrix; for_each runs it over the threads of the CPU or as a CUDA kernel.
#pragma once
#include <liger_kernel/core/host.h>

#include <cmath>

#ifdef __CUDACC__
#define EXAMPLE_DEVICE __host__ __device__
#else
#define EXAMPLE_DEVICE
#endif

namespace example {

// out[row] = table[token[row]]
struct Embed {
  const int32_t* token;  // [rows]
  const float* table;    // [vocab, cols]
  float* out;            // [rows, cols]
  int64_t cols;
  EXAMPLE_DEVICE void operator()(int64_t row, int64_t col) const { out[row * cols + col] = table[token[row] * cols + col]; }
};

// dtable[v] = sum of dout over the rows whose token is v, in their order: no atomics, the same sum every time. Those rows are
// rows[first[v]] to rows[first[v + 1] - 1].
struct EmbedBackward {
  const int32_t* rows;   // [rows]
  const int32_t* first;  // [vocab + 1]
  const float* dout;     // [rows, cols]
  float* dtable;         // [vocab, cols]
  int64_t cols;
  EXAMPLE_DEVICE void operator()(int64_t v, int64_t col) const {
    float sum = 0;
    for (int32_t i = first[v]; i < first[v + 1]; ++i) sum += dout[rows[i] * cols + col];
    dtable[v * cols + col] = sum;
  }
};

// No token sees a later one: scores[.., row, col] = -inf for col > row.
struct CausalMask {
  float* scores;  // [matrices * tokens, tokens]
  int64_t tokens;
  EXAMPLE_DEVICE void operator()(int64_t row, int64_t col) const {
    if (col > row % tokens) scores[row * tokens + col] = -INFINITY;
  }
};

// AdamW (Loshchilov & Hutter 2019), as torch.optim.AdamW:
//   w *= 1 - lr decay      m += (1 - beta1) (g - m)      v = beta2 v + (1 - beta2) g^2
//   w -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
struct AdamW {
  float* w;  // [rows, cols], as are g, m and v
  const float* g;
  float *m, *v;
  int64_t cols;
  float keep;                           // 1 - lr decay
  float beta1_rest, beta2, beta2_rest;  // 1 - beta1, beta2, 1 - beta2
  float step, inverse_root;             // lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
  float eps;
  EXAMPLE_DEVICE void operator()(int64_t row, int64_t col) const {
    const int64_t i = row * cols + col;
    m[i] += beta1_rest * (g[i] - m[i]);
    v[i] = beta2 * v[i] + beta2_rest * g[i] * g[i];
    w[i] = keep * w[i] - step * m[i] / (sqrtf(v[i]) * inverse_root + eps);
  }
};

// In kernels.cu.
template <class F>
void for_each_cuda(const liger::Host& host, int64_t rows, int64_t cols, const F& f);

// f(row, col) for all of [rows, cols], in any order.
template <class F>
void for_each(const liger::Host& host, int64_t rows, int64_t cols, const F& f) {
#ifdef LIGER_HAS_CUDA
  if (host.machine.backend == liger::Backend::kCuda) return for_each_cuda(host, rows, cols, f);
#endif
  host.parallel_for(rows, liger::grain_for(cols * sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < cols; ++col) f(row, col);
    }
  });
}

}  // namespace example
