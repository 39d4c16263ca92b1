// LinearScorer and MlpScorer inside a FixedBudgetCache's calls.
#include "scorers_case.hpp"

using namespace kvpolicy;
using namespace test;

TEST_CASE("few calls") {
    check_scorer(sized<LinearScorer<>>(), true, 3, 6);
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    check_scorer(silu, true, 3, 6);
    check_scorer<bf16>(silu, true, 3, 6);
    auto gelu = sized<BasicMlpScorer<KeyValueInput, GeluErf>>();
    gelu.hidden = 5;
    check_scorer(gelu, false, 3, 6);
}

TEST_CASE("LinearScorer") {
    check_scorer(sized<LinearScorer<>>(), true);
    check_scorer(sized<LinearScorer<>>(), false);
}

TEST_CASE("MlpScorer") {
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    check_scorer(silu, true);
    auto gelu = sized<BasicMlpScorer<KeyValueInput, GeluErf>>();
    gelu.hidden = 5;
    check_scorer(gelu, false);
}

// Steps on the tensor cores begin beside the scorer's launch: as clusters, with a block that only decides,
// and with one block a head.
TEST_CASE("16-bit caches") {
    auto silu = sized<MlpScorer<>>();
    silu.hidden = 37;
    for (const std::int32_t count : {3, 40, 150}) {
        CAPTURE(count);
        check_scorer<bf16>(silu, true, count, 12);
    }
}
