// Numbers that the references in tests/reference draw too, so that vectors need not store inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// `count` numbers of a stream: scale * u rounded to fp32, as draw() of the reference makes them.
inline std::vector<float> draw(std::uint64_t stream, std::size_t count, float scale) {
    std::vector<float> out(count);
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t x = ((stream << 32) + i) * 0x9e3779b97f4a7c15u + 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x = x ^ (x >> 31);
        const double unit = static_cast<double>(x >> 40) / 8388608.0 - 1.0;
        out[i] = static_cast<float>(static_cast<double>(scale) * unit);
    }
    return out;
}

}  // namespace test
