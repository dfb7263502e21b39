// Where the model lives: a liger::Host and memory of its device. What runs on it is the library's ops, Host::gemm, and the
// loops of kernels.h.
#pragma once
#include <liger_kernel/core/standalone.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#ifdef LIGER_HAS_CUDA
#include <liger_kernel/core/cuda/launch.h>
#endif

namespace example {

// `size` elements on the device; they are given back when the last copy goes.
template <class T>
struct Buffer {
  liger::Scratch memory;
  int64_t size = 0;
  operator T*() const { return memory.as<T>(); }
};

class Device {
 public:
  // `name`: cpu or cuda. `threads` of the CPU; 0: all.
  Device(const std::string& name, int threads) {
    LIGER_CHECK(name == "cpu" || name == "cuda", "--device: ", name, " is neither cpu nor cuda");
    if (name == "cpu") {
      host_ = std::make_unique<liger::StandaloneHost>(liger::cpu_machine(), nullptr, threads);
      return;
    }
#ifdef LIGER_HAS_CUDA
    check(cudaSetDevice(0), "cudaSetDevice");
    // Memory that is given back stays with the process, or every synchronisation would return it to the driver.
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    host_ = std::make_unique<liger::StandaloneHost>(liger::cuda_machine(0), stream_);
#else
    liger::fail("--device cuda: this liger_kernel was built without CUDA");
#endif
  }

  ~Device() {
#ifdef LIGER_HAS_CUDA
    if (stream_) (void)cudaStreamDestroy(stream_);
#endif
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const liger::Host& host() const { return *host_; }

  template <class T>
  Buffer<T> buffer(int64_t size) const {
    return {host_->scratch(size * sizeof(T)), size};
  }

  // Both return when the copy is done.
  template <class T>
  void upload(T* to, const std::vector<T>& from) const {
    copy(to, from.data(), from.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> download(const T* from, int64_t size) const {
    std::vector<T> to(size);
    copy(to.data(), from, size * sizeof(T));
    return to;
  }

 private:
  void copy(void* to, const void* from, size_t bytes) const {
#ifdef LIGER_HAS_CUDA
    if (stream_) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
      check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      return;
    }
#endif
    std::memcpy(to, from, bytes);
  }

#ifdef LIGER_HAS_CUDA
  static void check(cudaError_t status, const char* what) { liger::check_cuda(status, "cpp_train", what); }
  cudaStream_t stream_ = nullptr;
#endif
  std::unique_ptr<liger::StandaloneHost> host_;
};

}  // namespace example
