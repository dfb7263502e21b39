// Host without torch: for C++ programs that link liger_kernel, for its tests and its benchmarks. Not part of the torch
// extension, where the host is PyTorch itself.
//
//   const liger::StandaloneHost host;                                     the CPU, all its threads
//   const liger::StandaloneHost gpu(liger::cuda_machine(0), stream);      a CUDA device, in order on that stream
//   liger::rms_norm::forward(args, host);
//
// CPU: a pool of std::threads, started by the first parallel region; scratch is 64-byte aligned and reused, because on the CPU
// fresh memory costs more in page faults than most kernels cost. CUDA: the device must be current (cudaSetDevice), as for any
// launch; scratch is cudaMallocAsync's. A CUDA driver gives such memory back at every synchronisation, unless the program
// raises cudaMemPoolAttrReleaseThreshold of the device's default pool.
#pragma once
#include <liger_kernel/core/host.h>

namespace liger {

class StandaloneHost final : public Host {
 public:
  // `threads` = 0: as many as the machine runs at once. Ignored on CUDA.
  explicit StandaloneHost(Machine machine = cpu_machine(), void* stream = nullptr, int threads = 0);
  ~StandaloneHost() override;
  StandaloneHost(const StandaloneHost&) = delete;
  StandaloneHost& operator=(const StandaloneHost&) = delete;

  // Any thread may call these, also from inside a parallel region. An exception of the body arrives at the caller.
  void parallel_for(int64_t n, int64_t grain, RangeBody body) const override;
  int threads() const override;
  Scratch scratch(size_t bytes) const override;
  // CPU: fp32 through BLAS when the library was built with one, else and for bf16 and fp16 an own blocked loop; `in` and
  // `out` may differ. CUDA: cuBLASLt, found when the first product is asked for.
  void gemm(const Gemm& gemm) const override;

 private:
  struct Pool;
  struct Blocks;
  std::unique_ptr<Pool> pool_;
  std::shared_ptr<Blocks> blocks_;
};

// One StandaloneHost of the whole process on the CPU; it lives until the process ends.
const Host& cpu_host();

// c = alpha * op(a) op(b) + beta * c on the CPU with the threads of `host`; beta = 0 does not read c. What StandaloneHost runs
// without a BLAS: a register-blocked loop over fp32 panels, into which narrow types are widened as they are packed. Every
// element is summed in an order that the number of threads does not change.
void gemm_portable(const Gemm& gemm, const Host& host);

}  // namespace liger
