// What every op's torch.cpp needs: tensors as pointers with checks, and the Host on PyTorch's pools, streams and GEMM.
// Only torch.cpp files and this folder include torch, and only its stable ABI.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <tuple>
#include <vector>

#include <liger_kernel/core/host.h>

namespace liger {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const char* op, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kF32;
    case ScalarType::BFloat16: return DType::kBF16;
    case ScalarType::Half: return DType::kF16;
    default: fail(op, ": takes fp32, bf16 and fp16 tensors; cast the input first");
  }
}

inline const char* device_name(const Tensor& t) { return t.is_cuda() ? "cuda" : t.is_cpu() ? "cpu" : "another device"; }

// Every tensor after the first lies on the first one's device.
template <class... Tensors>
void check_devices(const char* op, const Tensor& first, const Tensors&... rest) {
  const auto check = [&](const Tensor& t) {
    LIGER_CHECK(t.get_device() == first.get_device() && t.is_cuda() == first.is_cuda(), op, ": tensors lie on ", device_name(first), ' ',
                int(first.get_device()), " and ", device_name(t), ' ', int(t.get_device()), "; move them to one device");
  };
  (check(rest), ...);
}

// A tensor as a matrix with contiguous columns.
struct Rows {
  int64_t rows, cols, stride;  // stride: elements from row to row
};

// t is [rows, columns] with contiguous columns, or [..., columns] without gaps.
inline Rows rows_of(const char* op, const char* what, const Tensor& t) {
  const int64_t dims = t.dim();
  LIGER_CHECK(dims > 0, op, ": ", what, " has no dimension, expected [..., columns]");
  const int64_t cols = t.size(dims - 1);
  if (dims == 2) {
    LIGER_CHECK(cols <= 1 || t.size(0) == 0 || t.stride(1) == 1, op, ": ", what, " has stride ", t.stride(1),
                " in its last dimension, expected 1");
    return {t.size(0), cols, t.stride(0)};
  }
  LIGER_CHECK(t.is_contiguous(), op, ": ", what, " has ", dims, " dimensions and is not contiguous; expected [rows, columns]");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < dims; ++d) rows *= t.size(d);
  return {rows, cols, cols};
}
inline void check_dtypes(const char* op, const char* what, const Tensor& t, const char* other_what, const Tensor& other) {
  LIGER_CHECK(t.scalar_type() == other.scalar_type(), op, ": ", what, " is ", name(dtype_of(op, t)), ", ", other_what, " is ",
              name(dtype_of(op, other)), "; cast ", what, " to the dtype of ", other_what);
}
// Rows of t, which has the shape, the device and, unless `any_dtype`, the dtype of `other`.
inline Rows rows_like(const char* op, const char* what, const Tensor& t, const char* other_what, const Tensor& other,
                      bool any_dtype = false) {
  const Rows rows = rows_of(op, what, t), like = rows_of(op, other_what, other);
  check_devices(op, other, t);
  LIGER_CHECK(rows.rows == like.rows && rows.cols == like.cols, op, ": ", what, " is ", rows.rows, " x ", rows.cols, ", ", other_what,
              " is ", like.rows, " x ", like.cols, "; they must be equal");
  if (!any_dtype) check_dtypes(op, what, t, other_what, other);
  return rows;
}
// The same for ops that take nothing but [rows, columns].
inline void check_rows(const char* op, const char* what, const Tensor& t) {
  LIGER_CHECK(t.dim() == 2, op, ": ", what, " has ", t.dim(), " dimensions, expected [rows, columns]");
  rows_of(op, what, t);
}

// Contiguous memory on like's device.
Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType dtype);
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}
// Contiguous, of like's shape and dtype; of no elements when not `wanted`.
inline Tensor output_like(const Tensor& like, bool wanted = true) {
  return wanted ? empty(like, like.sizes(), like.scalar_type()) : empty(like, {0}, like.scalar_type());
}

template <class T = void>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}
template <class T = void>
const T* const_data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

// The Host for the device that `like` lies on; on CUDA it also makes that device current until it goes.
class TorchHost final : public Host {
 public:
  explicit TorchHost(const Tensor& like);
  void parallel_for(int64_t n, int64_t grain, RangeBody body) const override;
  int threads() const override;
  Scratch scratch(size_t bytes) const override;
  void gemm(const Gemm& gemm) const override;

 private:
  const Tensor like_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace liger
