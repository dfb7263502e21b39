// One op pass has several implementations. Each op lists them, best first, in its variants.inc; the first row whose back end
// and ISA or SM the machine has, and whose reject() returns no reason, runs. `LIGER_<OP>=name` in the environment forces one.
//
// A row of variants.inc, after `#include <liger_kernel/core/variants_declare.inl>` (declares the functions, for the op's
// header) or `variants_table.inl` (makes the table, for the op's selector):
//   LIGER_CUDA_VARIANT(pass, Args, name, lowest SM, reject)   function pass_name(const Args&, const Host&)
//   LIGER_CPU_VARIANTS(pass, Args, reject)                    pass_cpu_avx512, pass_cpu_avx2, pass_cpu: one source per ISA
// `reject` is `const char* reject(const Args&, const Machine&)`: nullptr to accept, else the reason; `accept` takes all.
#pragma once
#include <span>
#include <string>
#include <vector>

#include <liger_kernel/core/host.h>
#include <liger_kernel/core/registry.h>

namespace liger {

template <class Args>
struct Variant {
  const char* name;
  Backend backend;
  int floor;
  const char* (*reject)(const Args&, const Machine&);
  void (*run)(const Args&, const Host&);  // nullptr: not in this build
};

template <class Args>
const char* accept(const Args&, const Machine&) {
  return nullptr;
}

const char* floor_name(Backend backend, int floor);
// The variant that the environment forces for this op, or nullptr; throws when the op has none of that name.
const char* forced_variant(const char* op);

// Why the row does not run these arguments here; nullptr when it does.
template <class Args>
const char* refusal(const Variant<Args>& row, const Args& args, const Machine& machine) {
  if (row.backend != machine.backend) return "runs on another back end";
  if (row.run == nullptr) return "not in this build";
  if (machine.floor < row.floor) return floor_name(row.backend, row.floor);
  return row.reject(args, machine);
}

template <class Args>
const Variant<Args>& select(const char* op, std::span<const Variant<Args>> rows, const Args& args, const Machine& machine) {
  const char* forced = forced_variant(op);
  for (const auto& row : rows) {
    if (!forced || row.backend != machine.backend || std::string_view(forced) != row.name) continue;
    const char* reason = refusal(row, args, machine);
    LIGER_CHECK(!reason, op, ": the forced variant ", forced, " cannot run: ", reason);
    return row;
  }
  for (const auto& row : rows) {
    if (!refusal(row, args, machine)) return row;
  }
  std::string reasons;
  for (const auto& row : rows) {
    if (row.backend == machine.backend) reasons += std::string("; ") + row.name + ": " + refusal(row, args, machine);
  }
  fail(op, ": no variant runs this on ", describe(machine), reasons);
}

// One line per row: pass, variant, chosen | able | refused, reason.
template <class Args>
std::string explain_rows(const char* pass, std::span<const Variant<Args>> rows, const Args& args, const Machine& machine) {
  std::string text;
  bool chosen = false;
  for (const auto& row : rows) {
    const char* reason = refusal(row, args, machine);
    const char* mark = reason ? "refused" : chosen ? "able" : "chosen";
    chosen |= !reason;
    text += std::string(pass) + '\t' + row.name + '\t' + mark + '\t' + (reason ? reason : floor_name(row.backend, row.floor)) + '\n';
  }
  return text;
}

// The names of all rows of the tables of an op's passes, for its Registration.
template <class... Args>
std::vector<std::string> names(std::span<const Variant<Args>>... tables) {
  std::vector<std::string> result;
  const auto append = [&](const auto& rows) {
    for (const auto& row : rows) result.push_back(row.name);
  };
  (append(tables), ...);
  return result;
}

}  // namespace liger
