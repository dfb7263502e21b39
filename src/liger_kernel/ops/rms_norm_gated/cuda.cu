// Gated RMSNorm on CUDA. cuda_registers, cuda_pipelined: rows.cuh; cuda_wide: wide.cuh.
#include <liger_kernel/ops/rms_norm_gated/rows.cuh>
#include <liger_kernel/ops/rms_norm_gated/wide.cuh>

namespace liger::rms_norm_gated {
namespace {

constexpr const char* kOp = "rms_norm_gated";

// f.operator()<T, W, norm first>()
template <class Args, class F>
void visit_kinds(const Args& a, F&& f) {
  visit_row_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    if (a.norm_first) {
      f.template operator()<T, W, true>();
    } else {
      f.template operator()<T, W, false>();
    }
  });
}

// A block for each row of each group, and threads for its columns.
template <class Args>
dim3 wide_grid(const Args& a) {
  return {static_cast<unsigned>(std::min<int64_t>(a.rows, 0x7fffffff)), static_cast<unsigned>(std::min(groups_of(a), kMaxGridGroups))};
}
template <class Args>
unsigned wide_threads(const Args& a) {
  return static_cast<unsigned>(std::min<int64_t>((a.group_size + 31) / 32 * 32, 512));
}

}  // namespace

void forward_cuda_registers(const ForwardArgs& a, const Host& host) {
  const RowPlan p = choose(a);
  const int64_t rows_per_block = p.threads / p.lanes, blocks = (a.rows + rows_per_block - 1) / rows_per_block;
  LIGER_CHECK(blocks <= 0x7fffffff, kOp, ": ", a.rows, " rows, at most 2^31 - 1 are supported");
  visit_kinds(a, [&]<class T, class W, bool kNormFirst>() {
    const auto kernel = p.vectors == 1   ? forward_rows<T, W, 1, kNormFirst>
                        : p.vectors == 2 ? forward_rows<T, W, 2, kNormFirst>
                        : p.vectors == 4 ? forward_rows<T, W, 4, kNormFirst>
                                         : forward_rows<T, W, 8, kNormFirst>;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups_of(a)));
    kernel<<<grid, p.threads, 0, stream_of(host)>>>(a, roundings_of(a), p.lanes);
  });
  check_launch(kOp);
}

void forward_cuda_wide(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    forward_wide<T><<<wide_grid(a), wide_threads(a), 0, stream_of(host)>>>(a, roundings_of(a), groups_of(a));
  });
  check_launch(kOp);
}

void backward_cuda_pipelined(const BackwardArgs& a, const Host& host) {
  const RowPlan p = choose(a, host.machine);
  const Scratch partial = a.dw ? host.scratch(p.blocks * a.cols * sizeof(float)) : Scratch{};
  visit_kinds(a, [&]<class T, class W, bool kNormFirst>() {
    const auto kernel = backward_kernel<T, W, kNormFirst>(p);
    // More than 48 KB a block has to be asked for. The same bound in every call: another thread may launch the kernel between this
    // and the next line.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(host.machine.shared_memory - kRowOwnShared)),
               kOp, "asking for shared memory");
    const dim3 grid(static_cast<unsigned>(p.blocks), static_cast<unsigned>(groups_of(a)));
    kernel<<<grid, p.threads, p.shared, stream_of(host)>>>(a, roundings_of(a), partial.as<float>(), p.lanes, p.stages);
  });
  check_launch(kOp);
  if (a.dw) sum_rows(partial.as<float>(), a.dw, a.dw_dtype, p.blocks, a.cols, host);
  check_launch(kOp);
}

void backward_cuda_wide(const BackwardArgs& a, const Host& host) {
  const int64_t groups = groups_of(a);
  visit(a.dtype, [&]<class T>(Type<T>) {
    if ((a.dx || a.dgate) && a.rows > 0) {
      backward_wide<T><<<wide_grid(a), wide_threads(a), 0, stream_of(host)>>>(a, roundings_of(a), groups);
    }
    check_launch(kOp);
    if (!a.dw) return;
    const int64_t parts = a.rows < 64 ? 1 : a.rows / 64 < 256 ? a.rows / 64 : 256;
    const Scratch partial = host.scratch(parts * a.cols * sizeof(float));
    const dim3 grid(static_cast<unsigned>((a.cols + 255) / 256), static_cast<unsigned>(parts));
    dw_wide<T><<<grid, 256, 0, stream_of(host)>>>(a, roundings_of(a), groups, partial.as<float>(), (a.rows + parts - 1) / parts);
    check_launch(kOp);
    sum_rows(partial.as<float>(), a.dw, a.dw_dtype, parts, a.cols, host);
  });
  check_launch(kOp);
}

}  // namespace liger::rms_norm_gated
