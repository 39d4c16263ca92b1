// Random numbers by their place: a number depends on a seed, a stream and an index only, so threads, backends
// and a recomputed forward pass draw the same ones, and nothing has to be stored.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cstdint>

namespace kvpolicy {

/// 64 random bits for (seed, stream, index): splitmix64 at a place of its own for each stream.
KVPOLICY_HOST_DEVICE constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream,
                                                         std::uint64_t index) {
    constexpr auto mix = [](std::uint64_t x) {
        x += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    };
    return mix(mix(mix(seed) ^ stream) + index);
}

/// Uniform in [0, 1), a multiple of 2^-53.
KVPOLICY_HOST_DEVICE constexpr double random_unit(std::uint64_t seed, std::uint64_t stream,
                                                  std::uint64_t index) {
    return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

/// Uniform among 0 .. count - 1, count < 2^32, in integers (the bias is below count / 2^32).
KVPOLICY_HOST_DEVICE constexpr std::uint32_t random_below(std::uint32_t count, std::uint64_t seed,
                                                          std::uint64_t stream, std::uint64_t index) {
    return static_cast<std::uint32_t>(((random_bits(seed, stream, index) >> 32) * count) >> 32);
}

}  // namespace kvpolicy
