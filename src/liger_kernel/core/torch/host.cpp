// Host on PyTorch: its threads, its caching allocators, its current stream, its CPU GEMM; cuBLASLt (core/cuda) on CUDA.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <liger_kernel/core/cuda/gemm_cublaslt.h>
#include <liger_kernel/core/torch/torch.h>

namespace liger {
namespace {

// libtorch_cuda is looked up at run time, so that one library serves CPU-only and CUDA builds of torch.
void* current_cuda_stream(int device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const auto getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  LIGER_CHECK(getter, "this PyTorch has no CUDA back end");
  void* stream = nullptr;
  LIGER_CHECK(getter(device, &stream) == 0, "no current CUDA stream on device ", device);
  return stream;
}

ScalarType scalar_type(DType t) {
  return t == DType::kF32 ? ScalarType::Float : t == DType::kBF16 ? ScalarType::BFloat16 : ScalarType::Half;
}

Machine machine_of(const Tensor& like) { return like.is_cuda() ? cuda_machine(like.get_device()) : cpu_machine(); }

}  // namespace

TorchHost::TorchHost(const Tensor& like)
    : Host(machine_of(like), like.is_cuda() ? current_cuda_stream(like.get_device()) : nullptr), like_(like) {
  LIGER_CHECK(like.is_cuda() || like.is_cpu(), "liger_kernel runs on cpu and cuda tensors only");
  if (like.is_cuda()) guard_.emplace(like.get_device());
}

void TorchHost::parallel_for(int64_t n, int64_t grain, RangeBody body) const {
  if (n > 0) torch::stable::parallel_for(0, n, grain, body);
}

int TorchHost::threads() const { return static_cast<int>(torch::stable::get_num_threads()); }

Scratch TorchHost::scratch(size_t bytes) const {
  auto tensor = std::make_shared<Tensor>(
      torch::stable::new_empty(like_, std::vector<int64_t>{static_cast<int64_t>((bytes + 3) / 4)}, ScalarType::Float));
  void* data = tensor->mutable_data_ptr();
  return {.owner = std::move(tensor), .data = data};
}

// mm / addmm on views of the caller's memory; column-major operands are views with swapped strides.
void TorchHost::gemm(const Gemm& g) const {
  if (g.m == 0 || g.n == 0) return;
  if (machine.backend == Backend::kCuda) return gemm_cublaslt(g, *this);
  LIGER_CHECK(g.in == g.out, "gemm: the CPU host multiplies and writes one dtype, not ", name(g.in), " into ", name(g.out));
  const auto view = [&](const void* p, int64_t rows, int64_t columns, int64_t ld, bool transpose, DType type) {
    const std::vector<int64_t> sizes = {rows, columns};
    const std::vector<int64_t> strides = transpose ? std::vector<int64_t>{1, ld} : std::vector<int64_t>{ld, 1};
    return torch::stable::from_blob(const_cast<void*>(p), sizes, strides, like_.device(), scalar_type(type));
  };
  const Tensor a = view(g.a, g.m, g.k, g.lda, g.transpose_a, g.in);
  const Tensor b = view(g.b, g.k, g.n, g.ldb, g.transpose_b, g.in);
  const Tensor c = view(g.c, g.m, g.n, g.ldc, false, g.out);
  // The dispatcher's stable entry takes no Scalar; these C functions are as stable.
  if (g.beta == 0 && g.alpha == 1) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(c.get(), a.get(), b.get()));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(c.get(), c.get(), a.get(), b.get(), g.beta, g.alpha));
  }
}

}  // namespace liger
