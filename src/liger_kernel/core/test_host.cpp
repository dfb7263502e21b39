// StandaloneHost: every item once, errors and nesting; scratch; GEMM against fp64.
#include <atomic>
#include <set>
#include <thread>

#include <liger_kernel/core/testing.h>
#ifdef LIGER_HAS_CUDA
#include <liger_kernel/core/cuda/launch.h>
#endif

namespace liger::test {
namespace {

TEST(Host, ParallelForVisitsEveryItemOnce) {
  for (const int threads : {1, 2, 5}) {
    const StandaloneHost host(cpu_machine(), nullptr, threads);
    EXPECT_EQ(host.threads(), threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1001}) {
      for (const int64_t grain : {1, 3, 500}) {
        std::vector<std::atomic<int>> visits(n);
        std::atomic<int> calls = 0;
        host.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          ++calls;
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        for (const auto& v : visits) ASSERT_EQ(v, 1);
        ASSERT_LE(calls, threads);
        ASSERT_LE(calls, std::max<int64_t>(1, n / grain)) << "a thread got fewer than `grain` items";
      }
    }
  }
}

TEST(Host, RegionsNestAndComeFromSeveralThreads) {
  const StandaloneHost host(cpu_machine(), nullptr, 3);
  std::atomic<int64_t> total = 0;
  const auto work = [&] {
    for (int repeat = 0; repeat < 50; ++repeat) {
      host.parallel_for(6, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) host.parallel_for(10, 1, [&](int64_t b, int64_t e) { total += e - b; });
      });
    }
  };
  std::thread other(work), third(work);
  work();
  other.join(), third.join();
  EXPECT_EQ(total, 3 * 50 * 6 * 10);
}

TEST(Host, AnErrorOfTheBodyArrivesAtTheCaller) {
  const StandaloneHost host(cpu_machine(), nullptr, 3);
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_THROW(host.parallel_for(3, 1, [&](int64_t begin, int64_t) { LIGER_CHECK(begin != repeat % 3, "stop"); }), Error);
  }
  std::atomic<int> calls = 0;
  host.parallel_for(3, 1, [&](int64_t, int64_t) { ++calls; });
  EXPECT_EQ(calls, 3) << "the pool does not work after an error";
}

TEST(Host, ScratchIsAlignedDistinctAndReused) {
  const StandaloneHost host;
  const Scratch empty = host.scratch(0);
  EXPECT_NE(empty.data, nullptr);
  std::vector<Scratch> held;
  std::set<void*> addresses;
  for (const size_t bytes : {1, 63, 64, 65, 4096, 1 << 20, 70 << 20}) {
    held.push_back(host.scratch(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(held.back().data) % 64, 0u);
    std::memset(held.back().data, 0xab, bytes);
    addresses.insert(held.back().data);
  }
  EXPECT_EQ(addresses.size(), held.size());
  void* const megabyte = held[5].data;
  held.clear();
  EXPECT_EQ(host.scratch((1 << 20) - 100).data, megabyte) << "scratch given back is not used again";
}

TEST(Host, ScratchMayOutliveItsHost) {
  Scratch scratch;
  {
    const StandaloneHost host;
    scratch = host.scratch(100);
  }
  std::memset(scratch.data, 1, 100);
}

TEST(Host, NegativeThreadsAreRefused) { EXPECT_THROW(StandaloneHost(cpu_machine(), nullptr, -1), Error); }

struct GemmCase {
  int64_t m, n, k;
  DType in, out;
  bool transpose_a = false, transpose_b = false;
  float alpha = 1, beta = 0;
  int64_t padding = 0;
};

void check_gemm(const GemmCase& g, const Host& host, void (*run)(const Gemm&, const Host&)) {
  SCOPED_TRACE(::testing::Message() << g.m << " x " << g.n << " x " << g.k << ' ' << name(g.in) << " -> " << name(g.out) << ", transposed "
                                    << g.transpose_a << g.transpose_b << ", alpha " << g.alpha << ", beta " << g.beta);
  Matrix a(g.in, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.padding);
  Matrix b(g.in, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.padding);
  Matrix c = Matrix::output(g.out, g.m, g.n, g.padding);
  a.random(1), b.random(2);
  if (g.beta != 0) c.random(3);  // else c holds NaNs, which beta = 0 must not read
  const Matrix before = c;
  run({.a = a.data(),
       .b = b.data(),
       .c = c.data(),
       .m = g.m,
       .n = g.n,
       .k = g.k,
       .lda = a.stride(),
       .ldb = b.stride(),
       .ldc = c.stride(),
       .transpose_a = g.transpose_a,
       .transpose_b = g.transpose_b,
       .in = g.in,
       .out = g.out,
       .alpha = g.alpha,
       .beta = g.beta},
      host);
  // Rows of op(a) and columns of op(b), decoded once.
  std::vector<double> left(g.m * g.k), right(g.n * g.k);
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t k = 0; k < g.k; ++k) left[i * g.k + k] = g.transpose_a ? a.at(k, i) : a.at(i, k);
  }
  for (int64_t j = 0; j < g.n; ++j) {
    for (int64_t k = 0; k < g.k; ++k) right[j * g.k + k] = g.transpose_b ? b.at(j, k) : b.at(k, j);
  }
  const auto sum = [&](int64_t i, int64_t j, bool sizes) {
    double total = 0;
    for (int64_t k = 0; k < g.k; ++k) {
      const double p = left[i * g.k + k] * right[j * g.k + k];
      total += sizes ? std::abs(p) : p;
    }
    const double old = g.beta == 0 ? 0 : g.beta * before.at(i, j);
    return g.alpha * total + (sizes ? std::abs(old) : old);
  };
  expect_near(
      c, [&](int64_t i, int64_t j) { return sum(i, j, false); },
      [&](int64_t i, int64_t j) {
        return std::abs(sum(i, j, true)) * (4 + std::sqrt(static_cast<double>(g.k))) * unit_roundoff(DType::kF32);
      },
      "c");
}

void check_gemms(const Host& host, void (*run)(const Gemm&, const Host&)) {
  const bool cuda = host.machine.backend == Backend::kCuda;
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      for (const DType in : kDTypes) {
        for (const DType out : kDTypes) {
          if (cuda && out != in && out != DType::kF32) continue;  // cuBLASLt does not write them
          check_gemm({.m = 13, .n = 35, .k = 19, .in = in, .out = out, .transpose_a = ta, .transpose_b = tb, .padding = 3}, host, run);
        }
        check_gemm({.m = 100, .n = 50, .k = 300, .in = in, .out = in, .transpose_a = ta, .transpose_b = tb}, host, run);
      }
      check_gemm({.m = 7,
                  .n = 9,
                  .k = 5,
                  .in = DType::kF32,
                  .out = DType::kF32,
                  .transpose_a = ta,
                  .transpose_b = tb,
                  .alpha = 0.5f,
                  .beta = 1.5f},
                 host, run);
    }
  }
  for (const int64_t m : {1, 6, 12, 13, 97}) {
    for (const int64_t n : {1, 8, 33, 530})
      check_gemm({.m = m, .n = n, .k = 3, .in = DType::kF32, .out = DType::kF32, .beta = 1}, host, run);
  }
  if (cuda) return;
  check_gemm({.m = 2, .n = 3, .k = 0, .in = DType::kF32, .out = DType::kF32, .beta = 2}, host, run);
  check_gemm({.m = 2, .n = 3, .k = 0, .in = DType::kBF16, .out = DType::kF32}, host, run);
  check_gemm({.m = 0, .n = 3, .k = 2, .in = DType::kF32, .out = DType::kF32}, host, run);
}

TEST(Gemm, HostAgainstFp64) {
  check_gemms(StandaloneHost(cpu_machine(), nullptr, 3), [](const Gemm& g, const Host& host) { host.gemm(g); });
}

TEST(Gemm, OwnLoopOfEveryIsaAgainstFp64) {
  for (int isa = kBaseline; isa <= cpu_machine().floor; ++isa) {
    Machine machine = cpu_machine();
    machine.floor = isa;
    SCOPED_TRACE(describe(machine));
    check_gemms(StandaloneHost(machine, nullptr, 3), gemm_portable);
  }
}

#ifdef LIGER_HAS_CUDA
// Operands and result travel to the device and back; the margins of c travel with it.
void gemm_by_copy(const Gemm& g, const Host& host) {
  const auto copy = [&](const void* p, int64_t rows, int64_t columns, int64_t ld, DType t) {
    const size_t bytes = rows == 0 ? 0 : ((rows - 1) * ld + columns) * size_of(t);
    const Scratch scratch = host.scratch(bytes);
    check_cuda(cudaMemcpyAsync(scratch.data, p, bytes, cudaMemcpyHostToDevice, stream_of(host)), "test", "copying");
    return std::pair{scratch, bytes};
  };
  Gemm on_device = g;
  const Scratch a = copy(g.a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.lda, g.in).first;
  const Scratch b = copy(g.b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.ldb, g.in).first;
  const auto [c, bytes] = copy(g.c, g.m, g.n, g.ldc, g.out);
  on_device.a = a.data, on_device.b = b.data, on_device.c = c.data;
  host.gemm(on_device);
  check_cuda(cudaMemcpyAsync(g.c, c.data, bytes, cudaMemcpyDeviceToHost, stream_of(host)), "test", "copying");
  check_cuda(cudaStreamSynchronize(stream_of(host)), "test", "waiting");
}

TEST(Gemm, CudaHostAgainstFp64) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  check_cuda(cudaSetDevice(0), "test", "cudaSetDevice");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream), "test", "cudaStreamCreate");
  check_gemms(StandaloneHost(cuda_machine(0), stream), gemm_by_copy);
  check_cuda(cudaStreamDestroy(stream), "test", "cudaStreamDestroy");
}
#endif

TEST(Gemm, DoesNotDependOnTheNumberOfThreads) {
  const int64_t n = 200;
  Matrix a(DType::kBF16, n, n), b(DType::kBF16, n, n);
  a.random(1), b.random(2);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 4}) {
    std::vector<float> c(n * n);
    gemm_portable({.a = a.data(),
                   .b = b.data(),
                   .c = c.data(),
                   .m = n,
                   .n = n,
                   .k = n,
                   .lda = n,
                   .ldb = n,
                   .ldc = n,
                   .in = DType::kBF16,
                   .out = DType::kF32},
                  StandaloneHost(cpu_machine(), nullptr, threads));
    results.push_back(std::move(c));
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace liger::test
