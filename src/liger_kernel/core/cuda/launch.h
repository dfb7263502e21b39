// Launch checks and device properties for CUDA host code.
#pragma once
#include <cuda_runtime_api.h>

#include <liger_kernel/core/check.h>
#include <liger_kernel/core/host.h>

namespace liger {

inline cudaStream_t stream_of(const Host& host) { return static_cast<cudaStream_t>(host.stream); }

inline void check_cuda(cudaError_t status, const char* op, const char* what) {
  LIGER_CHECK(status == cudaSuccess, op, ": ", what, " failed: ", cudaGetErrorString(status));
}
// After every <<<>>>.
inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op, "launch"); }

}  // namespace liger
