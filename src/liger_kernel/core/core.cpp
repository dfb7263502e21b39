// Registry, machine description and forced variants.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <liger_kernel/core/registry.h>
#include <liger_kernel/core/variant.h>

namespace liger {
namespace {

std::vector<OpInfo>& table() {
  static std::vector<OpInfo> ops;
  return ops;
}

int detect_isa() {
#ifdef __x86_64__
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);  // clang 14 does not know "f16c" by name
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  return avx512 ? kAvx512 : avx2 ? kAvx2 : kBaseline;
#else
  return kBaseline;
#endif
}

}  // namespace

const std::vector<OpInfo>& ops() { return table(); }

Registration::Registration(const OpInfo& info) {
  auto& all = table();
  const auto place = std::find_if(all.begin(), all.end(), [&](const OpInfo& o) { return std::string_view(o.name) > info.name; });
  all.insert(place, info);
}

Machine cpu_machine() {
  static const int isa = detect_isa();
  return {.backend = Backend::kCpu, .floor = isa};
}

#ifndef LIGER_HAS_CUDA
Machine cuda_machine(int) { fail("this build of liger_kernel has no CUDA back end"); }
#endif

const char* floor_name(Backend backend, int floor) {
  if (backend == Backend::kCpu) return floor == kAvx512 ? "AVX-512 with BF16" : floor == kAvx2 ? "AVX2 and FMA" : "any CPU";
  return floor >= 90 ? "SM 9.0" : "SM 8.0";
}

std::string describe(const Machine& m) {
  if (m.backend == Backend::kCpu) return std::string("cpu, ") + floor_name(m.backend, m.floor);
  return "cuda, SM " + std::to_string(m.floor / 10) + '.' + std::to_string(m.floor % 10) + ", " + std::to_string(m.multiprocessors) +
         " multiprocessors";
}

const char* forced_variant(const char* op) {
  std::string variable = std::string("LIGER_") + op;
  for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  const char* forced = std::getenv(variable.c_str());
  if (!forced || !*forced) return nullptr;
  for (const OpInfo& info : ops()) {
    if (std::string_view(info.name) != op) continue;
    std::string known;
    for (const std::string& variant : info.variants()) {
      if (variant == forced) return forced;
      if ((known + ' ').find(' ' + variant + ' ') == std::string::npos) known += ' ' + variant;
    }
    fail(op, ": ", variable, "=", forced, " names no variant; there are:", known);
  }
  return nullptr;
}

}  // namespace liger
