// rms_norm on the CPU without torch: `bench_rms_norm`; LIGER_RMS_NORM=cpu_avx2 times one variant. Bytes are those that must
// move at least: x and y forward; x, dy and dx backward.
#include <benchmark/benchmark.h>

#include <vector>

#include <liger_kernel/core/standalone.h>
#include <liger_kernel/ops/rms_norm/rms_norm.h>

namespace liger::rms_norm {
namespace {

struct Buffers {
  Buffers(int64_t rows, int64_t cols, DType dtype)
      : x(rows * cols * size_of(dtype), 0x3c), dy(x), out(x), weight(cols * size_of(dtype), 0x3c), rstd(rows, 1.f), dw(cols) {}
  std::vector<uint8_t> x, dy, out, weight;
  std::vector<float> rstd, dw;
};

void run_forward(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  const auto dtype = static_cast<DType>(state.range(2));
  Buffers b(rows, cols, dtype);
  for (auto _ : state) {
    forward({.x = b.x.data(),
             .weight = b.weight.data(),
             .y = b.out.data(),
             .rstd = b.rstd.data(),
             .rows = rows,
             .cols = cols,
             .x_stride = cols,
             .y_stride = cols,
             .dtype = dtype,
             .weight_dtype = dtype,
             .eps = 1e-6f},
            cpu_host());
  }
  state.SetBytesProcessed(state.iterations() * 2 * rows * cols * size_of(dtype));
  state.SetLabel(name(dtype));
}

void run_backward(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  const auto dtype = static_cast<DType>(state.range(2));
  Buffers b(rows, cols, dtype);
  for (auto _ : state) {
    backward({.dy = b.dy.data(),
              .x = b.x.data(),
              .weight = b.weight.data(),
              .rstd = b.rstd.data(),
              .dx = b.out.data(),
              .dw = b.dw.data(),
              .rows = rows,
              .cols = cols,
              .dy_stride = cols,
              .x_stride = cols,
              .dx_stride = cols,
              .dtype = dtype,
              .weight_dtype = dtype},
             cpu_host());
  }
  state.SetBytesProcessed(state.iterations() * 3 * rows * cols * size_of(dtype));
  state.SetLabel(name(dtype));
}

void shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [rows, cols] : {std::pair{256, 1024}, {2048, 4096}, {64, 16384}}) b->Args({rows, cols, static_cast<int64_t>(dtype)});
  }
  b->ArgNames({"rows", "cols", "dtype"})->UseRealTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK(run_forward)->Name("rms_norm/forward")->Apply(shapes);
BENCHMARK(run_backward)->Name("rms_norm/backward")->Apply(shapes);

}  // namespace
}  // namespace liger::rms_norm
