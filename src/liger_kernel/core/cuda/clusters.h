// How many clusters of a kernel's blocks run at once: what a persistent grid is made of. And the shared memory they may use.
#pragma once
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include <liger_kernel/core/cuda/launch.h>

namespace liger {
namespace {

// Lets a kernel use all dynamic shared memory of the device but `reserved` bytes, which are left for its static variables and the system's
// share; once per kernel and device.
inline void allow_shared(const void* kernel, const Machine& machine, int64_t reserved, const char* op) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard lock(mutex);
  if (!done.insert({kernel, machine.device}).second) return;
  const int bytes = static_cast<int>(machine.shared_memory - reserved);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op, "asking for shared memory");
}

// 0 when none fits. Asked once per kernel, shape and device. `cluster` of 1: blocks. `shared_bytes`: dynamic, per block.
inline int resident_clusters(const void* kernel, int cluster, int threads, int shared_bytes, const Machine& machine, const char* op) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int, int>, int> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace({kernel, cluster, threads, shared_bytes, machine.device}, 0);
  if (!is_new) return place->second;
  int count = 0;
  if (cluster == 1) {
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes), op, "occupancy");
    count *= machine.multiprocessors;
  } else {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster * machine.multiprocessors);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), op, "occupancy");
  }
  return place->second = count;
}

}  // namespace
}  // namespace liger
