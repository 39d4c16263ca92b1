#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace llama {

/// What every function of this example throws: one sentence that names the file or argument, its value and
/// what is allowed.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
    throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// What comes from a file is made safe to print first.

/// A name: quoted, escaped, and cut if very long.
std::string printable(std::string_view name);
/// Text that is already escaped, such as JSON: cut if very long.
std::string clipped(std::string_view text);
/// "[2, 3]"
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace llama
