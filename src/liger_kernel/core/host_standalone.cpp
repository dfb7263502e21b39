// StandaloneHost: threads, scratch and the choice of GEMM.
#include <liger_kernel/core/standalone.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#ifdef LIGER_HAS_BLAS
#include <cblas.h>
#endif
#ifdef LIGER_HAS_CUDA
#include <liger_kernel/core/cuda/gemm_cublaslt.h>
#include <liger_kernel/core/cuda/launch.h>
#endif

namespace liger {

// A region is a list of equal chunks. Its caller and idle workers claim chunks until none is left, then the caller waits for
// those that workers still hold. The caller never waits for a worker to start, so nested regions, several callers at a time,
// and a forked child without any worker all make progress.
struct StandaloneHost::Pool {
  struct Region {
    RangeBody body;
    int64_t n, chunk;
    int64_t next = 0;  // first item not claimed
    int running = 0;
    std::exception_ptr error = nullptr;
  };

  explicit Pool(int threads) : threads(threads) {}
  ~Pool() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void run(int64_t n, int64_t chunk, RangeBody body) {
    Region region{.body = body, .n = n, .chunk = chunk};
    std::unique_lock lock(mutex);
    start();
    regions.push_back(&region);
    work.notify_all();
    while (region.next < n) claim(region, lock);
    std::erase(regions, &region);
    done.wait(lock, [&] { return region.running == 0; });
    if (region.error) std::rethrow_exception(region.error);
  }

 private:
  void start() {
    while (static_cast<int>(workers.size()) < threads - 1) workers.emplace_back([this] { serve(); });
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      const auto open = std::find_if(regions.begin(), regions.end(), [](const Region* r) { return r->next < r->n; });
      if (open == regions.end()) {
        work.wait(lock);
      } else {
        claim(**open, lock);
      }
    }
  }

  // Takes the next chunk and runs it with the lock open. After an error no chunk is started any more.
  void claim(Region& region, std::unique_lock<std::mutex>& lock) {
    const int64_t begin = region.next, end = std::min(region.n, begin + region.chunk);
    region.next = end;
    ++region.running;
    lock.unlock();
    std::exception_ptr error;
    try {
      region.body(begin, end);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      if (!region.error) region.error = error;
      region.next = region.n;
    }
    if (--region.running == 0) done.notify_all();
  }

 public:
  const int threads;

 private:
  std::mutex mutex;
  std::condition_variable work, done;
  std::vector<Region*> regions;
  std::vector<std::thread> workers;
  bool stopping = false;
};

// Scratch on the CPU that was given back and waits for its next user. At most kKept bytes are kept.
struct StandaloneHost::Blocks {
  static constexpr size_t kAlignment = 64, kKept = size_t{64} << 20;
  struct Block {
    void* data;
    size_t bytes;
  };

  ~Blocks() {
    for (const Block& b : free) std::free(b.data);
  }

  Block take(size_t bytes) {
    bytes = std::max<size_t>(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    {
      const std::lock_guard lock(mutex);
      // The smallest that is large enough, and not so large that a later user would miss it.
      auto best = free.end();
      for (auto b = free.begin(); b != free.end(); ++b) {
        if (b->bytes >= bytes && b->bytes / 2 <= bytes && (best == free.end() || b->bytes < best->bytes)) best = b;
      }
      if (best != free.end()) {
        const Block found = *best;
        free.erase(best);
        kept -= found.bytes;
        return found;
      }
    }
    void* data = std::aligned_alloc(kAlignment, bytes);
    if (!data) throw std::bad_alloc();
    return {data, bytes};
  }

  void give(Block block) noexcept {
    {
      const std::lock_guard lock(mutex);
      if (kept + block.bytes <= kKept && free.size() < free.capacity()) {
        free.push_back(block);
        kept += block.bytes;
        return;
      }
    }
    std::free(block.data);
  }

  Blocks() { free.reserve(32); }
  std::mutex mutex;
  std::vector<Block> free;
  size_t kept = 0;
};

StandaloneHost::StandaloneHost(Machine machine, void* stream, int threads) : Host(machine, stream) {
  LIGER_CHECK(threads >= 0, "StandaloneHost: ", threads, " threads; 0 takes all of the machine");
  if (machine.backend == Backend::kCuda) threads = 1;
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  pool_ = std::make_unique<Pool>(threads);
  blocks_ = std::make_shared<Blocks>();
}

StandaloneHost::~StandaloneHost() = default;

int StandaloneHost::threads() const { return pool_->threads; }

void StandaloneHost::parallel_for(int64_t n, int64_t grain, RangeBody body) const {
  if (n <= 0) return;
  const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, pool_->threads);
  if (parts == 1) return body(0, n);
  pool_->run(n, (n + parts - 1) / parts, body);
}

Scratch StandaloneHost::scratch(size_t bytes) const {
#ifdef LIGER_HAS_CUDA
  if (machine.backend == Backend::kCuda) {
    void* data = nullptr;
    const cudaStream_t stream = stream_of(*this);
    check_cuda(cudaMallocAsync(&data, std::max<size_t>(bytes, 1), stream), "scratch", "cudaMallocAsync");
    // The owner may go while an exception unwinds or the driver shuts down: an error here has nobody to tell.
    return {.owner = std::shared_ptr<void>(data, [stream](void* p) { (void)cudaFreeAsync(p, stream); }), .data = data};
  }
#endif
  const Blocks::Block block = blocks_->take(bytes);
  return {.owner = std::shared_ptr<void>(block.data, [blocks = blocks_, block](void*) { blocks->give(block); }), .data = block.data};
}

#ifdef LIGER_HAS_BLAS
namespace {

// BLAS takes 32-bit sizes.
bool fits_blas(const Gemm& g) {
  constexpr int64_t kLimit = 0x7fffffff;
  return g.in == DType::kF32 && g.out == DType::kF32 && g.k > 0 && std::max({g.m, g.n, g.k, g.lda, g.ldb, g.ldc}) <= kLimit;
}

void gemm_blas(const Gemm& g) {
  const auto op = [](bool transpose) { return transpose ? CblasTrans : CblasNoTrans; };
  cblas_sgemm(CblasRowMajor, op(g.transpose_a), op(g.transpose_b), static_cast<int>(g.m), static_cast<int>(g.n), static_cast<int>(g.k),
              g.alpha, static_cast<const float*>(g.a), static_cast<int>(g.lda), static_cast<const float*>(g.b), static_cast<int>(g.ldb),
              g.beta, static_cast<float*>(g.c), static_cast<int>(g.ldc));
}

}  // namespace
#endif

void StandaloneHost::gemm(const Gemm& g) const {
  if (g.m <= 0 || g.n <= 0) return;
#ifdef LIGER_HAS_CUDA
  if (machine.backend == Backend::kCuda) return gemm_cublaslt(g, *this);
#endif
#ifdef LIGER_HAS_BLAS
  if (fits_blas(g)) return gemm_blas(g);
#endif
  gemm_portable(g, *this);
}

const Host& cpu_host() {
  // Never destroyed: at the end of a forked child there would be no worker to join.
  static const StandaloneHost& host = *new StandaloneHost;
  return host;
}

}  // namespace liger
