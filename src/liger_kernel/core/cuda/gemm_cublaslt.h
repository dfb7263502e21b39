// Host::gemm on CUDA through cuBLASLt, which is found at run time (torch has it loaded; standalone it is dlopen'ed).
#pragma once
#include <liger_kernel/core/host.h>

namespace liger {

void gemm_cublaslt(const Gemm& gemm, const Host& host);

}  // namespace liger
