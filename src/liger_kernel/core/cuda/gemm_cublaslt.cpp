// Host::gemm on CUDA. cuBLASLt is opened at run time: the copy that the process already uses (PyTorch's), else the one that the
// loader finds, so that no version of it is linked.
//
// A row-major c = op(a) op(b) is the column-major c^T = op(b)^T op(a)^T: the operands change places and keep their transposes.
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include <liger_kernel/core/cuda/gemm_cublaslt.h>

namespace liger {
namespace {

#define LIGER_CUBLASLT_FUNCTIONS(X)       \
  X(cublasLtCreate)                       \
  X(cublasLtGetStatusString)              \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoConfigGetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)

struct Api {
#define X(function) decltype(&::function) function = nullptr;
  LIGER_CUBLASLT_FUNCTIONS(X)
#undef X
};

const Api& api() {
  static const Api loaded = [] {
    constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    void* library = nullptr;
    for (int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
      for (const char* name : kNames) {
        if (!library) library = dlopen(name, flags);
      }
    }
    LIGER_CHECK(library, "cuBLASLt was not found: neither libcublasLt.so.13 nor libcublasLt.so.12 is loaded or on the library path");
    Api a;
#define X(function)                                                               \
  a.function = reinterpret_cast<decltype(a.function)>(dlsym(library, #function)); \
  LIGER_CHECK(a.function, "cuBLASLt has no function " #function "; version 12 or 13 is needed");
    LIGER_CUBLASLT_FUNCTIONS(X)
#undef X
    return a;
  }();
  return loaded;
}

void check(cublasStatus_t status, const char* what) {
  LIGER_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", what, " failed: ", api().cublasLtGetStatusString(status));
}

// A handle belongs to the device that is current when it is made; it lives as long as the process.
cublasLtHandle_t handle_of(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<cublasLtHandle_t, kMaxDevices> handles{};
  static std::array<std::once_flag, kMaxDevices> once;
  LIGER_CHECK(device >= 0 && device < kMaxDevices, "CUDA device ", device, " is not in [0, ", kMaxDevices, ")");
  std::call_once(once[device], [&] { check(api().cublasLtCreate(&handles[device]), "making a handle"); });
  return handles[device];
}

cudaDataType_t type_of(DType t) { return t == DType::kF32 ? CUDA_R_32F : t == DType::kBF16 ? CUDA_R_16BF : CUDA_R_16F; }

// The largest power of two up to 256 that divides the address: heuristics assume 256 unless told.
uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return address == 0 ? 256 : static_cast<uint32_t>(std::min<uintptr_t>(address & -address, 256));
}

constexpr size_t kWorkspace = size_t{32} << 20;
constexpr int kHeuristics = 8;
constexpr size_t kCacheSize = 1024;

// Everything about a product but its pointers, and the algorithm for it.
struct Product {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulHeuristicResult_t choice{};

  Product() = default;
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() {
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout) api().cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation) api().cublasLtMatmulDescDestroy(operation);
  }
};

template <class T>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(api().cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "setting a preference");
}

// cuBLASLt's first heuristic is 3-15 % off on the three large products of a language model's head (H200, sustained load). Among the
// heuristics, these tiles are the measured best: 176, 168 or 144 x 128 for x w^T, 128 x 160 for dz^T x; the first one otherwise.
int preferred(const Gemm& g, const Machine& machine, const cublasLtMatmulHeuristicResult_t* found, int count) {
  const bool large = g.m >= 512 && g.n >= 512 && g.k >= 512 && double(g.m) * double(g.n) * double(g.k) > 1e11;
  if (machine.floor != 90 || g.in == DType::kF32 || !large || g.transpose_a == g.transpose_b) return 0;
  using Tiles = std::initializer_list<cublasLtMatmulTile_t>;
  const Tiles logits = {CUBLASLT_MATMUL_TILE_176x128, CUBLASLT_MATMUL_TILE_168x128, CUBLASLT_MATMUL_TILE_144x128};
  const Tiles weight_gradient = {CUBLASLT_MATMUL_TILE_128x160};
  for (cublasLtMatmulTile_t tile : g.transpose_b ? logits : weight_gradient) {
    for (int i = 0; i < count; ++i) {
      uint32_t has = 0;
      size_t written = 0;
      const auto status =
          api().cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &has, sizeof has, &written);
      if (status == CUBLAS_STATUS_SUCCESS && found[i].state == CUBLAS_STATUS_SUCCESS && has == tile) return i;
    }
  }
  return 0;
}

std::shared_ptr<const Product> make(const Gemm& g, const Machine& machine, cublasLtHandle_t handle) {
  auto p = std::make_shared<Product>();
  check(api().cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
  const cublasOperation_t first = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(api().cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "describing a product");
  check(api().cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "describing a product");
  // Column-major sizes of the stored matrices: their rows are our columns.
  const auto layout = [](cublasLtMatrixLayout_t* out, DType type, int64_t rows, int64_t columns, int64_t ld) {
    check(api().cublasLtMatrixLayoutCreate(out, type_of(type), rows, columns, ld), "describing a matrix");
  };
  layout(&p->a, g.in, g.transpose_b ? g.k : g.n, g.transpose_b ? g.n : g.k, g.ldb);
  layout(&p->b, g.in, g.transpose_a ? g.m : g.k, g.transpose_a ? g.k : g.m, g.lda);
  layout(&p->c, g.out, g.n, g.m, g.ldc);

  cublasLtMatmulPreference_t preference = nullptr;
  check(api().cublasLtMatmulPreferenceCreate(&preference), "making a preference");
  const std::shared_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>> owner(
      preference, [](cublasLtMatmulPreference_t q) { api().cublasLtMatmulPreferenceDestroy(q); });
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  // Parts of a split product are added in fp32, never in the 16-bit output.
  prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(g.b));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(g.a));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(g.c));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(g.c));
  std::array<cublasLtMatmulHeuristicResult_t, kHeuristics> found{};
  int count = 0;
  const cublasStatus_t status =
      api().cublasLtMatmulAlgoGetHeuristic(handle, p->operation, p->a, p->b, p->c, p->c, preference, kHeuristics, found.data(), &count);
  LIGER_CHECK(status == CUBLAS_STATUS_SUCCESS && count > 0, "cuBLASLt has no algorithm for ", name(g.in), " to ", name(g.out), ", m ", g.m,
              ", n ", g.n, ", k ", g.k, ", strides ", g.lda, ", ", g.ldb, ", ", g.ldc, ": ", api().cublasLtGetStatusString(status));
  p->choice = found[preferred(g, machine, found.data(), count)];
  return p;
}

std::shared_ptr<const Product> product(const Gemm& g, const Machine& machine, cublasLtHandle_t handle) {
  using Key = std::array<int64_t, 12>;
  static std::mutex mutex;
  static std::map<Key, std::shared_ptr<const Product>> cache;
  const Key key = {g.m,
                   g.n,
                   g.k,
                   g.lda,
                   g.ldb,
                   g.ldc,
                   machine.device,
                   g.transpose_a * 2 + g.transpose_b,
                   int64_t(g.in) * 16 + int64_t(g.out),
                   alignment(g.a),
                   alignment(g.b),
                   alignment(g.c)};
  const std::lock_guard lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kCacheSize) cache.clear();  // row counts that vary from call to call; those in use live on by their owners
  return cache[key] = make(g, machine, handle);
}

}  // namespace

void gemm_cublaslt(const Gemm& g, const Host& host) {
  LIGER_CHECK(g.k > 0, "gemm: the inner dimension is 0");
  LIGER_CHECK(g.in == g.out || g.out == DType::kF32, "gemm: ", name(g.in), " operands give ", name(g.in), " or fp32, not ", name(g.out));
  if (g.m == 0 || g.n == 0) return;
  const cublasLtHandle_t handle = handle_of(host.machine.device);
  const std::shared_ptr<const Product> p = product(g, host.machine, handle);
  const Scratch workspace = p->choice.workspaceSize ? host.scratch(p->choice.workspaceSize) : Scratch{};
  check(api().cublasLtMatmul(handle, p->operation, &g.alpha, g.b, p->a, g.a, p->b, &g.beta, g.c, p->c, g.c, p->c, &p->choice.algo,
                             workspace.data, p->choice.workspaceSize, static_cast<cudaStream_t>(host.stream)),
        "a product");
}

}  // namespace liger
