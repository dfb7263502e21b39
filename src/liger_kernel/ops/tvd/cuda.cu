// Total variation distance on CUDA, bound by memory: two reads and, with a gradient, one write. cuda_vector: 16-byte accesses of
// operands of one type; cuda_scalar: single elements of any types and alignment.
#include <liger_kernel/core/cuda/pairs.cuh>
#include <liger_kernel/ops/tvd/plan.h>

namespace liger::tvd {
namespace {

struct Element {
  const int64_t* labels;
  int64_t labels_stride, ignore_index;
  const float* scale;
  float host_factor;

  __device__ __forceinline__ bool skips(int64_t row) const { return labels && labels[row * labels_stride] == ignore_index; }
  __device__ __forceinline__ float factor() const { return scale ? host_factor * *scale : host_factor; }
  __device__ __forceinline__ static float half_sign(float d) { return d > 0.f ? 0.5f : d < 0.f ? -0.5f : 0.f; }
  __device__ __forceinline__ void operator()(float x, float t, float& loss, float& slope) const {
    loss = 0.5f * fabsf(x - t);
    slope = half_sign(x - t);
  }

  __device__ __forceinline__ float slope(const BackwardArgs& a, int64_t row, int64_t j) const {
    return half_sign(read(a.input, a.dtype, row * a.input_stride + j) - read(a.target, a.target_dtype, row * a.target_stride + j));
  }
  template <class Access>
  __device__ __forceinline__ void slopes(const BackwardArgs& a, int64_t row, int64_t j, float (&v)[Access::kSize]) const {
    float t[Access::kSize];
    Access::load(a.input, a.dtype, row * a.input_stride + j).to_float(v);
    Access::load(a.target, a.target_dtype, row * a.target_stride + j).to_float(t);
#pragma unroll
    for (int k = 0; k < Access::kSize; ++k) v[k] = half_sign(v[k] - t[k]);
  }
};

Element element_of(const ForwardArgs& a) { return {a.labels, a.labels_stride, a.ignore_index, a.scale, a.factor}; }
Element element_of(const BackwardArgs& a) { return {a.labels, a.labels_stride, a.ignore_index, a.scale, a.factor}; }

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { launch_pairs_forward<PairVector<T>>(a, element_of(a), host, "tvd"); });
}
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch_pairs_forward<PairSingle>(a, element_of(a), host, "tvd"); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { launch_pairs_backward<PairVector<T>>(a, element_of(a), host, "tvd"); });
}
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch_pairs_backward<PairSingle>(a, element_of(a), host, "tvd"); }

}  // namespace liger::tvd
