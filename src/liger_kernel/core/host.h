// All that the core needs from its host. The core allocates nothing, creates no stream and owns no thread: inside PyTorch
// these calls are PyTorch's (core/torch/host.cpp), standalone they are OpenMP, BLAS and cuBLASLt (core/standalone.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include <liger_kernel/core/device.h>
#include <liger_kernel/core/dtype.h>

namespace liger {

// A borrowed callable void(begin, end); it does not outlive the call it is passed to.
class RangeBody {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, RangeBody>) RangeBody(const F& f)
      : context_(&f), call_([](const void* c, int64_t begin, int64_t end) { (*static_cast<const F*>(c))(begin, end); }) {}
  void operator()(int64_t begin, int64_t end) const { call_(context_, begin, end); }

 private:
  const void* context_;
  void (*call_)(const void*, int64_t, int64_t);
};

// Memory that is given back (in stream order on CUDA) when the owner goes.
struct Scratch {
  std::shared_ptr<void> owner;
  void* data = nullptr;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Row-major c[m, n] = alpha * op(a)[m, k] * op(b)[k, n] + beta * c, op = transpose if asked; fp32 accumulation.
// Leading dimensions are the row strides, in elements, of the stored (untransposed) matrices.
struct Gemm {
  const void* a;
  const void* b;
  void* c;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
  bool transpose_a = false, transpose_b = false;
  DType in, out;
  float alpha = 1, beta = 0;
};

class Host {
 public:
  explicit Host(Machine machine, void* stream = nullptr) : machine(machine), stream(stream) {}
  virtual ~Host() = default;

  // CPU: splits [0, n) over the threads; a thread gets at least `grain` items. CUDA: body(0, n) on the caller.
  virtual void parallel_for(int64_t n, int64_t grain, RangeBody body) const = 0;
  virtual int threads() const = 0;
  // Memory on the machine's device.
  virtual Scratch scratch(size_t bytes) const = 0;
  virtual void gemm(const Gemm& gemm) const = 0;

  const Machine machine;
  void* const stream;  // cudaStream_t; nullptr on the CPU
};

// Items per thread that make a parallel region worth its start-up, for rows of `row_bytes`.
inline int64_t grain_for(int64_t row_bytes) {
  constexpr int64_t kBytesPerThread = 128 << 10;  // about 10 us of work against some 5 us to start a region
  return row_bytes >= kBytesPerThread ? 1 : (kBytesPerThread + row_bytes) / (row_bytes + 1);
}

}  // namespace liger
