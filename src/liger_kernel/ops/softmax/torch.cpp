// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/row_map.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {
namespace {

Tensor forward_torch(const Tensor& x) { return row_map_forward("softmax", forward, x); }
Tensor backward_torch(const Tensor& dy, const Tensor& y) { return row_map_backward("softmax", backward, dy, y); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("softmax_forward(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y) -> Tensor");
}

#define LIGER_REGISTER(key)                                 \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {         \
    m.impl("softmax_forward", TORCH_BOX(&forward_torch));   \
    m.impl("softmax_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::softmax
