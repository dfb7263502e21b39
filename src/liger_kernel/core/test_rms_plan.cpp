// What the kernels of cuda/rms.cuh rely on, for every width: the plan covers the row, fits the device, and its blocks are resident.
#include <gtest/gtest.h>

#include <liger_kernel/core/rms.h>

namespace liger {
namespace {

Machine gpu(int floor, int multiprocessors, int64_t kilobytes) {
  return {.backend = Backend::kCuda, .floor = floor, .multiprocessors = multiprocessors, .shared_memory = kilobytes << 10, .device = 0};
}

void covers(const RowPlan& p, int64_t needed) {
  ASSERT_GE(int64_t{p.lanes} * p.vectors, needed);
  ASSERT_EQ(p.threads % 32, 0);
  ASSERT_EQ(p.threads % p.lanes, 0);
  ASSERT_LE(p.threads, kRowMaxThreads);
  ASSERT_TRUE(p.lanes > 32 ? p.lanes == p.threads : (p.lanes & (p.lanes - 1)) == 0) << p.lanes;
}

TEST(RowPlan, CoversTheRowAndFitsTheDevice) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t vector = 16 / size_of(dtype);
    for (int64_t needed = 1; needed <= kRowMaxVectors; ++needed) {
      SCOPED_TRACE(needed);
      const RowPlan forward = plan_rows_forward(needed * vector, dtype);
      covers(forward, needed);
      ASSERT_LE(forward.threads, kRowMaxForwardThreads);
      for (const Machine& machine : {gpu(80, 108, 163), gpu(86, 84, 99), gpu(90, 132, 227)}) {
        for (const int streams : {2, 3}) {
          const RowPlan p = plan_rows_backward(1 << 20, needed * vector, dtype, streams, machine);
          covers(p, needed);
          if (p.stages < 1) continue;  // refused
          const int64_t each = p.shared + 256 + 1024, blocks = (p.blocks + machine.multiprocessors - 1) / machine.multiprocessors;
          ASSERT_LE(p.shared + 256, machine.shared_memory);
          ASSERT_LE(blocks * each, machine.shared_memory + 1024);
          ASSERT_LE(blocks * p.threads, p.vectors == 1 || blocks == 1 ? 1024 : 640);
          ASSERT_GE(p.shared, int64_t{4} * p.threads / p.lanes * needed * vector);  // the shares of dw at the end
        }
      }
    }
  }
}

TEST(RowPlan, ModelShapesOnHopper) {
  const Machine hopper = gpu(90, 132, 227);
  const auto plan = [&](int64_t cols, int streams) { return describe(plan_rows_backward(16384, cols, DType::kBF16, streams, hopper)); };
  EXPECT_EQ(describe(plan_rows_forward(128, DType::kBF16)), "8 threads a row x 2 vectors of 16 bytes, 16 rows a block");
  EXPECT_EQ(describe(plan_rows_forward(4096, DType::kBF16)), "128 threads a row x 4 vectors of 16 bytes, 1 rows a block");
  EXPECT_EQ(plan(128, 2), "16 threads a row x 1 vectors of 16 bytes, 528 blocks, 3 rows staged");
  EXPECT_EQ(plan(4096, 2), "256 threads a row x 2 vectors of 16 bytes, 264 blocks, 3 rows staged");
  EXPECT_EQ(plan(4096, 3), "256 threads a row x 2 vectors of 16 bytes, 264 blocks, 3 rows staged");
  EXPECT_EQ(plan(16384, 3), "1024 threads a row x 2 vectors of 16 bytes, 132 blocks, 2 rows staged");
}

TEST(RowPlan, RefusalsSayWhy) {
  const auto reason = [](int64_t cols, DType weight, int64_t stride) {
    const char* r = reject_rows(cols, DType::kBF16, weight, {stride}, {nullptr});
    return std::string(r ? r : "");
  };
  EXPECT_EQ(reason(4096, DType::kF32, 4096), "");
  EXPECT_EQ(reason(4096, DType::kF16, 4096), "weight is neither x's type nor fp32");
  EXPECT_EQ(reason(4097, DType::kF32, 4104), "a row is not a multiple of 16 bytes");
  EXPECT_EQ(reason(4096, DType::kF32, 4097), "rows are not 16-byte aligned");
  EXPECT_EQ(reason(65536, DType::kF32, 65536), "a row is wider than a block's threads hold");
}

}  // namespace
}  // namespace liger
