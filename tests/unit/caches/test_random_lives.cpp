// Random lives of caches (support/cache_life.hpp): every policy, both kinds of caches. KVPOLICY_LIFE_SECONDS
// in the environment runs them for so long, with other numbers from KVPOLICY_LIFE_SEED on.
#include "support/cache_life_policies.hpp"
#include "support/loops.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

namespace {

std::uint32_t number_of(const char* name, std::uint32_t otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

/// A life of one policy.
template <test::life::Which which>
void live(std::uint32_t seed) {
    std::string error;
    try {
        test::life::run<test::HostSide, which>(seed, 1, 1 + static_cast<std::int32_t>(seed % 5), 50,
                                               seed % 4 == 3);
    } catch (const std::exception& found) {
        error = found.what();
    }
    CAPTURE(seed);
    CAPTURE(static_cast<int>(which));
    REQUIRE_MESSAGE(error.empty(), error);
}

template <int... Which>
void live_all(std::uint32_t seed, std::integer_sequence<int, Which...>) {
    (live<static_cast<test::life::Which>(Which)>(seed), ...);
}

}  // namespace

TEST_CASE("every sequence is what a replay of its calls gives") {
    const std::uint32_t first = number_of("KVPOLICY_LIFE_SEED", 1);
    const auto seconds = std::chrono::seconds(number_of("KVPOLICY_LIFE_SECONDS", 0));
    const auto begin = std::chrono::steady_clock::now();
    std::uint32_t seed = first;
    for (; seed < first + test::rounds(30, 8) || std::chrono::steady_clock::now() - begin < seconds; ++seed) {
        live_all(seed, std::make_integer_sequence<int, test::life::policies>{});
    }
    if (seconds.count() != 0) {
        std::printf("%u seeds of %d policies\n", seed - first, test::life::policies);
    }
}
