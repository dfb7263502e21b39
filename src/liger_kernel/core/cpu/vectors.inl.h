// A row as vectors: whole ones, and at most one whose first n lanes count. Compiled once per ISA, like simd.inl.h.
#pragma once
#include <liger_kernel/core/cpu/simd.inl.h>

namespace liger {
namespace {

// A whole vector, where a number would say how many of its lanes count. Lanes that do not count read as zero.
struct All {};
template <class T>
F load(const T* p, All) {
  return load(p);
}
template <class T>
void store(F v, T* p, All) {
  store(v, p);
}

// body(j, n) for every vector of a row.
template <class Body>
void for_each_vector(int64_t cols, Body&& body) {
  const int64_t whole = cols / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) body(j, All{});
  if (whole < cols) body(whole, cols - whole);
}

}  // namespace
}  // namespace liger
