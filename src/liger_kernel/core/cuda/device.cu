// Device properties, read once per device.
#include <array>
#include <mutex>

#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/device.h>

namespace liger {

Machine cuda_machine(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<Machine, kMaxDevices> machines;
  static std::array<std::once_flag, kMaxDevices> once;
  LIGER_CHECK(device >= 0 && device < kMaxDevices, "CUDA device ", device, " is not in [0, ", kMaxDevices, ")");
  std::call_once(once[device], [&] {
    const auto get = [&](cudaDeviceAttr attribute) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "device", "reading a property");
      return value;
    };
    machines[device] = Machine{.backend = Backend::kCuda,
                               .floor = 10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor),
                               .multiprocessors = get(cudaDevAttrMultiProcessorCount),
                               .shared_memory = get(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                               .device = device};
  });
  return machines[device];
}

}  // namespace liger
