// variants<Args>() of an op's selector: the rows of LIGER_VARIANTS, the op's variants.inc, which the selector names before.
template <class Args>
std::span<const Variant<Args>> variants() {
  static const std::vector<Variant<Args>> table = [] {
    std::vector<Variant<Args>> rows;
#include <liger_kernel/core/variants_rows.inl>
#include LIGER_VARIANTS
    return rows;
  }();
  return table;
}
