// Errors of the library: one exception type, whose message names the op, the values and the remedy.
// Inside PyTorch it arrives as RuntimeError (ValueError before torch 2.12); checks that owe another exception are in Python.
#pragma once
#include <sstream>
#include <stdexcept>

namespace liger {

struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace liger

// The message is built only when the condition fails.
#define LIGER_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::liger::fail(__VA_ARGS__); \
  } while (false)
