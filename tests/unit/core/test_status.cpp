// The bits of a status word as sentences.
#include <kvpolicy/core/status.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using namespace kvpolicy;

TEST_CASE("every bit has a sentence of its own") {
    std::vector<std::string> all;
    for_each_status(~std::uint32_t{0}, [&](const char* sentence) { all.emplace_back(sentence); });
    CHECK(all.size() == 8);
    for (std::size_t i = 0; i < all.size(); ++i) {
        CHECK(all[i].size() > 20);
        for (std::size_t j = 0; j < i; ++j) {
            CHECK(all[i] != all[j]);
        }
    }
}

TEST_CASE("a word says its bits, and nothing else") {
    std::vector<std::string> said;
    for_each_status(status_layer_repeated | status_nan_score | 1u << 30,
                    [&](const char* sentence) { said.emplace_back(sentence); });
    CHECK(said == std::vector<std::string>{
                      "a score was NaN, and ranked last",
                      "a layer was called again before advance(): the second call left this sequence alone"});
    for_each_status(status_ok, [](const char*) { FAIL("nothing is wrong"); });
    static_assert(status_sentence(0) == nullptr && status_sentence(3) == nullptr);
}
