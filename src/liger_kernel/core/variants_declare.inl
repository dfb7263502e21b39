// The rows of a variants.inc become function declarations.
#undef LIGER_CUDA_VARIANT
#undef LIGER_CPU_VARIANTS
#define LIGER_CUDA_VARIANT(pass, Args, name, sm, reject) void pass##_##name(const Args&, const ::liger::Host&);
#define LIGER_CPU_VARIANTS(pass, Args, reject)               \
  void pass##_cpu_avx512(const Args&, const ::liger::Host&); \
  void pass##_cpu_avx2(const Args&, const ::liger::Host&);   \
  void pass##_cpu(const Args&, const ::liger::Host&);
