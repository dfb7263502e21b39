// The rows of a variants.inc for `Args` are appended to `rows`, a std::vector<Variant<Args>>.
#undef LIGER_CUDA_VARIANT
#undef LIGER_CPU_VARIANTS
#ifdef LIGER_HAS_CUDA
#define LIGER_IF_CUDA(function) function
#else
#define LIGER_IF_CUDA(function) nullptr
#endif
#ifdef __x86_64__
#define LIGER_IF_X86(function) function
#else
#define LIGER_IF_X86(function) nullptr
#endif
#define LIGER_CUDA_VARIANT(pass, A, name, sm, reject) \
  if constexpr (std::is_same_v<A, Args>) rows.push_back({#name, ::liger::Backend::kCuda, sm, reject, LIGER_IF_CUDA(pass##_##name)});
#define LIGER_CPU_VARIANTS(pass, A, reject)                                                                         \
  if constexpr (std::is_same_v<A, Args>) {                                                                          \
    rows.push_back({"cpu_avx512", ::liger::Backend::kCpu, ::liger::kAvx512, reject, LIGER_IF_X86(pass##_cpu_avx512)}); \
    rows.push_back({"cpu_avx2", ::liger::Backend::kCpu, ::liger::kAvx2, reject, LIGER_IF_X86(pass##_cpu_avx2)});       \
    rows.push_back({"cpu", ::liger::Backend::kCpu, ::liger::kBaseline, reject, pass##_cpu});                           \
  }
