// What the ops' test.cpp share: matrices with sentinels, random values, exact conversions of their own (those of
// core/cpu/simd.inl.h are under test), comparison with an fp64 reference, and every CPU variant in turn. Not installed.
#pragma once
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <liger_kernel/core/registry.h>
#include <liger_kernel/core/standalone.h>

namespace liger::test {

inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Significant bits with the hidden one, and the exponent of the smallest normal number.
inline int digits(DType t) { return t == DType::kF32 ? 24 : t == DType::kBF16 ? 8 : 11; }
inline int least_exponent(DType t) { return t == DType::kF16 ? -14 : -126; }
inline double unit_roundoff(DType t) { return std::ldexp(1, -digits(t)); }
inline double smallest(DType t) { return std::ldexp(1, least_exponent(t) - digits(t) + 1); }
inline double largest(DType t) {
  return t == DType::kF32 ? std::numeric_limits<float>::max() : t == DType::kBF16 ? std::ldexp(255, 120) : 65504.;
}

// The value of an IEEE-like bit pattern of `t`'s layout, and the pattern nearest to a value (ties to even).
inline double decode(DType t, uint32_t bits) {
  const int width = t == DType::kF32 ? 32 : 16, mantissa_bits = digits(t) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent_mask = (1u << (width - 1 - mantissa_bits)) - 1;
  const uint32_t exponent = (bits >> mantissa_bits) & exponent_mask;
  const double sign = bits >> (width - 1) ? -1 : 1;
  if (exponent == exponent_mask) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  if (exponent == 0) return sign * mantissa * smallest(t);
  return sign * std::ldexp(1. + std::ldexp(mantissa, -mantissa_bits), static_cast<int>(exponent) + least_exponent(t) - 1);
}
inline uint32_t encode(DType t, double v) {
  const int width = t == DType::kF32 ? 32 : 16, mantissa_bits = digits(t) - 1;
  const uint32_t infinity = ((1u << (width - 1 - mantissa_bits)) - 1) << mantissa_bits;
  const uint32_t sign = std::signbit(v) ? 1u << (width - 1) : 0;
  if (std::isnan(v)) return infinity | 1u << (mantissa_bits - 1);
  v = std::abs(v);
  if (std::isinf(v)) return sign | infinity;
  const int exponent = std::max(v > 0 ? std::ilogb(v) : -1000, least_exponent(t));
  // In units of the last place; a carry into the next binade is right in the pattern as it is.
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(v, mantissa_bits - exponent)));
  const uint32_t pattern = units + (static_cast<uint32_t>(exponent - least_exponent(t)) << mantissa_bits);
  return sign | (pattern < infinity ? pattern : infinity);
}
inline double rounded_to(DType t, double v) { return decode(t, encode(t, v)); }

// A matrix of `t` with a row stride of its own. `offset` elements lie before it, so that its base is off 16-byte alignment.
// Every byte outside the elements is 0xff: a NaN in each type, which spoils a result that reads it. Inputs end with their last
// element, where the address sanitizer watches; outputs are followed by a margin, and untouched() looks at all of it.
class Matrix {
 public:
  Matrix(DType type, int64_t rows, int64_t columns, int64_t padding = 0, int64_t offset = 0, bool output = false)
      : type_(type), rows_(rows), columns_(columns), stride_(columns + padding), offset_(offset) {
    const int64_t elements = rows == 0 ? 0 : (rows - 1) * stride_ + columns;
    bytes_.assign((offset + elements + (output ? 40 : 0)) * size_of(type), 0xff);
  }
  static Matrix output(DType type, int64_t rows, int64_t columns, int64_t padding = 0, int64_t offset = 0) {
    return Matrix(type, rows, columns, padding, offset, true);
  }

  // Normal values times `scale`, rounded to the type; the same seed gives the same values in every layout.
  Matrix& random(uint32_t seed, double scale = 1) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal(0, scale);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < columns_; ++j) set(i, j, normal(generator));
    }
    return *this;
  }

  double at(int64_t i, int64_t j) const {
    uint32_t bits = 0;
    std::memcpy(&bits, address(i, j), size_of(type_));
    return decode(type_, bits);
  }
  void set(int64_t i, int64_t j, double v) {
    const uint32_t bits = encode(type_, v);
    std::memcpy(const_cast<uint8_t*>(address(i, j)), &bits, size_of(type_));
  }

  // Whether every byte outside the elements is as it was.
  bool untouched() const {
    std::vector<uint8_t> copy = bytes_;
    for (int64_t i = 0; i < rows_; ++i) std::memset(copy.data() + position(i, 0), 0xff, columns_ * size_of(type_));
    for (const uint8_t b : copy) {
      if (b != 0xff) return false;
    }
    return true;
  }

  void* data() { return bytes_.data() + position(0, 0); }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data() + position(0, 0));
  }
  DType type() const { return type_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t stride() const { return stride_; }

 private:
  int64_t position(int64_t i, int64_t j) const { return (offset_ + i * stride_ + j) * size_of(type_); }
  const uint8_t* address(int64_t i, int64_t j) const { return bytes_.data() + position(i, j); }

  DType type_;
  int64_t rows_, columns_, stride_, offset_;
  std::vector<uint8_t> bytes_;
};

// Every element of `actual` within bound(i, j) of truth(i, j), plus one rounding to its type; nothing around it written.
template <class Truth, class Bound>
void expect_near(const Matrix& actual, Truth&& truth, Bound&& bound, const char* what) {
  const DType t = actual.type();
  int shown = 0;
  for (int64_t i = 0; i < actual.rows(); ++i) {
    for (int64_t j = 0; j < actual.columns() && shown < 3; ++j) {
      const double got = actual.at(i, j), want = truth(i, j);
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      if (std::isinf(got) && std::abs(want) + bound(i, j) >= largest(t) && std::signbit(got) == std::signbit(want)) continue;
      const double allowed = bound(i, j) + unit_roundoff(t) * std::abs(want) + smallest(t);
      if (std::abs(got - want) <= allowed) continue;
      ADD_FAILURE() << what << '[' << i << ", " << j << "] is " << got << ", expected " << want << " +- " << allowed << " (" << name(t)
                    << ')';
      ++shown;
    }
  }
  EXPECT_TRUE(actual.untouched()) << what << ": written outside its elements";
}

// An environment variable for the time of a scope.
class Environment {
 public:
  Environment(std::string variable, const char* value) : variable_(std::move(variable)) { setenv(variable_.c_str(), value, 1); }
  ~Environment() { unsetenv(variable_.c_str()); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const std::string variable_;
};

inline std::string forcing_variable(std::string op) {
  for (char& c : op) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return "LIGER_" + op;
}

// body(host) with each of the op's per-ISA CPU variants that this machine runs, forced by LIGER_<OP>. The host has three
// threads whatever the machine, so that rows are split.
template <class Body>
void for_each_cpu_variant(const char* op, Body&& body) {
  static const StandaloneHost& host = *new StandaloneHost(cpu_machine(), nullptr, 3);
  constexpr const char* kVariants[] = {"cpu", "cpu_avx2", "cpu_avx512"};
  for (int isa = kBaseline; isa <= host.machine.floor; ++isa) {
    const Environment forced(forcing_variable(op), kVariants[isa]);
    SCOPED_TRACE(std::string(op) + ", variant " + kVariants[isa]);
    body(static_cast<const Host&>(host));
  }
}

}  // namespace liger::test
