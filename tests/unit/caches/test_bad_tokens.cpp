// Tokens whose key or value is NaN or infinite, under scorers whose scores of other keys depend on them: by
// default the host refuses them when they come; with bad_token::drop, or a status, they rank last, and an
// mLSTM goes on as if they had not come.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../scorers/conv_cases.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr std::int32_t dim = 8, heads = 2, group = 2, sinks = 1, budget = 3, length = 48;
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();
constexpr CacheShape shape{.max_sequences = 2,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 4,
                           .max_draft_tokens = 48};
constexpr PoolShape pool{.slab_pages = 400, .max_slabs = 1, .max_seq_len = 200};

using Mlstm = mLSTMScorer<dynamic, Softmax, ProjectedValues>;
template <class S>
using Scored = Policy<Sink<>, Window<>, TopKBudget<>, S>;

/// One sequence, of which some tokens are bad.
template <class T>
struct Tokens {
    test::Tensor<T> q{1, heads*group, length, dim}, k{1, heads, length, dim}, v{1, heads, length, dim},
        out{1, heads*group, length, dim};
    std::vector<bool> bad = std::vector<bool>(std::size_t{heads} * length, false);

    Tokens() {
        std::mt19937 generator(7);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
    }
    void spoil(std::int32_t h, std::int32_t t, bool key, float with = quiet_nan) {
        (key ? k : v).view().row(0, h, t)[3] = static_cast<T>(with);
        bad[at(h, t)] = true;
    }
    [[nodiscard]] static std::size_t at(std::int32_t h, std::int32_t t) {
        return static_cast<std::size_t>(h * length + t);
    }
    [[nodiscard]] StepIO<T> io(std::int32_t from, std::int32_t count) {
        return {.q = std::as_const(q).tokens(from, count),
                .k = std::as_const(k).tokens(from, count),
                .v = std::as_const(v).tokens(from, count),
                .out = out.tokens(from, count),
                .batch = {.count = 1, .length = count}};
    }
};

enum class Way { step, append, prefill, append_chunk, draft };
constexpr Way ways[] = {Way::step, Way::append, Way::prefill, Way::append_chunk, Way::draft};

/// Tokens [from, from + count) by a call.
template <class T, class Ref>
void call(const host& ctx, const Ref& ref, Tokens<T>& in, Way way, std::int32_t from, std::int32_t count,
          const StepOptions& options) {
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = count}) +
                              append_workspace_bytes(ctx, ref, {.batch = 1, .tokens = count}));
    const StepIO<T> io = in.io(from, count);
    if (way == Way::step) {
        step(ctx, ref, io, workspace, options);
    } else if (way == Way::append) {
        append(ctx, ref, io, workspace, options);
    } else if (way == Way::prefill) {
        prefill(ctx, ref, io, workspace, options);
    } else if (way == Way::append_chunk) {
        append_chunk(ctx, ref, io, workspace, options);
    } else {
        append_draft(ctx, ref, io, workspace, options);
        accept(ctx, ref, {.count = 1, .length = count}, workspace, options);
    }
}

/// All tokens, in chunks of `size`.
template <class T, class Cache>
void feed(const host& ctx, Cache& cache, Tokens<T>& in, Way way, std::int32_t size,
          const StepOptions& options) {
    const std::int32_t each = way == Way::step || way == Way::append ? 1 : size;
    for (std::int32_t t = 0; t < length; t += each) {
        const std::int32_t count = std::min(each, length - t);
        call(ctx, cache.layer(0), in, way, t, count, options);
        cache.advance(ctx, {.count = 1, .length = count});
    }
}

/// Scores of a head, -7 where a key has none yet: of an mLSTM as if the bad tokens had not come, whose own
/// scores are NaN; of a convolution as the numbers give them.
template <class T>
std::vector<float> scores_of(const Mlstm& scorer, Tokens<T>& in, std::int32_t h, std::int32_t window) {
    std::vector<float> scores(length, -7.0f), state(scorer.state_size()), scratch(scorer.scratch_size());
    scorer.reset(state.data());
    const auto row = [&](test::Tensor<T>& from, std::int32_t t) {
        std::vector<float> wide;
        for (std::int32_t d = 0; d < dim; ++d) {
            wide.push_back(static_cast<float>(from.view().row(0, h, t)[d]));
        }
        return wide;
    };
    for (std::int32_t t = 0; t < length; ++t) {
        if (!in.bad[in.at(h, t)]) {
            scorer.absorb(h, state.data(), row(in.k, t).data(), row(in.v, t).data(), scratch.data());
        }
        if (const std::int32_t u = t - window; u >= 0) {
            const std::vector<float>& now = state;
            scores[static_cast<std::size_t>(u)] =
                in.bad[in.at(h, u)]
                    ? quiet_nan
                    : scorer.read(h, now.data(), row(in.k, u).data(), row(in.v, u).data(), scratch.data());
        }
    }
    return scores;
}
template <class T>
std::vector<float> scores_of(const ConvScorer<>& scorer, Tokens<T>& in, std::int32_t h, std::int32_t window) {
    const host ctx{1};
    const Sequences sequences{.batch = 1, .length = length};
    const rows_view<const T> k = std::as_const(in.k).view(), v = std::as_const(in.v).view();
    test::Workspace workspace(score_sequence_workspace_bytes(ctx, scorer, k, v, sequences));
    test::Plane<float> scores(1, heads, length, -7.0f);
    score_sequence(ctx, scorer, k, v, sequences, window, scores.view(), workspace);
    return {scores.view().head(0, h), scores.view().head(0, h) + length};
}

/// The positions that a head holds in the end.
std::vector<position_t> kept(const std::vector<float>& scores, std::int32_t window) {
    std::vector<position_t> best;
    for (position_t u = sinks; u < length - window; ++u) {
        best.push_back(u);
    }
    std::stable_sort(best.begin(), best.end(), [&](position_t a, position_t b) {
        const float x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
        return std::isnan(y) ? !std::isnan(x) : x > y;
    });
    best.resize(budget);
    for (position_t t = 0; t < sinks; ++t) {
        best.push_back(t);
    }
    for (position_t t = length - window; t < length; ++t) {
        best.push_back(t);
    }
    std::sort(best.begin(), best.end());
    return best;
}

template <class T, class P, class Cache>
void check_kept(const P& policy, const Cache& cache, Tokens<T>& in, std::int32_t window) {
    for (std::int32_t h = 0; h < heads; ++h) {
        std::vector<position_t> held(static_cast<std::size_t>(cache.usage(0, 0, h).size()));
        cache.retained(0, 0, h, held.data());
        std::sort(held.begin(), held.end());
        CHECK(held == kept(scores_of(policy.scorer(), in, h, window), window));
    }
}

template <class T, class P>
void check_dropped(const P& policy, std::int32_t window, Tokens<T> in) {
    const host ctx{2};
    for (const Way way : ways) {
        for (const std::int32_t size : {length, 11}) {
            CAPTURE(static_cast<int>(way));
            std::uint32_t status = 0;
            test::BoundCache<P, T> fixed(ctx, shape, policy);
            test::BoundDual<P, T> dual(ctx, shape, pool, policy);
            dual.add_slab(ctx);
            feed(ctx, fixed.cache, in, way, size, {.bad_tokens = bad_token::drop});
            feed(ctx, dual.cache, in, way, size, {.status = &status});
            check_kept(policy, fixed.cache, in, window);
            check_kept(policy, dual.cache, in, window);
            CHECK(status == status_nan_score);
        }
    }
}

/// A token that is refused in every way, with nothing changed, and the tokens before and a better one after.
template <class T, class P>
void check_refused(const P& policy, std::int32_t window, std::int32_t position, std::int32_t head, bool key,
                   float with) {
    const host ctx{2};
    const std::string message = std::string(key ? "key" : "value") + " of entry 0, head " +
                                std::to_string(head) + ", position " + std::to_string(position) +
                                ": NaN or infinite is not allowed";
    for (const Way way : ways) {
        CAPTURE(static_cast<int>(way));
        test::BoundCache<P, T> fixed(ctx, shape, policy);
        Tokens<T> good, in;
        in.spoil(head, position, key, with);
        const bool single = way == Way::step || way == Way::append;
        for (std::int32_t t = 0; single && t < position; ++t) {
            call(ctx, fixed.cache.layer(0), in, way, t, 1, {});
            fixed.cache.advance(ctx, {.count = 1, .length = 1});
        }
        const std::vector<unsigned char> before = fixed.content(0, 0);
        if (single) {
            CHECK_REFUSED(call(ctx, fixed.cache.layer(0), in, way, position, 1, {}), message);
        } else {
            CHECK_REFUSED(call(ctx, fixed.cache.layer(0), in, way, 0, 40, {}), message);
        }
        CHECK(fixed.content(0, 0) == before);
        const std::int32_t from = single ? position : 0;
        call(ctx, fixed.cache.layer(0), good, Way::prefill, from, length - from, {});
        fixed.cache.advance(ctx, {.count = 1, .length = length - from});
        check_kept(policy, fixed.cache, good, window);
    }
}

Scored<Mlstm> with_mlstm(const test::mlstm_weights& weights, std::int32_t window) {
    return Scored<Mlstm>{Sink<>{sinks}, Window<>{window}, TopKBudget<>{budget}, weights.scorer<Mlstm>()};
}
Scored<ConvScorer<>> with_conv(const test::conv_weights& weights, std::int32_t window) {
    return Scored<ConvScorer<>>{Sink<>{sinks}, Window<>{window}, TopKBudget<>{budget}, weights.scorer()};
}
const test::mlstm_weights& mlstm() {
    static const test::mlstm_weights weights([] {
        test::mlstm_case c;
        c.head_dim_qk = c.head_dim_vo = dim;
        c.heads = heads;
        c.hedgehog = false;
        c.projected = true;
        return c;
    }());
    return weights;
}
const test::conv_weights& conv() {
    static const test::conv_weights weights{test::conv_case{}};
    return weights;
}

}  // namespace

TEST_CASE("a bad token under an mLSTM is refused when it comes") {
    check_refused<float>(with_mlstm(mlstm(), 6), 6, 2, 0, true, quiet_nan);
    check_refused<float>(with_mlstm(mlstm(), 6), 6, 2, 1, false, quiet_nan);
    check_refused<bf16>(with_mlstm(mlstm(), 6), 6, 0, 1, true, infinity);  // a sink
    check_refused<fp16>(with_mlstm(mlstm(), 6), 6, 30, 0, false, -infinity);
}

TEST_CASE("a bad token under a convolution is refused when it comes") {
    check_refused<float>(with_conv(conv(), 16), 16, 20, 1, true, quiet_nan);
    check_refused<float>(with_conv(conv(), 16), 16, 20, 0, false, quiet_nan);
    check_refused<bf16>(with_conv(conv(), 16), 16, 0, 0, true, quiet_nan);
    check_refused<fp16>(with_conv(conv(), 16), 16, 39, 1, false, infinity);
}

TEST_CASE("dropped tokens rank last, and an mLSTM goes on without them") {
    Tokens<float> in;
    in.spoil(0, 2, true);
    check_dropped(with_mlstm(mlstm(), 6), 6, in);
    in.spoil(0, 0, false);  // a sink
    in.spoil(1, 13, false);
    in.spoil(1, 14, true);
    in.spoil(0, length - 1, true);  // in the window
    check_dropped(with_mlstm(mlstm(), 6), 6, in);
    Tokens<bf16> half;
    half.spoil(0, 2, true);
    half.spoil(1, 30, false);
    check_dropped(with_mlstm(mlstm(), 6), 6, half);
}

TEST_CASE("dropped tokens rank last under a convolution, and so do the keys whose scores read them") {
    Tokens<float> in;
    in.spoil(1, 20, true);
    check_dropped(with_conv(conv(), 16), 16, in);
    in.spoil(0, 0, true);  // a sink
    in.spoil(0, 5, false);
    in.spoil(0, 6, false, infinity);
    in.spoil(1, length - 3, true);  // in the window
    check_dropped(with_conv(conv(), 16), 16, in);
    Tokens<fp16> half;
    half.spoil(0, 20, false);
    check_dropped(with_conv(conv(), 16), 16, half);
}

TEST_CASE("given scores that are NaN, dropped without a status") {
    using P = Policy<Sink<>, Window<>, TopKBudget<>>;
    const host ctx{1};
    test::BoundCache<P, float> cache(ctx, shape, P{Sink<>{sinks}, Window<>{6}, TopKBudget<>{budget}});
    Tokens<float> in;
    test::Plane<float> scores(1, heads, length);
    for (std::int32_t t = 0; t < length; ++t) {
        scores.at(0, 0, t) = scores.at(0, 1, t) = static_cast<float>(t * 7 % 11);
    }
    scores.at(0, 1, 10) = quiet_nan;
    StepIO<float> io = in.io(0, length);
    io.scores = scores.view();
    test::Workspace workspace(workspace_bytes(ctx, cache.cache.layer(0), {.batch = 1, .tokens = length}));
    CHECK_REFUSED(prefill(ctx, cache.cache.layer(0), io, workspace), "io.scores[0][1][10]: NaN");
    prefill(ctx, cache.cache.layer(0), io, workspace, {.bad_tokens = bad_token::drop});
    cache.cache.advance(ctx, {.count = 1, .length = length});
    for (std::int32_t h = 0; h < heads; ++h) {
        const std::vector<float> mine(scores.view().head(0, h), scores.view().head(0, h) + length);
        CHECK(cache.sorted(0, 0, h) == kept(mine, 6));
    }
}
