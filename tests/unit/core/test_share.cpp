// Ratios as counts: a share that a float or a double stores counts as the decimal number that was written.
#include <kvpolicy/core/share.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using namespace kvpolicy;

static_assert(count_of_share(0.7f, 10) == 7 && count_of_share(0.9f, 10) == 9);
static_assert(count_of_share(0.29f, 100) == 29 && count_of_share(0.57f, 100) == 57);
static_assert(count_of_share(0.29, 100) == 29 && count_of_share(0.57, 100) == 57);
static_assert(count_of_share(0.7f, 9) == 6 && count_of_share(0.1f, 9) == 0 && count_of_share(0.5f, 1) == 0);
static_assert(count_of_share(0.0f, 1000) == 0 && count_of_share(1.0f, 1000) == 1000);
static_assert(count_of_share(1.0f, std::int64_t{1} << 40) == std::int64_t{1} << 40);
static_assert(nearest_count_of_share(0.35f, 10) == 4 && nearest_count_of_share(0.34f, 10) == 3);
static_assert(nearest_count_of_share(1.0f, 3) == 3 && nearest_count_of_share(0.0f, 3) == 0);

TEST_CASE("every decimal share with three digits, of up to 5000") {
    for (std::int64_t thousandths = 0; thousandths <= 1000; ++thousandths) {
        const double share = static_cast<double>(thousandths) / 1000.0;
        const auto stored = static_cast<float>(share);
        for (std::int64_t n = 0; n <= 5000; n += n < 200 ? 1 : 61) {
            const std::int64_t floored = thousandths * n / 1000, nearest = (thousandths * n + 500) / 1000;
            REQUIRE(count_of_share(stored, n) == floored);
            REQUIRE(count_of_share(share, n) == floored);
            REQUIRE(nearest_count_of_share(stored, n) == nearest);
            REQUIRE(nearest_count_of_share(share, n) == nearest);
        }
    }
}
