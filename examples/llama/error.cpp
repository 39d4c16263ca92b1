#include "error.hpp"

#include <algorithm>

namespace llama {

namespace {
constexpr std::size_t max_seq_len = 100;
}

std::string clipped(std::string_view text) {
    return fmt::format("{}{}", text.substr(0, max_seq_len), text.size() > max_seq_len ? "..." : "");
}

std::string printable(std::string_view name) {
    std::string text;
    for (const char c : name.substr(0, max_seq_len)) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') text += '\\';
        if (byte < 0x20 || byte >= 0x7f)
            text += fmt::format("\\x{:02x}", byte);
        else
            text += c;
    }
    return fmt::format("\"{}\"{}", text, name.size() > max_seq_len ? "..." : "");
}

std::string shape_text(std::span<const std::int64_t> shape) {
    constexpr std::size_t most = 8;
    const auto shown = shape.first(std::min(most, shape.size()));
    return fmt::format("[{}{}]", fmt::join(shown, ", "), shape.size() > most ? ", ..." : "");
}

}  // namespace llama
