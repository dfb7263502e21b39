// Selection, forced variants, explanation, registry and the C entry points, on an op that exists for this test alone.
#include <liger_kernel/core/testing.h>
#include <liger_kernel/core/variant.h>

extern "C" {
int64_t liger_ops(char* out, int64_t size);
int64_t liger_machine(int device, char* out, int64_t size);
int64_t liger_explain(const char* op, const int64_t* shape, int rank, const char* dtype, int device, char* out, int64_t size);
}

namespace liger::test {
namespace {

struct Args {
  int64_t cols;
  std::string* ran;
};

const char* even_only(const Args& a, const Machine&) { return a.cols % 2 ? "an odd number of columns" : nullptr; }

std::span<const Variant<Args>> rows() {
  static const std::vector<Variant<Args>> table = {
      {"cuda_new", Backend::kCuda, 90, accept, [](const Args& a, const Host&) { *a.ran = "cuda_new"; }},
      {"cuda_old", Backend::kCuda, 80, accept, [](const Args& a, const Host&) { *a.ran = "cuda_old"; }},
      {"cpu_absent", Backend::kCpu, kBaseline, accept, nullptr},
      {"cpu_avx512", Backend::kCpu, kAvx512, accept, [](const Args& a, const Host&) { *a.ran = "cpu_avx512"; }},
      {"cpu_even", Backend::kCpu, kAvx2, even_only, [](const Args& a, const Host&) { *a.ran = "cpu_even"; }},
      {"cpu", Backend::kCpu, kBaseline, accept, [](const Args& a, const Host&) { *a.ran = "cpu"; }},
  };
  return table;
}

const Registration registration({"test_op", "columns",
                                 [](const Problem& p) {
                                   return explain_rows("forward", rows(), {p.shape.at(0), nullptr}, p.machine);
                                 },
                                 [] { return names(rows()); }});

Machine cpu(int isa) { return {.backend = Backend::kCpu, .floor = isa}; }
Machine cuda(int sm) { return {.backend = Backend::kCuda, .floor = sm, .multiprocessors = 132, .device = 0}; }

std::string chosen(int64_t cols, const Machine& machine) {
  std::string ran;
  const Args args{cols, &ran};
  select("test_op", rows(), args, machine).run(args, cpu_host());
  return ran;
}

std::string message(int64_t cols, const Machine& machine) {
  try {
    chosen(cols, machine);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Variants, TheFirstRowThatAcceptsRuns) {
  EXPECT_EQ(chosen(4, cpu(kAvx512)), "cpu_avx512");
  EXPECT_EQ(chosen(4, cpu(kAvx2)), "cpu_even");
  EXPECT_EQ(chosen(5, cpu(kAvx2)), "cpu");
  EXPECT_EQ(chosen(4, cpu(kBaseline)), "cpu");
  EXPECT_EQ(chosen(4, cuda(80)), "cuda_old");
  EXPECT_EQ(chosen(4, cuda(90)), "cuda_new");
  EXPECT_EQ(chosen(4, cuda(120)), "cuda_new");
}

TEST(Variants, AMachineThatNoRowFitsIsAnErrorThatNamesTheReasons) {
  const std::string text = message(4, cuda(70));
  EXPECT_NE(text.find("test_op: no variant runs this on cuda, SM 7.0"), std::string::npos) << text;
  EXPECT_NE(text.find("cuda_old: SM 8.0"), std::string::npos) << text;
  EXPECT_EQ(text.find("cpu"), std::string::npos) << text;
}

TEST(Variants, TheEnvironmentForcesOne) {
  const Environment forced(forcing_variable("test_op"), "cpu");
  EXPECT_EQ(chosen(4, cpu(kAvx512)), "cpu");
  EXPECT_EQ(chosen(4, cuda(90)), "cuda_new") << "a CPU variant does not bind CUDA tensors";
}

TEST(Variants, AnEmptyVariableForcesNothing) {
  const Environment forced("LIGER_TEST_OP", "");
  EXPECT_EQ(chosen(4, cpu(kAvx2)), "cpu_even");
}

TEST(Variants, AForcedVariantThatCannotRunSaysWhy) {
  const Environment forced("LIGER_TEST_OP", "cpu_even");
  EXPECT_NE(message(5, cpu(kAvx2)).find("the forced variant cpu_even cannot run: an odd number of columns"), std::string::npos);
  EXPECT_NE(message(4, cpu(kBaseline)).find("cannot run: AVX2 and FMA"), std::string::npos);
  const Environment absent("LIGER_TEST_OP", "cpu_absent");
  EXPECT_NE(message(4, cpu(kAvx2)).find("cannot run: not in this build"), std::string::npos);
}

TEST(Variants, AnUnknownNameListsAllNames) {
  const Environment forced("LIGER_TEST_OP", "cpu_mmx");
  const std::string text = message(4, cpu(kAvx2));
  EXPECT_NE(text.find("LIGER_TEST_OP=cpu_mmx names no variant"), std::string::npos) << text;
  for (const std::string& variant : names(rows())) EXPECT_NE(text.find(variant), std::string::npos) << text;
}

TEST(Variants, ExplainMarksEveryRow) {
  EXPECT_EQ(explain_rows("forward", rows(), {5, nullptr}, cpu(kAvx512)),
            "forward\tcuda_new\trefused\truns on another back end\n"
            "forward\tcuda_old\trefused\truns on another back end\n"
            "forward\tcpu_absent\trefused\tnot in this build\n"
            "forward\tcpu_avx512\tchosen\tAVX-512 with BF16\n"
            "forward\tcpu_even\trefused\tan odd number of columns\n"
            "forward\tcpu\table\tany CPU\n");
}

template <class Call>
std::pair<int64_t, std::string> text_of(Call&& call, int64_t size = 1 << 14) {
  std::string text(size, '?');
  const int64_t length = call(text.data(), size);
  return {length, size > 0 ? text.substr(0, text.find('\0')) : ""};
}

TEST(CApi, ListsAndExplains) {
  const auto [length, list] = text_of(liger_ops);
  EXPECT_EQ(length, static_cast<int64_t>(list.size()));
  EXPECT_NE(list.find("test_op\tcolumns\tcuda_new cuda_old cpu_absent cpu_avx512 cpu_even cpu"), std::string::npos) << list;
  const int64_t shape[] = {5};
  const auto [_, text] = text_of([&](char* out, int64_t size) { return liger_explain("test_op", shape, 1, "bf16", -1, out, size); });
  EXPECT_NE(text.find("chosen"), std::string::npos) << text;
  EXPECT_EQ(text_of([](char* out, int64_t size) { return liger_machine(-1, out, size); }).second, describe(cpu_machine()));
}

TEST(CApi, AShortBufferIsFilledAndTheLengthIsWhole) {
  const auto whole = text_of(liger_ops);
  const auto part = text_of(liger_ops, 5);
  EXPECT_EQ(part.first, whole.first);
  EXPECT_EQ(part.second, whole.second.substr(0, 4));
  EXPECT_EQ(liger_ops(nullptr, 0), whole.first);
}

TEST(CApi, ErrorsHaveANegativeLength) {
  const int64_t shape[] = {5};
  struct Wrong {
    const char *op, *dtype, *message;
  };
  for (const Wrong& wrong : {Wrong{"no_op", "bf16", "no op is called no_op"}, Wrong{"test_op", "int8", "dtype is int8"}}) {
    const auto [length, text] =
        text_of([&](char* out, int64_t size) { return liger_explain(wrong.op, shape, 1, wrong.dtype, -1, out, size); });
    EXPECT_EQ(length, -static_cast<int64_t>(text.size()) - 1);
    EXPECT_NE(text.find(wrong.message), std::string::npos) << text;
  }
#ifndef LIGER_HAS_CUDA
  EXPECT_LT(text_of([](char* out, int64_t size) { return liger_machine(0, out, size); }).first, 0);
#endif
}

TEST(Registry, IsSorted) {
  for (size_t i = 1; i < ops().size(); ++i) EXPECT_LT(std::string_view(ops()[i - 1].name), ops()[i].name);
}

}  // namespace
}  // namespace liger::test
