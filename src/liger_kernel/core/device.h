// What a kernel may ask about the machine it is chosen for.
#pragma once
#include <cstdint>
#include <string>

namespace liger {

enum class Backend : uint8_t { kCpu, kCuda };

// CPU instruction sets that kernels are stamped for, worst first. kBaseline is SSE2 on x86-64 and NEON on AArch64.
enum Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

struct Machine {
  Backend backend = Backend::kCpu;
  int floor = kBaseline;      // CPU: the best Isa; CUDA: compute capability x 10
  int multiprocessors = 0;    // CUDA
  int64_t shared_memory = 0;  // CUDA: bytes one block may use
  int device = -1;            // CUDA device index
};

constexpr const char* name(Backend b) { return b == Backend::kCpu ? "cpu" : "cuda"; }

Machine cpu_machine();             // by CPUID, read once
Machine cuda_machine(int device);  // read once per device; throws liger::Error in a build without CUDA
std::string describe(const Machine& machine);

}  // namespace liger
