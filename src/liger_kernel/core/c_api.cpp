// Plain C entry points for tools (the `liger` command reads them through ctypes). Each writes text into `out`, at most `size`
// bytes with the final zero, and returns the length that the whole text needs; a negative length marks an error's message.
#include <cstring>

#include <liger_kernel/core/registry.h>
#include <liger_kernel/core/variant.h>

namespace liger {
namespace {

template <class F>
int64_t write(char* out, int64_t size, F&& make) {
  std::string text;
  bool failed = false;
  try {
    text = make();
  } catch (const std::exception& e) {
    text = e.what();
    failed = true;
  }
  const int64_t length = static_cast<int64_t>(text.size());
  if (size > 0) {
    const int64_t kept = std::min(length, size - 1);
    std::memcpy(out, text.data(), kept);
    out[kept] = 0;
  }
  return failed ? -length - 1 : length;
}

}  // namespace

extern "C" {

// One line per op: name, tab, how explain reads a shape, tab, variants.
__attribute__((visibility("default"))) int64_t liger_ops(char* out, int64_t size) {
  return write(out, size, [] {
    std::string text;
    for (const OpInfo& info : ops()) {
      text += std::string(info.name) + '\t' + info.shape + '\t';
      for (const std::string& v : info.variants()) text += v + ' ';
      text += '\n';
    }
    return text;
  });
}

// The machine as the kernels see it; `device` < 0 is the CPU.
__attribute__((visibility("default"))) int64_t liger_machine(int device, char* out, int64_t size) {
  return write(out, size, [&] { return describe(device < 0 ? cpu_machine() : cuda_machine(device)); });
}

__attribute__((visibility("default"))) int64_t liger_explain(const char* op, const int64_t* shape, int rank, const char* dtype, int device,
                                                             char* out, int64_t size) {
  return write(out, size, [&] {
    const std::string_view type = dtype;
    LIGER_CHECK(type == "fp32" || type == "bf16" || type == "fp16", "dtype is ", type, ", expected fp32, bf16 or fp16");
    const Problem problem{.shape = {shape, shape + rank},
                          .dtype = type == "fp32"   ? DType::kF32
                                   : type == "bf16" ? DType::kBF16
                                                    : DType::kF16,
                          .machine = device < 0 ? cpu_machine() : cuda_machine(device)};
    for (const OpInfo& info : ops()) {
      if (std::string_view(info.name) == op) return info.explain(problem);
    }
    fail("no op is called ", op, "; `liger ops` lists them");
  });
}

}  // extern "C"
}  // namespace liger
