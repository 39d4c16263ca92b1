// SP-KV's predictor and WG-KV's gate in caches: the scores of the sequence calls, by steps, chunks
// and draft tokens.
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/sequence.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/wgkv.hpp>

#include "../scorers/scorer_cases.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <utility>

using namespace kvpolicy;

namespace {

constexpr std::int32_t dim = 8, heads = 2, group = 2, width = 12, length = 70;
constexpr CacheShape shape{.max_sequences = 2,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 4,
                           .max_draft_tokens = 5};
constexpr PoolShape pool{.slab_pages = 200, .max_slabs = 1, .max_seq_len = 100};

template <class T>
struct Tokens {
    test::Tensor<T> q{1, heads*group, length, dim}, k{1, heads, length, dim}, v{1, heads, length, dim},
        out{1, heads*group, length, dim};
    test::Tensor<bf16> hidden{1, 1, length, width};
    explicit Tokens(std::uint32_t seed) {
        std::mt19937 generator(seed);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        hidden.fill_normal(generator);
    }
    /// `scores` instead of hidden states, where they are given.
    template <class P>
    void run(const host& ctx, const DualRef<P, T>& ref, std::int32_t from, std::int32_t n, bool steps,
             const test::Plane<float>* scores = nullptr) {
        test::Extras extras;
        if (scores != nullptr) {
            extras.scores = scores->tokens(from, n);
        } else {
            extras.hidden = std::as_const(hidden).tokens(from, n);
        }
        test::call_ref<P, T>(ctx, ref, {.count = 1, .length = n}, std::as_const(q).tokens(from, n),
                             std::as_const(k).tokens(from, n), std::as_const(v).tokens(from, n),
                             out.tokens(from, n), extras, steps);
    }
};

struct Mlp {
    std::vector<float> w1, b1, w2, b2;
    explicit Mlp(std::int64_t layers, std::int64_t inputs, std::int64_t hidden)
        : w1(test::draw(3, test::array::w1, layers * hidden * inputs, 0.5f)),
          b1(test::draw(3, test::array::b1, layers * hidden, 1.0f)),
          w2(test::draw(3, test::array::w2, heads * hidden, 1.0f)),
          b2(test::draw(3, test::array::b2, heads, 0.3f)) {}
    [[nodiscard]] MlpParameters<const float> views() const {
        return {w1.data(), b1.data(), w2.data(), b2.data()};
    }
};

/// `policy` beside the same policy with scores given; steps, chunks, and draft tokens of
/// which some are taken.
template <class T, class Own, class Given>
void check_beside_given(const Own& own, const Given& given, const test::Plane<float>& scores) {
    const host ctx{2};
    test::BoundDual<Given, T> wanted(ctx, shape, pool, given);
    wanted.add_slab(ctx);
    Tokens<T> reference(4);
    for (std::int32_t t = 0; t < length; ++t) {
        reference.run(ctx, wanted.cache.layer(0), t, 1, true, &scores);
        wanted.cache.advance(ctx, {.count = 1});
    }
    CHECK(wanted.cache.usage(0, 0, 0).long_range + wanted.cache.usage(0, 0, 1).long_range > 10);
    CHECK(wanted.cache.usage(0, 0, 0).size() + wanted.cache.usage(0, 0, 1).size() < 2 * length - 10);
    for (const std::vector<std::int32_t>& sizes : {std::vector<std::int32_t>{1}, {0}, {9, 1, 30}}) {
        for (const bool steps : {true, false}) {
            if (steps && sizes[0] != 1) {
                continue;
            }
            test::BoundDual<Own, T> cache(ctx, shape, pool, own);
            cache.add_slab(ctx);
            Tokens<T> in(4);
            std::int32_t at = 0;
            for (const std::int32_t n : test::chunks_of(length, sizes)) {
                in.run(ctx, cache.cache.layer(0), at, n, steps);
                cache.cache.advance(ctx, {.count = 1, .length = n});
                at += n;
            }
            CHECK(test::content_of(cache.cache.layer(0), 0) == test::content_of(wanted.cache.layer(0), 0));
            if (steps) {
                const bool same = std::memcmp(in.out.data.data(), reference.out.data.data(),
                                              in.out.data.size() * sizeof(T)) == 0;
                CHECK(same);
            }
        }
    }
    test::BoundDual<Own, T> guessed(ctx, shape, pool, own);
    guessed.add_slab(ctx);
    Tokens<T> in(4);
    for (std::int32_t at = 0, round = 0; at < length; ++round) {
        const std::int32_t n = std::min(length - at, 1 + round % 5), appended = std::min(n, 1 + round % 3);
        const auto ref = guessed.cache.layer(0);
        test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = n}));
        append_draft(ctx, ref,
                     {.q = std::as_const(in.q).tokens(at, n),
                      .k = std::as_const(in.k).tokens(at, n),
                      .v = std::as_const(in.v).tokens(at, n),
                      .out = in.out.tokens(at, n),
                      .batch = {.count = 1, .length = n},
                      .hidden = std::as_const(in.hidden).tokens(at, n)},
                     workspace);
        accept(ctx, ref, {.count = 1, .length = appended}, workspace);
        guessed.cache.advance(ctx, {.count = 1, .length = appended});
        at += appended;
    }
    CHECK(test::content_of(guessed.cache.layer(0), 0) == test::content_of(wanted.cache.layer(0), 0));
}

}  // namespace

TEST_CASE("SP-KV with its predictor is SP-KV with the predictor's scores") {
    const Mlp weights(1, width, 9);
    UtilityPredictor scorer;
    scorer.heads = heads, scorer.hidden = 9;
    scorer.input.width = width;
    scorer.weights = weights.views();
    const Tokens<float> in(4);
    const Sequences sequences{.batch = 1, .length = length};
    test::Plane<float> scores(1, heads, length);
    const host ctx{1};
    test::Workspace workspace(score_hidden_workspace_bytes(ctx, scorer, in.hidden.view(), sequences));
    score_hidden(ctx, scorer, in.hidden.view(), sequences, scores.view(), workspace);
    using Own = SPKV<6, UtilityPredictor, 2>;
    using Given = SPKV<6, GivenScores, 2>;
    const Own own{{}, {}, {}, scorer};
    check_beside_given<float>(own, Given{}, scores);
    check_beside_given<bf16>(own, Given{}, scores);
}

TEST_CASE("WG-KV with its gate is WG-KV with the gate's scores of the stored keys") {
    const Mlp weights(heads, 2 * dim, 7);
    WriteGateScorer<dim> scorer;
    scorer.heads = heads, scorer.hidden = 7;
    scorer.weights = weights.views();
    scorer.input.rope = {rope_layout::half_split, 10000.0f};
    const host ctx{1};
    const Tokens<fp16> in(4);
    const Sequences sequences{.batch = 1, .length = length};
    test::Plane<float> scores(1, heads, length);
    test::Workspace workspace(
        score_sequence_workspace_bytes(ctx, scorer, in.k.view(), in.v.view(), sequences));
    score_sequence(ctx, scorer, in.k.view(), in.v.view(), sequences, 0, scores.view(), workspace);
    const auto gate = ThresholdGate<at_least>::probability(0.5);
    check_beside_given<fp16>(WGKV<6, WriteGateScorer<dim>>{{}, {}, gate, scorer}, WGKV<6>{{}, {}, gate, {}},
                             scores);
}

TEST_CASE("hidden states that are missing, of another shape or NaN are refused with nothing changed") {
    const Mlp weights(1, width, 9);
    UtilityPredictor scorer;
    scorer.heads = heads, scorer.hidden = 9;
    scorer.input.width = width;
    scorer.weights = weights.views();
    using Own = SPKV<6, UtilityPredictor, 1>;
    const host ctx{1};
    test::BoundDual<Own, float> cache(ctx, shape, pool, Own{{}, {}, {}, scorer});
    cache.add_slab(ctx);
    Tokens<float> in(4);
    const auto before = cache.everything();
    const auto ref = cache.cache.layer(0);
    const test::Plane<float> none(0, 0, 0);
    CHECK_REFUSED(
        in.run(ctx, ref, 0, 1, true, &none),
        "io.hidden: null is not allowed; it must be the tokens' hidden states, 1 x 1 x at least 1 x "
        "12");
    CHECK_REFUSED(in.run(ctx, ref, 0, 9, false, &none), "io.hidden: null");
    in.hidden.view().row(0, 0, 3)[1] = bf16(std::numeric_limits<float>::quiet_NaN());
    CHECK_REFUSED(in.run(ctx, ref, 0, 9, false), "score of entry 0, head 0, position 3: NaN");
    CHECK(cache.everything() == before);
    UtilityPredictor other = scorer;
    other.heads = 3;
    using Cache = DualCache<Own, float>;
    CHECK_REFUSED(Cache(shape, pool, Own{{}, {}, {}, other}), "UtilityPredictor.heads: 3");
    // A sink's own state may be anything.
    in.hidden.view().row(0, 0, 0)[1] = bf16(std::numeric_limits<float>::quiet_NaN());
    in.run(ctx, ref, 0, 2, false);
    cache.cache.advance(ctx, {.count = 1, .length = 2});
    std::vector<unsigned char> blob(cache.cache.snapshot_bytes(0));
    cache.cache.snapshot(ctx, 0, blob.data(), blob.size());
    cache.cache.restore(ctx, 1, blob.data(), blob.size());
    CHECK(cache.cache.length(1) == 2);
}
