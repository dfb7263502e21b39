// RMSNorm forward and backward without torch, on the CPU and on every CUDA device of a CUDA build; the numbers are checked
// against fp64, and the variants that ran are explained. Exit status 1 when a number is wrong.
#include <liger_kernel/core/standalone.h>
#include <liger_kernel/ops/rms_norm/rms_norm.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <vector>

#ifdef LIGER_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr int64_t kRows = 64, kCols = 4096;
constexpr float kEps = 1e-6f;

struct Numbers {
  std::vector<float> x, dy, weight, y, dx, dw, rstd;
};

Numbers make() {
  Numbers n;
  for (auto* matrix : {&n.x, &n.dy, &n.y, &n.dx}) matrix->resize(kRows * kCols);
  for (auto* row : {&n.weight, &n.dw}) row->resize(kCols);
  n.rstd.resize(kRows);
  for (size_t i = 0; i < n.x.size(); ++i) {
    n.x[i] = std::sin(0.37f * static_cast<float>(i % 1009));
    n.dy[i] = std::cos(0.11f * static_cast<float>(i % 997));
  }
  for (size_t j = 0; j < n.weight.size(); ++j) n.weight[j] = 1 + 0.1f * std::sin(static_cast<float>(j));
  return n;
}

// The pointers lie on the host's device.
void run(const liger::Host& host, const float* x, const float* dy, const float* weight, float* y, float* dx, float* dw, float* rstd) {
  using liger::DType;
  liger::rms_norm::forward({.x = x,
                            .weight = weight,
                            .y = y,
                            .rstd = rstd,
                            .rows = kRows,
                            .cols = kCols,
                            .x_stride = kCols,
                            .y_stride = kCols,
                            .dtype = DType::kF32,
                            .weight_dtype = DType::kF32,
                            .eps = kEps},
                           host);
  liger::rms_norm::backward({.dy = dy,
                             .x = x,
                             .weight = weight,
                             .rstd = rstd,
                             .dx = dx,
                             .dw = dw,
                             .rows = kRows,
                             .cols = kCols,
                             .dy_stride = kCols,
                             .x_stride = kCols,
                             .dx_stride = kCols,
                             .dtype = DType::kF32,
                             .weight_dtype = DType::kF32},
                            host);
}

// Largest differences from fp64, relative to the largest value.
bool check(const Numbers& n) {
  double y_error = 0, dx_error = 0, dw_error = 0, dw_size = 0;
  std::vector<double> dw(kCols);
  for (int64_t i = 0; i < kRows; ++i) {
    const float* x = n.x.data() + i * kCols;
    const float* dy = n.dy.data() + i * kCols;
    double squares = 0, product = 0;
    for (int64_t j = 0; j < kCols; ++j) squares += double{x[j]} * x[j];
    const double rstd = 1 / std::sqrt(squares / kCols + kEps);
    for (int64_t j = 0; j < kCols; ++j) product += double{dy[j]} * n.weight[j] * x[j] * rstd / kCols;
    for (int64_t j = 0; j < kCols; ++j) {
      const double hat = x[j] * rstd;
      y_error = std::fmax(y_error, std::abs(n.y[i * kCols + j] - hat * n.weight[j]));
      dx_error = std::fmax(dx_error, std::abs(n.dx[i * kCols + j] - rstd * (double{dy[j]} * n.weight[j] - hat * product)));
      dw[j] += dy[j] * hat;
    }
  }
  for (int64_t j = 0; j < kCols; ++j) {
    dw_error = std::fmax(dw_error, std::abs(n.dw[j] - dw[j]));
    dw_size = std::fmax(dw_size, std::abs(dw[j]));
  }
  std::printf("largest error: y %.2g, dx %.2g, dw %.2g\n", y_error, dx_error, dw_error);
  return y_error < 5e-6 && dx_error < 5e-6 && dw_error < 5e-6 * std::fmax(dw_size, kRows);
}

void explain(const liger::Machine& machine) {
  for (const liger::OpInfo& op : liger::ops()) {
    if (std::string_view(op.name) != "rms_norm") continue;
    std::cout << op.explain({.shape = {kRows, kCols}, .dtype = liger::DType::kF32, .machine = machine});
  }
}

bool run_cpu() {
  Numbers n = make();
  std::cout << "--- " << describe(liger::cpu_machine()) << '\n';
  explain(liger::cpu_machine());
  run(liger::cpu_host(), n.x.data(), n.dy.data(), n.weight.data(), n.y.data(), n.dx.data(), n.dw.data(), n.rstd.data());
  return check(n);
}

#ifdef LIGER_HAS_CUDA
void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::cerr << "CUDA: " << cudaGetErrorString(status) << '\n';
  std::exit(1);
}

bool run_cuda(int device) {
  require(cudaSetDevice(device));
  cudaStream_t stream;
  require(cudaStreamCreate(&stream));
  const liger::StandaloneHost host(liger::cuda_machine(device), stream);
  std::cout << "--- " << describe(host.machine) << '\n';
  explain(host.machine);

  Numbers n = make();
  std::vector<liger::Scratch> held;
  const auto on_device = [&](const std::vector<float>& v) {
    held.push_back(host.scratch(v.size() * sizeof(float)));
    require(cudaMemcpyAsync(held.back().data, v.data(), v.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
    return held.back().as<float>();
  };
  float *x = on_device(n.x), *dy = on_device(n.dy), *weight = on_device(n.weight), *y = on_device(n.y), *dx = on_device(n.dx),
        *dw = on_device(n.dw), *rstd = on_device(n.rstd);
  run(host, x, dy, weight, y, dx, dw, rstd);
  for (const auto& [to, from] : {std::pair{&n.y, y}, {&n.dx, dx}, {&n.dw, dw}}) {
    require(cudaMemcpyAsync(to->data(), from, to->size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
  }
  require(cudaStreamSynchronize(stream));
  const bool right = check(n);
  held.clear();
  require(cudaStreamDestroy(stream));
  return right;
}
#endif

}  // namespace

int main() {
  bool right = run_cpu();
#ifdef LIGER_HAS_CUDA
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  for (int device = 0; device < devices; ++device) right = run_cuda(device) && right;
#endif
  std::cout << (right ? "all numbers are right\n" : "WRONG NUMBERS\n");
  return right ? 0 : 1;
}
