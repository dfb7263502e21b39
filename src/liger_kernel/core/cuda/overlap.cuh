// A kernel that starts while the one before it in the stream still runs (programmatic dependent launch, SM 9.0 and later): its
// blocks are in place when that one ends, which saves some microseconds. Elsewhere an ordinary launch.
#pragma once
#include <liger_kernel/core/cuda/launch.h>

namespace liger {

// Before anything that the previous kernel wrote is read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel must call wait_for_previous_kernel() first of all.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, const Host& host, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = host.machine.floor >= 90 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);  // check_launch() sees what went wrong
}

}  // namespace liger
