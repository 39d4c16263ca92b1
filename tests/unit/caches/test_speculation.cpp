// append_draft and accept, in both kinds of caches: draft tokens get what stepping would give them, nothing
// changes before the commit, and a commit of the first m leaves what m steps would leave.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <utility>

using namespace kvpolicy;

namespace {

constexpr std::int32_t most = 6;
constexpr CacheShape shape{.layers = 2,
                           .max_sequences = 3,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .head_dim_qk = 8,
                           .head_dim_vo = 16,
                           .page_size = 3,
                           .max_draft_tokens = most};
constexpr PoolShape pool{.slab_pages = 2, .max_slabs = 600, .max_seq_len = 400};

/// A cache of either kind.
template <class P, bool Pooled>
struct Bound : std::conditional_t<Pooled, test::BoundDual<P, float>, test::BoundCache<P, float>> {
    Bound(const host& ctx, const P& policy) requires Pooled
        : test::BoundDual<P, float>(ctx, shape, pool, policy) {}
    Bound(const host& ctx, const P& policy) requires(!Pooled)
        : test::BoundCache<P, float>(ctx, shape, policy) {}
    void workspace(const host& ctx, const Batch& batch) {
        if constexpr (Pooled) {
            this->reserve(ctx, batch);
        }
    }
};

/// Tokens of one call.
struct Call {
    test::Tensor<float> q, k, v, out;
    test::Plane<float> scores, lse;
    Call(std::int32_t length, std::mt19937& generator)
        : q(3, 4, length, 8),
          k(3, 2, length, 8),
          v(3, 2, length, 16),
          out(3, 4, length, 16),
          scores(3, 2, length),
          lse(3, 4, length) {
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::fill_scores(scores, test::Scores::random, generator);
    }
    test::Extras extras() { return {.scores = std::as_const(scores).view(), .lse = lse.view()}; }
};

template <class P, class Ref>
void append_draft_call(const host& ctx, const Ref& ref, const Batch& batch, Call& in) {
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = batch.count, .tokens = most}));
    append_draft(ctx, ref,
                 test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), in.out.view(),
                               test::wanted_by<P>(in.extras())),
                 workspace);
}

template <bool Pooled, class P>
void check_speculation(const P& policy, std::uint32_t seed) {
    const host ctx(2);
    Bound<P, Pooled> guessing(ctx, policy), stepping(ctx, policy);
    std::mt19937 generator(seed);
    bool same_rows = true, unchanged = true;
    double off = 0.0;
    for (int round = 0; round < 25; ++round) {
        std::int32_t num_draft[3], accepted[3];
        for (std::size_t i = 0; i < 3; ++i) {
            num_draft[i] = static_cast<std::int32_t>(generator() % (most + 1));
            accepted[i] =
                static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(num_draft[i] + 1));
        }
        const Batch guess{.count = 3, .q_len = num_draft, .length = most},
            appended{.count = 3, .q_len = accepted, .length = most};
        stepping.workspace(ctx, appended);
        std::vector<std::unique_ptr<Call>> calls;
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            calls.push_back(std::make_unique<Call>(most, generator));
            std::vector<std::vector<unsigned char>> before;
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                before.push_back(test::content_of(guessing.cache.layer(layer), seq));
            }
            if (round % 3 == 0) {  // a guess that nobody takes up
                Call wrong(most, generator);
                append_draft_call<P>(ctx, guessing.cache.layer(layer), guess, wrong);
            }
            append_draft_call<P>(ctx, guessing.cache.layer(layer), guess, *calls.back());
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                unchanged = unchanged && before[static_cast<std::size_t>(seq)] ==
                                             test::content_of(guessing.cache.layer(layer), seq);
            }
        }
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            const auto ref = guessing.cache.layer(layer);
            test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 3, .tokens = most}));
            std::int32_t left[3] = {accepted[0], accepted[1], accepted[2]};
            for (bool again = true; again;) {
                std::uint32_t status[3] = {};
                accept(ctx, ref, {.count = 3, .q_len = left, .length = most}, workspace, {.status = status});
                again = false;
                std::vector<std::int32_t> failed;
                for (std::int32_t i = 0; i < 3; ++i) {
                    if (status[i] != 0) {
                        again = true;
                    }
                }
                if (!again) {
                    break;
                }
                if constexpr (Pooled) {
                    guessing.add_slab(ctx);
                }
                // Those that are through are not named again: 0 tokens would be right too, since
                // nothing waits there.
                for (std::int32_t i = 0; i < 3; ++i) {
                    left[i] = status[i] == 0 ? 0 : left[i];
                }
            }
        }
        guessing.cache.advance(ctx, appended);
        for (std::int32_t j = 0; j < most; ++j) {
            std::int32_t now[3];
            for (std::size_t i = 0; i < 3; ++i) {
                now[i] = j < accepted[i] ? 1 : 0;
            }
            const Batch one{.count = 3, .q_len = now, .length = 1};
            for (std::int32_t layer = 0; layer < 2; ++layer) {
                Call& in = *calls[static_cast<std::size_t>(layer)];
                test::Tensor<float> out(3, 4, 1, 16);
                test::Plane<float> lse(3, 4, 1);
                test::call_ref<P, float>(ctx, stepping.cache.layer(layer), one,
                                         std::as_const(in.q).tokens(j, 1), std::as_const(in.k).tokens(j, 1),
                                         std::as_const(in.v).tokens(j, 1), out.view(),
                                         {.scores = in.scores.tokens(j, 1), .lse = lse.view()}, true);
                for (std::int32_t i = 0; i < 3; ++i) {
                    for (std::int32_t h = 0; now[i] != 0 && h < 4; ++h) {
                        off = std::max(off,
                                       std::abs(static_cast<double>(lse.at(i, h, 0) - in.lse.at(i, h, j))));
                        for (std::int32_t c = 0; c < 16; ++c) {
                            off = std::max(off, std::abs(static_cast<double>(out.view().row(i, h, 0)[c] -
                                                                             in.out.view().row(i, h, j)[c])));
                        }
                    }
                }
            }
            stepping.cache.advance(ctx, one);
        }
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                same_rows = same_rows && test::content_of(guessing.cache.layer(layer), seq) ==
                                             test::content_of(stepping.cache.layer(layer), seq);
            }
        }
    }
    CHECK(off < 2e-5);
    CHECK(same_rows);
    CHECK(unchanged);
}

/// Scores on leaving: the sum of all first numbers so far, less the key's own.
struct RunningSum {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    std::size_t state_size() const { return 1; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { *state = 0.0f; }
    void absorb(std::int32_t, float* state, const float* key, const float*, float*) const {
        *state += key[0];
    }
    float read(std::int32_t, const float* state, const float* key, const float*, float*) const {
        return *state - key[1];
    }
};

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
using Gated = Policy<Sink<2>, Window<4>, ThresholdGate<at_least>>;

Budget budget(std::int32_t s, std::int32_t w, std::int32_t k) {
    return Budget{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<dynamic>{-0.1f, 1}};
}

}  // namespace

TEST_CASE("max_draft_tokens: equal to stepping, and nothing is decided before the accept") {
    for (const Budget& policy : {budget(0, 1, 3), budget(2, 4, 5), budget(1, 3, 0), budget(1, 30, 9)}) {
        check_speculation<false>(policy, 1);
        check_speculation<true>(policy, 2);
    }
    check_speculation<true>(budget(1, 3, unlimited), 3);
    check_speculation<true>(Gated{}, 4);
    const Policy<Sink<1>, Window<2>, ThresholdGate<above>, TopKBudget<4>, RunningSum> stateful{
        {}, {}, ThresholdGate<above>{-2.0f}, {}, {}};
    check_speculation<false>(stateful, 5);
    check_speculation<true>(stateful, 6);
    check_speculation<false>(Policy<Sink<1>, Window<3>>{}, 7);
}

template <bool Pooled>
void check_refusals() {
    const host ctx(1);
    Bound<Budget, Pooled> bound(ctx, budget(1, 3, 4));
    bound.workspace(ctx, {.count = 3, .length = 50});
    const auto ref = bound.cache.layer(0);
    std::mt19937 generator(1);
    Call in(8, generator);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 8}));
    const auto guess = [&](const Batch& batch) {
        append_draft(ctx, ref,
                     test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), in.out.view(), in.extras()),
                     workspace);
    };
    CHECK_REFUSED(guess({.count = 3, .length = 7}),
                  "batch tokens[0]: 7 is not allowed; it must be 0 to 6 (the cache's max_draft_tokens");
    CHECK_REFUSED(accept(ctx, ref, {.count = 3, .length = 1}, workspace),
                  "batch tokens[0]: 1 is not allowed; it must be 0 to the 0 that sequence 0 has drafted");
    const std::int32_t num_draft[] = {3, 4, 2}, seq_ids[] = {2, 0, 1};
    guess({.count = 3, .seq_ids = seq_ids, .q_len = num_draft, .length = 6});
    const std::int32_t too_many[] = {3, 5, 2};
    const std::vector<unsigned char> before = test::content_of(ref, 0);
    CHECK_REFUSED(accept(ctx, ref, {.count = 3, .seq_ids = seq_ids, .q_len = too_many}, workspace),
                  "batch tokens[1]: 5 is not allowed; it must be 0 to the 4 that sequence 0 has drafted");
    CHECK_REFUSED(accept(ctx, ref, {.count = 1, .length = 7}, workspace), "batch tokens[0]: 7");
    CHECK_REFUSED(accept(ctx, ref, {.count = 1, .length = 2}, {nullptr, 0}), "workspace.bytes: 0");
    CHECK(test::content_of(ref, 0) == before);
    // Another layer has no draft.
    CHECK_REFUSED(accept(ctx, bound.cache.layer(1), {.count = 1}, workspace),
                  "batch tokens[0]: 1 is not allowed; it must be 0 to the 0");
    // MaxDraftTokens wait at one length only; a step forgets them, and so does a commit of none.
    ++ref.length[0];
    CHECK_REFUSED(
        accept(ctx, ref, {.count = 1}, workspace),
        "length of sequence 0: 1 is not allowed; it must be what it was when the tokens were drafted, 0");
    bound.cache.clear(ctx, 0);
    CHECK_REFUSED(accept(ctx, ref, {.count = 1}, workspace), "0 to the 0 that sequence 0");
    guess({.count = 3, .q_len = num_draft, .length = 6});
    const auto one = [](auto view) {
        view.batch = 1;
        return view;
    };
    step(ctx, ref,
         {.q = one(in.q.view()),
          .k = one(in.k.view()),
          .v = one(in.v.view()),
          .out = one(in.out.view()),
          .batch = {.count = 1, .length = 1},
          .scores = one(std::as_const(in.scores).view())},
         workspace);
    CHECK_REFUSED(accept(ctx, ref, {.count = 1}, workspace), "0 to the 0 that sequence 0");
    accept(ctx, ref, {.count = 2, .seq_ids = seq_ids, .length = 0}, workspace);
    CHECK_REFUSED(accept(ctx, ref, {.count = 1, .seq_ids = seq_ids}, workspace),
                  "0 to the 0 that sequence 2");
    const std::int32_t last = 1;
    accept(ctx, ref, {.count = 1, .seq_ids = &last, .length = 4}, workspace);
}

TEST_CASE("what a accept refuses") {
    check_refusals<false>();
    check_refusals<true>();
}

TEST_CASE("a accept without pages is a no-op that can be tried again") {
    const host ctx(1);
    CacheShape one = shape;
    one.layers = 1;
    test::BoundDual<Gated, float> bound(ctx, one, {.slab_pages = 4, .max_slabs = 9, .max_seq_len = 50},
                                        Gated{});
    const auto ref = bound.cache.layer(0);
    std::mt19937 generator(1);
    Call in(6, generator);
    append_draft_call<Gated>(ctx, ref, {.count = 3, .length = 5}, in);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 5}));
    const std::vector<unsigned char> before = bound.everything();
    CHECK_REFUSED(accept(ctx, ref, {.count = 3, .length = 5}, workspace), "free pages of the pool: 0");
    std::uint32_t status[3] = {};
    accept(ctx, ref, {.count = 3, .length = 5}, workspace, {.status = status});
    CHECK((status[0] == status_pool_exhausted && status[1] == status_pool_exhausted &&
           status[2] == status_pool_exhausted));
    CHECK(bound.everything() == before);
    for (int i = 0; i < 3; ++i) {
        bound.add_slab(ctx);
    }
    accept(ctx, ref, {.count = 3, .length = 5}, workspace);
    bound.cache.advance(ctx, {.count = 3, .length = 5});
    CHECK(bound.cache.usage(0, 2, 1).size() == 5);
}
