// Steps and chunks without attention: what append, append_chunk and accept leave is what step and prefill
// leave on the host, in both kinds of caches, and a paged attention written plainly gives their outputs.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/scorers/mlp.hpp>

#include "../../support/refusal.hpp"
#include "append_case.hpp"
#include "near_scores.hpp"
#include "paged_parts.hpp"
#include "two_scorers.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;
using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
using Dims = head_dims<64>;

constexpr std::int32_t sinks_of[] = {0, 4}, windows_of[] = {1, 20}, budgets_of[] = {130, 7};

Budget budget_policy() {
    return Budget{Sink<>{per_head(sinks_of, 1, 2)}, Window<>{per_head(windows_of, 1, 2)},
                  TopKBudget<>{per_head(budgets_of, 1, 2)}};
}

constexpr CacheShape shape_of(std::int32_t dim, std::int32_t layers = 1) {
    return {.layers = layers,
            .max_sequences = 3,
            .query_heads = 6,
            .kv_heads = 2,
            .head_dim_qk = dim,
            .head_dim_vo = dim,
            .page_size = 16,
            .max_draft_tokens = 5};
}

/// Steps, then chunks between steps. Sequences pause, and one begins late.
template <class T, class Both, class Reserve>
void lives(Both& both, std::int32_t steps, Scores kind, const Reserve& reserve) {
    CAPTURE(name(kind));
    std::mt19937 generator(5);
    auto engine = appending(both);
    const std::vector<std::int32_t> seq_ids{2, 0, 1};
    for (std::int32_t t = 0; t < steps; ++t) {
        const std::vector<std::int32_t> one{1, t % 5 == 4 ? 0 : 1, t < 40 ? 0 : 1};
        reserve(seq_ids, one);
        engine.step(seq_ids, one, CallTensors<T>(both.shape, 3, 1, kind, generator));
        if (t % 16 == 0 || t + 1 == steps) {
            both.same_rows("step " + std::to_string(t));
        }
    }
    for (const std::int32_t most : {3, 70, 33}) {
        const std::vector<std::int32_t> some{most, most / 2, 0};
        reserve(seq_ids, some);
        engine.chunk(seq_ids, some, CallTensors<T>(both.shape, 3, most, kind, generator));
        both.same_rows("a chunk of " + std::to_string(most));
        const std::vector<std::int32_t> one{1, 1, 1};
        reserve(seq_ids, one);
        engine.step(seq_ids, one, CallTensors<T>(both.shape, 3, 1, kind, generator));
        both.same_rows("a step after it");
    }
}

constexpr PoolShape pool{.slab_pages = 64, .max_slabs = 40, .max_seq_len = 3000};

template <class T, class P>
void check_dual(const P& policy, const CacheShape& shape, std::int32_t steps, Scores kind) {
    BothDuals<P, T> both(shape, pool, policy);
    lives<T>(both, steps, kind,
             [&](const auto& seq_ids, const auto& tokens) { CHECK(both.reserve(seq_ids, tokens)); });
    if constexpr (P::has_eviction) {  // by the queries that were kept
        both.evict({0, 1, 2}, {1, 1, 1});
        CHECK(both.rounds > 0);
        both.same_rows("an eviction");
    }
}

}  // namespace

TEST_CASE_TEMPLATE("a FixedBudgetCache", T, bf16, float) {
    for (const Scores kind : {Scores::random, Scores::improving, Scores::few_values}) {
        BothCaches<Budget, T, Dims, false> both(shape_of(64), budget_policy());
        lives<T>(both, 230, kind, [](const auto&, const auto&) {});
    }
    BothCaches<Budget, T, Dims, false> both(shape_of(40, 2), Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{0}});
    lives<T>(both, 60, Scores::random, [](const auto&, const auto&) {});
}

TEST_CASE_TEMPLATE("a DualCache", T, bf16, float) {
    check_dual<T>(budget_policy(), shape_of(64), 230, Scores::random);
    check_dual<T>(budget_policy(), shape_of(64), 230, Scores::improving);
    constexpr float thresholds[] = {-100.0f, 0.5f};
    check_dual<T>(Gated{Sink<>{4}, Window<>{20}, ThresholdGate<at_least>{per_head(thresholds, 1, 2)}},
                  shape_of(64), 120, Scores::random);
}

TEST_CASE("keep parts, selections, evictions and decay") {
    using Parts = Policy<Sink<>, Window<>, TopKBudget<>, Stride<>, QuestPages<>, SnapKVEviction, Decay<3>>;
    constexpr std::int32_t budgets[] = {30, 90};
    constexpr float log_gammas[] = {-0.1f, -0.01f};
    const Parts policy{Sink<>{2},
                       Window<>{17},
                       TopKBudget<>{per_head(budgets, 1, 2)},
                       Stride<>{24},
                       QuestPages<>{16, 100},  // all
                       SnapKVEviction{.average = 60, .share = 0.5f, .observing = 5},
                       Decay<3>{per_head(log_gammas, 1, 2)}};
    check_dual<bf16>(policy, shape_of(64), 150, Scores::random);
}

TEST_CASE("draft tokens") {
    BothCaches<Budget, float, Dims, false> both(shape_of(16), budget_policy());
    auto engine = appending(both);
    std::mt19937 generator(6);
    for (std::int32_t t = 0; t < 60; ++t) {
        std::vector<std::int32_t> drafted, accepted;
        for (int i = 0; i < 3; ++i) {
            drafted.push_back(static_cast<std::int32_t>(generator() % 6));
            accepted.push_back(
                static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(drafted.back() + 1)));
        }
        engine.template draft<Dims>({0, 2, 1}, drafted, accepted,
                                    CallTensors<float>(both.shape, 3, 5, Scores::random, generator));
        both.same_rows("draft " + std::to_string(t));
    }
}

// A scorer with a launch of its own, and states that wait for pages.
TEST_CASE("scorers") {
    std::mt19937 generator(7);
    const auto sized = [](auto scorer) {
        scorer.heads = 2;
        scorer.head_dim_qk = scorer.head_dim_vo = 16;
        scorer.hidden = 9;
        return scorer;
    };
    using Scorer = MlpScorer<>;
    using P = Policy<Sink<>, Window<>, TopKBudget<>, Scorer>;
    const TwoScorers<Scorer> scorers(sized(Scorer{}), true, generator);
    BothCaches<P, float, Dims, false> both(shape_of(16),
                                           P{Sink<>{2}, Window<>{5}, TopKBudget<>{40}, scorers.of_host},
                                           &scorers.of_host, &scorers.of_device);
    auto engine = appending(both);
    for (std::int32_t t = 0; t < 70; ++t) {
        const std::int32_t most = t % 9 == 8 ? 12 : 1;
        const CallTensors<float> in(both.shape, 3, most, Scores::random, generator);
        const std::vector<std::int32_t> tokens{most, t % 3 == 0 ? 0 : most, most};
        if (most == 1) {
            engine.step({0, 1, 2}, tokens, in);
        } else {
            engine.chunk({0, 1, 2}, tokens, in);
        }
        NearHost near{1e-5f};
        both.near_rows(near);
        near.check();
    }
}

TEST_CASE("a pool without pages") {
    BothDuals<Budget, float> both(shape_of(8), {.slab_pages = 5, .max_slabs = 40, .max_seq_len = 300},
                                  budget_policy());
    auto engine = appending(both);
    std::mt19937 generator(8);
    for (std::int32_t t = 0; t < 90; ++t) {
        if (t % 20 == 19) {
            CHECK(both.add_slab());
        }
        engine.step({1, 0, 2}, {1, 1, t % 2},
                    CallTensors<float>(both.shape, 3, 1, Scores::random, generator));
        both.same_rows("step " + std::to_string(t));
        engine.chunk({1, 0, 2}, {2, 0, 3}, CallTensors<float>(both.shape, 3, 3, Scores::random, generator));
        both.same_rows("chunk " + std::to_string(t));
    }
}

namespace {

/// One cache of fp32 with its tensors in device memory, for calls by hand.
struct ByHand {
    kvpolicy::cuda ctx;
    FixedBudgetCache<Budget, float> cache{shape_of(8), budget_policy()};
    Device<unsigned char> memory{cache.bytes().total()};
    Device<float> rows{std::vector<float>(3 * 2 * 5 * 8, 0.5f)}, scores{std::vector<float>(3 * 2 * 5, 1.0f)};
    Device<std::uint32_t> status{std::vector<std::uint32_t>(3, 0)};
    Device<unsigned char> workspace{cache.append_workspace_bytes(ctx, {.batch = 3, .tokens = 5})};
    Device<expiry_t> expiry{3 * 2 * 200};

    ByHand() { cache.bind(ctx, memory.data(), memory.size()); }
    [[nodiscard]] StepIO<float> io(std::int32_t tokens) const {
        const auto in = view_bhsd<const float>(rows.data(), 3, 2, tokens, 8);
        return {.k = in, .v = in, .scores = view_bhs<const float>(scores.data(), 3, 2, tokens)};
    }
};

}  // namespace

TEST_CASE("a layer twice, and graphs") {
    ByHand by;
    const auto append_it = [&] {
        append(by.ctx, by.cache.layer(0), by.io(1), by.workspace, {.status = by.status.data()});
    };
    append_it();
    CHECK(by.status.read() == std::vector<std::uint32_t>(3, 0));
    append_it();
    CHECK(by.status.read() == std::vector<std::uint32_t>(3, status_layer_repeated));
    by.cache.advance(by.ctx, {3});
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    ok(cudaDeviceSynchronize());
    by.ctx = kvpolicy::cuda{stream};
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    append_it();
    by.cache.advance(by.ctx, {3});
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    for (int t = 0; t < 50; ++t) {
        ok(cudaGraphLaunch(executable, stream));
    }
    CHECK(by.cache.length(by.ctx, 1) == 51);
    CHECK(by.cache.usage(by.ctx, 0, 1, 0).size() == 51);
    CHECK(by.cache.usage(by.ctx, 0, 1, 1).size() == 4 + 20 + 7);
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

TEST_CASE("what is refused") {
    ByHand by;
    const auto ref = by.cache.layer(0);
    auto io = by.io(1);
    io.scores = {};
    CHECK_REFUSED(append(by.ctx, ref, io, by.workspace), "io.scores");
    io = by.io(1);
    io.k.data = nullptr;
    CHECK_REFUSED(append(by.ctx, ref, io, by.workspace), "k");
    io = by.io(5);
    CHECK_REFUSED(append(by.ctx, ref, io, by.workspace), "batch.length");
    CHECK_REFUSED(append_chunk(by.ctx, ref, io, {by.workspace.data(), 0}), "workspace.bytes");
    const auto cached = view_bhs(by.expiry.data(), 3, 2, 151), few = view_bhs(by.expiry.data(), 3, 2, 130);
    const auto tokens = view_bhs(by.expiry.data(), 3, 2, 5);
    CHECK_REFUSED(chunk_expiry(by.ctx, ref, io, {few, tokens}, by.workspace), "expiry.cached");
    CHECK_REFUSED(chunk_expiry(by.ctx, ref, io, {cached, {}}, by.workspace), "expiry.tokens");
    CHECK_REFUSED(chunk_expiry(by.ctx, ref, {.batch = {.length = 6}}, {cached, tokens}, by.workspace),
                  "max_draft_tokens");
}
