// NaN scores in caches. With a status word per entry a call reports them and goes on as a device does: they
// rank last, close their gates, and leave what a mask of the same scores says. Without one they are refused.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
/// Stands for a score of NaN in the rows that a scorer reads.
constexpr float trap = 42.0f;
constexpr std::int32_t heads = 2, dim = 8, length = 97, max_draft = 9;
constexpr std::int32_t sinks = 2, window = 5;
constexpr std::uint32_t other_bit = status_bad_index;

constexpr CacheShape shape{.layers = 1,
                           .max_sequences = 2,
                           .query_heads = heads,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .max_draft_tokens = max_draft};
constexpr PoolShape pool{.slab_pages = 2 * heads * length, .max_slabs = 1, .max_seq_len = length};

float score_of(const float* value) { return value[0] == trap ? quiet_nan : value[0]; }

/// The first number of a value is its score.
struct ArrivalScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    [[nodiscard]] std::size_t scratch_size() const { return 0; }
    float score(std::int32_t, const float*, const float* value, float*) const { return score_of(value); }
};
/// The same, with a state that counts tokens.
struct LeavingScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    [[nodiscard]] std::size_t state_size() const { return 1; }
    [[nodiscard]] std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { state[0] = 0.0f; }
    void absorb(std::int32_t, float* state, const float*, const float*, float*) const { state[0] += 1.0f; }
    float read(std::int32_t, const float*, const float*, const float* value, float*) const {
        return score_of(value);
    }
};
/// The same, inside the window.
struct WindowScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::in_window;
    static constexpr std::int32_t reach = 1;
    [[nodiscard]] std::int32_t tokens_at_once(std::int32_t) const { return 3; }
    [[nodiscard]] std::size_t span_scratch_size() const { return 0; }
    void score_span(std::int32_t, position_t, std::int32_t count, const float*, const float* values,
                    float* scores, float*, isa) const {
        for (std::int32_t t = 0; t < count; ++t) {
            scores[t] = score_of(values + (reach + t) * dim);
        }
    }
};
/// Number h of a hidden state is head h's score.
struct StateScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::from_hidden;
    [[nodiscard]] std::int32_t hidden_width() const { return heads; }
    [[nodiscard]] std::size_t block_scratch_size() const { return 0; }
    void score_tokens(std::int32_t count, const float* states, float* scores, std::int64_t head_stride,
                      float*, isa) const {
        for (std::int32_t t = 0; t < count; ++t) {
            for (std::int32_t h = 0; h < heads; ++h) {
                scores[h * head_stride + t] = score_of(states + t * heads + h);
            }
        }
    }
};

/// Tokens of two sequences. Many scores of the first are NaN, none of the second.
struct Tokens {
    test::Tensor<float> q, k, v, hidden, out;
    test::Plane<float> scores;

    Tokens()
        : q(2, heads, length, dim),
          k(2, heads, length, dim),
          v(2, heads, length, dim),
          hidden(2, 1, length, heads),
          out(2, heads, length, dim),
          scores(2, heads, length) {
        std::mt19937 generator(7);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        const float some[] = {-1.0f, 0.0f, 0.5f, 0.5f, 3.0f, -inf, inf};
        for (std::int32_t b = 0; b < 2; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    const bool bad = b == 0 && generator() % 3 == 0;
                    // Infinite scores are left to given ones: a value takes part in the outputs.
                    const float score = some[generator() % (h == 0 ? 7 : 5)];
                    scores.at(b, h, t) = bad ? quiet_nan : score;
                }
            }
        }
    }
    /// Puts the scores where the scorer of P reads them; infinite ones only where they do no harm.
    template <class P>
    void place() {
        constexpr score_time when = P::scorer_type::when;
        for (std::int32_t b = 0; b < 2; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    float& score = scores.at(b, h, t);
                    if (when != score_time::given && when != score_time::from_hidden && std::isinf(score)) {
                        score = score > 0 ? 9.0f : -9.0f;
                    }
                    v.view().row(b, h, t)[0] = std::isnan(score) ? trap : std::isinf(score) ? 0.0f : score;
                    hidden.view().row(b, 0, t)[h] = std::isnan(score) ? trap : score;
                }
            }
        }
    }
    template <class P>
    [[nodiscard]] StepIO<float> io(const Batch& batch, std::int32_t from, std::int32_t count) {
        test::Extras extras;
        if constexpr (P::scorer_type::when == score_time::given) {
            extras.scores = std::as_const(scores).tokens(from, count);
        }
        if constexpr (P::scorer_type::when == score_time::from_hidden) {
            extras.hidden = std::as_const(hidden).tokens(from, count);
        }
        return test::step_io<float>(batch, std::as_const(q).tokens(from, count),
                                    std::as_const(k).tokens(from, count),
                                    std::as_const(v).tokens(from, count), out.tokens(from, count), extras);
    }
};

/// A cache of either kind, with all of its pages.
template <class P, bool Pooled>
struct Bound : std::conditional_t<Pooled, test::BoundDual<P, float>, test::BoundCache<P, float>> {
    Bound(const host& ctx, const P& policy) requires Pooled
        : test::BoundDual<P, float>(ctx, shape, pool, policy) {
        this->add_slab(ctx);
    }
    Bound(const host& ctx, const P& policy) requires(!Pooled)
        : test::BoundCache<P, float>(ctx, shape, policy) {}

    [[nodiscard]] std::vector<unsigned char> content() const {
        std::vector<unsigned char> all = test::content_of(this->cache.layer(0), 0);
        const std::vector<unsigned char> second = test::content_of(this->cache.layer(0), 1);
        all.insert(all.end(), second.begin(), second.end());
        return all;
    }
};

/// How tokens come into a cache.
enum class Way { steps, chunks, drafts };

/// One call, or append_draft() and accept(), of both sequences. Does not advance.
template <class P, class Cache>
void take(const host& ctx, Cache& bound, Tokens& in, std::int32_t from, std::int32_t count, Way way,
          std::uint32_t* status) {
    const auto ref = bound.cache.layer(0);
    const Batch batch{.count = 2, .length = count};
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 2, .tokens = count}));
    const StepIO<float> io = in.io<P>(batch, from, count);
    if (way == Way::steps) {
        step(ctx, ref, io, workspace, {.status = status});
    } else if (way == Way::chunks) {
        prefill(ctx, ref, io, workspace, {.status = status});
    } else {
        append_draft(ctx, ref, io, workspace, {.status = status});
        accept(ctx, ref, batch, workspace, {.status = status});
    }
}

/// Whether a call that brings tokens [from, from + count) learns of a NaN of sequence b.
template <class P>
bool learns_nan(const P& policy, Tokens& in, std::int32_t b, std::int32_t from, std::int32_t count) {
    constexpr score_time when = P::scorer_type::when;
    const auto in_window = [](std::int32_t n) { return n <= 1 ? 0 : (n - 1) / 3 * 3; };
    std::int32_t first = from, end = from + count;
    if (when == score_time::on_leaving) {
        first -= window;
        end -= window;
    } else if (when == score_time::in_window) {
        first = in_window(from);
        end = in_window(from + count);
    }
    bool learns = false;
    for (std::int32_t t = std::max(first, sinks); t < end; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) {
            const bool has_score = scores_come_along<typename P::scorer_type> || !policy.keeps(t);
            learns = learns || (has_score && std::isnan(in.scores.at(b, h, t)));
        }
    }
    return learns;
}

/// What both sequences hold after all tokens, in calls of `chunk` tokens. Every call's status is compared.
template <class P, class Cache>
std::vector<unsigned char> content_after(const host& ctx, Cache& bound, const P& policy, Tokens& in,
                                         std::int32_t chunk, Way way) {
    bool right = true;
    for (std::int32_t at = 0; at < length; at += chunk) {
        const std::int32_t count = std::min(chunk, length - at);
        std::uint32_t status[] = {other_bit, 0};
        take<P>(ctx, bound, in, at, count, way, status);
        const std::uint32_t learned = learns_nan(policy, in, 0, at, count) ? status_nan_score : 0u;
        right = right && status[0] == (other_bit | learned) && status[1] == 0;
        bound.cache.advance(ctx, {.count = 2, .length = count});
    }
    CHECK(right);
    CHECK(std::all_of(in.out.data.begin(), in.out.data.end(), [](float x) { return std::isfinite(x); }));
    return bound.content();
}

/// Steps, chunks and drafts leave the same rows, and the keys of the mask.
template <bool Pooled, class P>
void check(const P& policy) {
    const host ctx{1};
    Tokens in;
    in.place<P>();
    const Sequences sequences{.batch = 2, .length = length};
    test::Plane<expiry_t> expiry(2, heads, length);
    test::Workspace for_mask(build_mask_workspace_bytes(ctx, policy, sequences, heads));
    build_mask(ctx, policy, std::as_const(in.scores).view(), sequences, expiry.view(), for_mask,
               {.nan_ranks_last = true});
    Bound<P, Pooled> stepped(ctx, policy);
    const std::vector<unsigned char> content = content_after(ctx, stepped, policy, in, 1, Way::steps);
    const std::vector<float> outputs = in.out.data;
    for (std::int32_t b = 0; b < 2; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            std::vector<position_t> visible;
            for (std::int32_t t = 0; t < length; ++t) {
                if (length - 1 < expiry.at(b, h, t)) {
                    visible.push_back(t);
                }
            }
            CAPTURE(b);
            CAPTURE(h);
            CHECK(stepped.sorted(0, b, h) == visible);
        }
    }
    const auto same_outputs = [&] {
        float most = 0.0f;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            most = std::max(most, std::abs(outputs[i] - in.out.data[i]));
        }
        return most < 1e-4f;
    };
    for (const std::int32_t chunk : {1, 2, 17, 33, length}) {
        CAPTURE(chunk);
        Bound<P, Pooled> chunked(ctx, policy);
        CHECK(content_after(ctx, chunked, policy, in, chunk, Way::chunks) == content);
        CHECK(same_outputs());
    }
    for (const std::int32_t chunk : {1, max_draft}) {
        CAPTURE(chunk);
        Bound<P, Pooled> drafted(ctx, policy);
        CHECK(content_after(ctx, drafted, policy, in, chunk, Way::drafts) == content);
        CHECK(same_outputs());
    }
}

template <class S>
using Ranked = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>, S>;
template <class S>
using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>, Decay<dynamic>, S>;
template <class S>
using Kept = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>, Stride<4>, S>;

struct Aging {
    float log_gamma;
    std::int32_t step;
};
constexpr Aging agings[] = {{0.0f, 1}, {-0.03f, 1}, {-0.03f, 3}, {-0.2f, 300}};

template <class S>
void check_all() {
    // Scorers differ in when a score is known, which one policy in each kind of cache shows.
    constexpr bool all = std::is_same_v<S, GivenScores>;
    for (const Aging aging : agings) {
        for (const std::int32_t budget : {1, 6, 60}) {
            CAPTURE(aging.log_gamma);
            CAPTURE(aging.step);
            CAPTURE(budget);
            const Decay<dynamic> decay{aging.log_gamma, aging.step};
            const TopKBudget<> keys{budget};
            const Ranked<S> ranked{Sink<>{sinks}, Window<>{window}, keys, decay, S{}};
            check<false>(ranked);
            if constexpr (all) {
                check<true>(ranked);
            }
            if constexpr (all) {
                const Gated<S> gated{
                    Sink<>{sinks}, Window<>{window}, ThresholdGate<at_least>{0.0f}, keys, decay, S{}};
                check<false>(gated);
                check<true>(gated);
            }
            check<true>(Kept<S>{Sink<>{sinks}, Window<>{window}, ThresholdGate<above>{-2.0f}, keys, decay,
                                Stride<4>{}, S{}});
        }
    }
    if constexpr (all) {
        // Heads without a limit hold NaN scores too, unless they have a gate.
        using Open = Policy<Sink<>, Window<>, TopKBudget<>, S>;
        check<true>(Open{Sink<>{sinks}, Window<>{window}, TopKBudget<>{unlimited}, S{}});
        using OpenGated = Policy<Sink<>, Window<>, ThresholdGate<at_least>, S>;
        check<true>(OpenGated{Sink<>{sinks}, Window<>{window}, ThresholdGate<at_least>{0.0f}, S{}});
    }
}

/// Without a status every call refuses the first NaN that it learns of, and changes nothing.
template <class S>
void check_refused(const char* text) {
    const host ctx{1};
    using P = Gated<S>;
    const P policy{Sink<>{sinks},   Window<>{window},        ThresholdGate<at_least>{0.0f},
                   TopKBudget<>{6}, Decay<dynamic>{0.0f, 1}, S{}};
    Tokens in;
    in.place<P>();
    Bound<P, true> bound(ctx, policy);
    for (std::int32_t t = 0; t < length; ++t) {
        const std::vector<unsigned char> before = bound.everything();
        if (learns_nan(policy, in, 0, t, 1)) {
            CHECK_REFUSED(take<P>(ctx, bound, in, t, 1, Way::steps, nullptr), text);
            CHECK_REFUSED(take<P>(ctx, bound, in, t, 1, Way::chunks, nullptr), text);
            CHECK_REFUSED(take<P>(ctx, bound, in, t, 1, Way::drafts, nullptr), text);
            CHECK(bound.everything() == before);
            std::uint32_t status[] = {0, 0};
            take<P>(ctx, bound, in, t, 1, Way::steps, status);
            CHECK(status[0] == status_nan_score);
        } else {
            take<P>(ctx, bound, in, t, 1, Way::steps, nullptr);
        }
        bound.cache.advance(ctx, {.count = 2, .length = 1});
    }
}

}  // namespace

TEST_CASE("given scores that are NaN, with a status") { check_all<GivenScores>(); }
TEST_CASE("scores on arrival that are NaN, with a status") { check_all<ArrivalScorer>(); }
TEST_CASE("scores on leaving that are NaN, with a status") { check_all<LeavingScorer>(); }
TEST_CASE("scores inside the window that are NaN, with a status") { check_all<WindowScorer>(); }
TEST_CASE("scores of hidden states that are NaN, with a status") { check_all<StateScorer>(); }

TEST_CASE("NaN scores are refused without a status, and stored ones do not stand in the way of later calls") {
    check_refused<GivenScores>("io.scores[0][");
    check_refused<ArrivalScorer>("score of entry 0, head ");
    check_refused<LeavingScorer>("score of entry 0, head ");
    check_refused<WindowScorer>("score of entry 0, head ");
    check_refused<StateScorer>("score of entry 0, head ");
}

TEST_CASE("a draft with a NaN score is reported, and refused or reported again where it is accepted") {
    const host ctx{1};
    using P = Ranked<GivenScores>;
    const P policy{Sink<>{sinks}, Window<>{window}, TopKBudget<>{6}, Decay<dynamic>{0.0f, 1}, GivenScores{}};
    Bound<P, false> bound(ctx, policy);
    Tokens in;
    std::fill(in.scores.data.begin(), in.scores.data.end(), 1.0f);
    in.scores.at(0, 1, 1) = quiet_nan;  // of a sink: never read
    in.scores.at(0, 1, 5) = quiet_nan;
    const auto ref = bound.cache.layer(0);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 2, .tokens = 8}));
    std::uint32_t status[] = {0, 0};
    append_draft(ctx, ref, in.io<P>({.count = 2, .length = 8}, 0, 8), workspace, {.status = status});
    CHECK(status[0] == status_nan_score);
    CHECK(status[1] == 0);
    const std::vector<unsigned char> before = bound.memory;
    CHECK_REFUSED((accept(ctx, ref, {.count = 2, .length = 6}, workspace)),
                  "score of entry 0, head 1, position 5: NaN is not allowed; it must be a number");
    CHECK(bound.memory == before);
    status[0] = 0;
    // The first five tokens have no NaN that counts.
    const std::int32_t five[] = {5, 6};
    accept(ctx, ref, {.count = 2, .q_len = five}, workspace, {.status = status});
    CHECK(status[0] == 0);
    CHECK(status[1] == 0);
}

TEST_CASE("a snapshot keeps NaN scores, and its copy goes on in the same way") {
    const host ctx{1};
    using P = Kept<GivenScores>;
    const P policy{Sink<>{sinks},   Window<>{window},          ThresholdGate<above>{-2.0f},
                   TopKBudget<>{6}, Decay<dynamic>{-0.03f, 3}, Stride<4>{},
                   GivenScores{}};
    Tokens in;
    Bound<P, true> one(ctx, policy), other(ctx, policy);
    std::uint32_t status[] = {0, 0};
    take<P>(ctx, one, in, 0, 40, Way::chunks, status);
    one.cache.advance(ctx, {.count = 2, .length = 40});
    for (std::int32_t seq = 0; seq < 2; ++seq) {
        std::vector<unsigned char> blob(one.cache.snapshot_bytes(seq));
        one.cache.snapshot(ctx, seq, blob.data(), blob.size());
        other.cache.restore(ctx, seq, blob.data(), blob.size());
    }
    CHECK(other.content() == one.content());
    for (std::int32_t at = 40; at < length; ++at) {
        take<P>(ctx, one, in, at, 1, Way::chunks, status);
        take<P>(ctx, other, in, at, 1, Way::steps, status);
        one.cache.advance(ctx, {.count = 2, .length = 1});
        other.cache.advance(ctx, {.count = 2, .length = 1});
    }
    CHECK(other.content() == one.content());
}

TEST_CASE("a step that finds no page says nothing of its scores") {
    const host ctx{1};
    using P = Policy<Sink<1>, Window<3>, TopKBudget<4>>;
    test::BoundDual<P, float> bound(ctx, shape, pool, P{});
    Tokens in;
    std::fill(in.scores.data.begin(), in.scores.data.end(), quiet_nan);
    std::uint32_t status[] = {0, 0};
    const std::vector<unsigned char> before = bound.everything();
    take<P>(ctx, bound, in, 7, 1, Way::steps, status);
    CHECK(status[0] == status_pool_exhausted);
    CHECK(status[1] == status_pool_exhausted);
    CHECK(bound.everything() == before);
}
