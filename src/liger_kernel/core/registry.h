// The ops of this build register themselves, so that tools can list and explain them without a central list.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <liger_kernel/core/device.h>
#include <liger_kernel/core/dtype.h>

namespace liger {

// What `explain` is asked about; each op reads the shape in its own way and says so when it does not fit.
struct Problem {
  std::vector<int64_t> shape;
  DType dtype;
  Machine machine;
};

struct OpInfo {
  const char* name;
  const char* shape;                       // how explain reads the shape, e.g. "rows x columns"
  std::string (*explain)(const Problem&);  // rows as of explain_rows(), then the plan
  std::vector<std::string> (*variants)();  // names of all passes' variants
};

const std::vector<OpInfo>& ops();

struct Registration {
  explicit Registration(const OpInfo& info);
};

}  // namespace liger
