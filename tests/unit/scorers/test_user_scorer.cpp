// Scorers of one's own need no more than their formula, and go wherever the library's go.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

using namespace kvpolicy;

namespace {

/// Keys of a small norm draw much attention (Devoto et al., 2024): the score is the norm's negative.
struct KeyNorm {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    std::int32_t head_dim_qk = 0;

    float score(std::int32_t, const float* key, const float*, float*) const {
        float sum = 0.0f;
        for (std::int32_t i = 0; i < head_dim_qk; ++i) {
            sum += key[i] * key[i];
        }
        return -std::sqrt(sum);
    }
    std::size_t scratch_size() const { return 0; }
};
static_assert(StatelessScorer<KeyNorm> && Scorer<KeyNorm>);

/// A state of one's own: how much larger a key's first number is than the mean of all so far.
struct AboveMean {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;

    std::size_t state_size() const { return 2; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { state[0] = state[1] = 0.0f; }
    void absorb(std::int32_t, float* state, const float* key, const float*, float*) const {
        state[0] += key[0];
        state[1] += 1.0f;
    }
    float read(std::int32_t, const float* state, const float* key, const float*, float*) const {
        return key[0] - state[0] / state[1];
    }
};
static_assert(StatefulScorer<AboveMean> && Scorer<AboveMean>);

}  // namespace

TEST_CASE("a user's scorers score sequences and fit a policy") {
    const float k[] = {3, 4, 0, 1, 6, 8, 5, 12};  // one head, four tokens of two
    const auto keys = view_bhsd(k, 1, 1, 4, 2);
    const host ctx(2);
    const auto norms = test::score_all(ctx, KeyNorm{2}, keys, keys, {1, 4}, 0, form::fastest, 9.0f);
    CHECK(norms == std::vector<float>{-5, -1, -10, -13});
    const auto above = test::score_all(ctx, AboveMean{}, keys, keys, {1, 4}, 2, form::fastest, 9.0f);
    CHECK(above == std::vector<float>{0, -3.5f, 9, 9});

    const Policy<Sink<1>, Window<2>, TopKBudget<1>, KeyNorm> policy{{}, {}, {}, KeyNorm{2}};
    CHECK(policy.scorer().head_dim_qk == 2);
}

TEST_CASE("a user's scorer has no chunkwise form, and says so") {
    const float k[2] = {1, 2};
    float score = 0.0f;
    const host ctx(1);
    const ScoreOptions options{form::chunkwise};
    CHECK_REFUSED(score_sequence(ctx, AboveMean{}, view_bhsd(k, 1, 1, 2, 1), view_bhsd(k, 1, 1, 2, 1), {1, 2},
                                 0, view_bhs(&score, 1, 1, 1), {}, options),
                  "scores: 1 x 1 x 1");
    float two[2];
    CHECK_REFUSED(score_sequence(ctx, AboveMean{}, view_bhsd(k, 1, 1, 2, 1), view_bhsd(k, 1, 1, 2, 1), {1, 2},
                                 0, view_bhs(two, 1, 1, 2), {}, options),
                  "only mLSTMScorer has a chunkwise form");
}
