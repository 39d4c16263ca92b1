// Values of command line options.
#pragma once

#include <llama/error.hpp>

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace examples {

/// A whole text as a number from `least` to `most`; NaN is refused.
template <class Number>
Number number(std::string_view option, std::string_view text, Number least, Number most) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !(value >= least) || !(value <= most)) {
        llama::fail("{}: {} is not allowed; it must be a number, {} to {}", option, llama::clipped(text),
                    least, most);
    }
    return value;
}

/// The value behind option i of the command line; i moves to it. An option without one, or with an empty one
/// (a shell's variable that was not set), is refused.
inline std::string next_value(int argc, char** argv, int& i, std::string_view usage) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) {
        llama::fail("{}: needs a value, or is not understood\n{}", llama::clipped(name), usage);
    }
    const std::string value = argv[++i];
    if (value.empty()) {
        llama::fail("{}: needs a value", llama::clipped(name));
    }
    return value;
}

/// What stands between commas.
inline std::vector<std::string> list(const std::string& text) {
    std::vector<std::string> items;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        items.push_back(text.substr(at, comma - at));
        at = comma + 1;
    }
    return items;
}

}  // namespace examples
