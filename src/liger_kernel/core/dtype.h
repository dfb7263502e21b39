// Element types of the library and the one place that turns a run-time dtype into a C++ type.
#pragma once
#include <cstdint>
#include <utility>

#include <liger_kernel/core/check.h>

namespace liger {

enum class DType : uint8_t { kF32, kBF16, kF16 };

// Storage only; arithmetic is fp32 everywhere (core/cpu/simd.inl.h and core/cuda/vec.cuh convert).
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr int64_t size_of(DType t) { return t == DType::kF32 ? 4 : 2; }
constexpr const char* name(DType t) { return t == DType::kF32 ? "fp32" : t == DType::kBF16 ? "bf16" : "fp16"; }

template <class T>
struct Type {
  using type = T;
};

// visit(dtype, [&]<class T>(Type<T>) { ... }): calls the lambda with the C++ type.
template <class F>
decltype(auto) visit(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32: return f(Type<float>{});
    case DType::kBF16: return f(Type<BFloat16>{});
    default: return f(Type<Float16>{});
  }
}

}  // namespace liger
