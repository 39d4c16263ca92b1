// A number that tells data apart.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace examples {

/// 64 bits of all that was added, in its order; no protection against data made to have the same.
class Fingerprint {
  public:
    void add(const void* bytes, std::size_t count) {
        const auto* at = static_cast<const unsigned char*>(bytes);
        mix(count);
        for (; count >= 8; count -= 8, at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, at, 8);
            mix(word);
        }
        std::uint64_t rest = 0;
        std::memcpy(&rest, at, count);
        mix(rest);
    }
    void add(std::string_view text) { add(text.data(), text.size()); }
    void add(std::uint64_t number) { mix(number); }

    [[nodiscard]] std::uint64_t value() const { return state_; }
    [[nodiscard]] std::string text() const { return fmt::format("{:016x}", state_); }

  private:
    /// A permutation of the state for each word, so that no bit of a word is lost.
    void mix(std::uint64_t word) {
        state_ = (state_ ^ word) * 0x9e3779b97f4a7c15u;
        state_ ^= state_ >> 32;
    }

    std::uint64_t state_ = 0x6b76706f6c696379u;
};

}  // namespace examples
