// A build without CUDA has no cuBLASLt road.
#ifndef LIGER_HAS_CUDA
#include <liger_kernel/core/cuda/gemm_cublaslt.h>

namespace liger {
void gemm_cublaslt(const Gemm&, const Host&) { fail("this build of liger_kernel has no CUDA back end"); }
}  // namespace liger
#endif
