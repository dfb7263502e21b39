// Host on PyTorch: its threads, its caching allocators, its current stream, its CPU GEMM; cuBLASLt (core/cuda) on CUDA.
#include <dlfcn.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
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

// Memory that the allocator has just mapped costs a page fault per 4 KB when it is first touched, which is most of an elementwise
// op's time; in 2 MB pages it is a third (swiglu 2048 x 5632 fp32, forward and backward: 94 -> 30 ms of CPU time). Blocks from
// 32 MB on are always mapped afresh by glibc: for those the kernel is asked for huge pages (it gives them where
// transparent_hugepage is `madvise` or `always`, and ignores the request elsewhere).
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] uintptr_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kAlwaysMapped = 32 << 20, kHugePage = 2 << 20;
  if (bytes < kAlwaysMapped) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

// By way of the C function: new_empty() goes through the dispatcher twice (measured: 3 us of a call's 8).
Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i] > 1 ? shape[i] : 1) strides[i] = stride;
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                  static_cast<int32_t>(dtype), device_type, like.get_device_index(), &handle));
  Tensor t(handle);
  if (like.is_cpu()) ask_for_huge_pages(data(t), static_cast<uintptr_t>(t.numel()) * t.element_size());
  return t;
}

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
  auto tensor = std::make_shared<Tensor>(empty(like_, {static_cast<int64_t>((bytes + 3) / 4)}, ScalarType::Float));
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
