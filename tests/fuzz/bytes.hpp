// What the fuzz targets share: numbers out of a fuzzer's bytes, and a check that ends the program.
#pragma once

#include <kvpolicy/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

namespace fuzz {

/// Reads numbers from a fuzzer's bytes; zeros follow the last one.
class Bytes {
  public:
    Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
    [[nodiscard]] bool empty() const { return left_ == 0; }
    [[nodiscard]] std::size_t left() const { return left_; }
    std::uint8_t byte() {
        if (left_ == 0) {
            return 0;
        }
        --left_;
        return *data_++;
    }
    /// 0 to count - 1.
    std::int32_t below(std::int32_t count) { return byte() % count; }
    bool flag() { return byte() % 2 != 0; }
    template <class Number>
    Number raw() {
        Number value{};
        unsigned char bytes[sizeof value];
        for (unsigned char& one : bytes) {
            one = byte();
        }
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
    /// A number that somebody might pass: mostly small, at times one that breaks things.
    std::int32_t parameter(std::int32_t small) {
        constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
        constexpr std::int32_t odd[] = {
            -1, 0, 1, most, most - 1, std::numeric_limits<std::int32_t>::min(), 1 << 30};
        const std::int32_t which = below(16);
        return which < 7 ? odd[which] : which == 7 ? raw<std::int32_t>() : below(small);
    }
    float number() {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr float odd[] = {0.0f,  -0.0f, infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
                                 -1.0f, 1e-40f};
        const std::int32_t which = below(16);
        return which < 7 ? odd[which] : which == 7 ? raw<float>() : static_cast<float>(below(64) - 32) / 8.0f;
    }

  private:
    const std::uint8_t* data_;
    std::size_t left_;
};

/// Ends the program, which the fuzzer reports, unless `good`.
inline void check(bool good, const char* what) {
    if (!good) {
        std::fprintf(stderr, "fuzz: %s\n", what);
        std::abort();
    }
}

/// Whether call() was refused, with a sentence.
template <class Call>
bool refused(Call&& call) {
    try {
        call();
    } catch (const kvpolicy::invalid_argument& error) {
        check(std::strstr(error.what(), " is not allowed; it must be ") != nullptr, error.what());
        return true;
    }
    return false;
}

}  // namespace fuzz
