// append, append_chunk and chunk_expiry, in both kinds of caches: they leave what step and prefill leave, and
// attention written plainly over exported pages gives their outputs.
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

using namespace kvpolicy;

namespace {

constexpr std::int32_t group = 2, kv_heads = 2, dim_qk = 8, dim_vo = 16, sequences = 3;
constexpr CacheShape shape{.layers = 1,
                           .max_sequences = sequences,
                           .query_heads = group * kv_heads,
                           .kv_heads = kv_heads,
                           .head_dim_qk = dim_qk,
                           .head_dim_vo = dim_vo,
                           .page_size = 3,
                           .max_draft_tokens = 6};
constexpr PoolShape pool{.slab_pages = 2, .max_slabs = 900, .max_seq_len = 400};

template <class P, bool Pooled>
struct Bound : std::conditional_t<Pooled, test::BoundDual<P, float>, test::BoundCache<P, float>> {
    Bound(const host& ctx, const P& policy) requires Pooled
        : test::BoundDual<P, float>(ctx, shape, pool, policy) {}
    Bound(const host& ctx, const P& policy) requires(!Pooled)
        : test::BoundCache<P, float>(ctx, shape, policy) {}
    void pages(const host& ctx, const Batch& batch) {
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
        : q(sequences, group * kv_heads, length, dim_qk),
          k(sequences, kv_heads, length, dim_qk),
          v(sequences, kv_heads, length, dim_vo),
          out(sequences, group * kv_heads, length, dim_vo),
          scores(sequences, kv_heads, length),
          lse(sequences, group * kv_heads, length) {
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        out.fill(7.0f);
        test::fill_scores(scores, test::Scores::random, generator);
    }
    template <class P>
    StepIO<float> io(const Batch& batch) {
        test::Extras extras{.scores = std::as_const(scores).view(), .lse = lse.view()};
        return test::step_io<float>(batch, q.view(), k.view(), v.view(), out.view(),
                                    test::wanted_by<P>(extras));
    }
    /// Without what an engine has for itself; queries only where the policy keeps them.
    template <class P>
    StepIO<float> engine_io(const Batch& batch) {
        StepIO<float> io = this->io<P>(batch);
        io.out = {};
        io.lse = {};
        if (!P::has_eviction) {
            io.q = {};
        }
        return io;
    }
};

/// The engine's tables of one layer.
struct Tables {
    std::vector<std::int32_t> indptr, indices, last_page_len;

    template <class Ref>
    Tables(const host& ctx, const Ref& ref, const Batch& batch)
        : indptr(static_cast<std::size_t>(batch.count) * kv_heads + 1),
          indices(static_cast<std::size_t>(ref.page_count())),
          last_page_len(static_cast<std::size_t>(batch.count) * kv_heads) {
        export_heads(
            ctx, ref, batch,
            {indptr.data(), indices.data(), last_page_len.data(), static_cast<std::int64_t>(indices.size())});
    }
    std::int32_t rows(std::int32_t s) const {
        const std::int32_t pages =
            indptr[static_cast<std::size_t>(s) + 1] - indptr[static_cast<std::size_t>(s)];
        return pages == 0 ? 0 : (pages - 1) * shape.page_size + last_page_len[static_cast<std::size_t>(s)];
    }
    /// The page of row r, and the row's place in it.
    std::pair<std::int32_t, std::int32_t> place(std::int32_t s, std::int32_t r) const {
        const auto page = static_cast<std::size_t>(indptr[static_cast<std::size_t>(s)] + r / shape.page_size);
        return {indices[page], r % shape.page_size};
    }
};

template <class P>
std::pair<const float*, const float*> row_at(const FixedBudgetRef<P, float>& ref, std::int32_t page,
                                             std::int32_t row) {
    const std::int64_t at = std::int64_t{page} * ref.page_size + row;
    return {ref.k + at * ref.head_dim_qk, ref.v + at * ref.head_dim_vo};
}
template <class P>
std::pair<const float*, const float*> row_at(const DualRef<P, float>& ref, std::int32_t page,
                                             std::int32_t row) {
    const Slab<float>& slab = ref.pool.slabs[page / ref.pool.slab_pages];
    const std::int64_t at = std::int64_t{page % ref.pool.slab_pages} * ref.page_size + row;
    return {slab.k + at * ref.head_dim_qk, slab.v + at * ref.head_dim_vo};
}

/// Attention in double as an engine has it: over its tables, and over the chunk itself with expiries. The
/// largest difference from call.out; `masses`, where given, takes mean weights over the group.
template <class Ref>
double engine_attention(const host& ctx, const Ref& ref, const Batch& batch, const Call& call,
                        const ChunkExpiry* expiry, test::Plane<float>* masses = nullptr) {
    const Tables tables(ctx, ref, batch);
    double off = 0.0;
    for (std::int32_t x = 0; x < batch.count * group * kv_heads; ++x) {
        const std::int32_t i = x / (group * kv_heads), head = x % (group * kv_heads), h = head / group;
        const std::int32_t s = i * kv_heads + h, rows = tables.rows(s);
        for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
            std::vector<double> weights;
            std::vector<const float*> values;
            const auto see = [&](const float* k, const float* v) {
                double logit = 0.0;
                for (std::int32_t d = 0; d < dim_qk; ++d) {
                    logit += double{call.q.view().row(i, head, j)[d]} * double{k[d]};
                }
                weights.push_back(std::exp(logit / std::sqrt(double{dim_qk})));
                values.push_back(v);
            };
            for (std::int32_t r = 0; r < rows; ++r) {
                if (expiry == nullptr || j < expiry->cached.head(i, h)[r]) {
                    const auto [page, row] = tables.place(s, r);
                    const auto [k, v] = row_at(ref, page, row);
                    see(k, v);
                }
            }
            for (std::int32_t t = 0; expiry != nullptr && t <= j; ++t) {
                if (j < expiry->tokens.head(i, h)[t]) {
                    see(call.k.view().row(i, h, t), call.v.view().row(i, h, t));
                }
            }
            const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
            for (std::int32_t d = 0; d < dim_vo; ++d) {
                double wanted = 0.0;
                for (std::size_t n = 0; n < weights.size(); ++n) {
                    wanted += weights[n] / sum * double{values[n][d]};
                }
                off = std::max(off, std::abs(wanted - double{call.out.view().row(i, head, j)[d]}));
            }
            for (std::size_t n = 0; masses != nullptr && n < weights.size(); ++n) {
                masses->view().head(i, h)[n] += static_cast<float>(weights[n] / sum / group);
            }
        }
    }
    return off;
}

/// Steps, chunks and drafts with an engine's attention, beside a cache that attends.
template <bool Pooled, class P>
void check_append(const P& policy, std::uint32_t seed) {
    const host ctx(2);
    Bound<P, Pooled> attending(ctx, policy), appending(ctx, policy);
    std::mt19937 generator(seed);
    bool same = true;
    double off = 0.0;
    for (int round = 0; round < 90; ++round) {
        const std::int32_t most = round % 4 == 1 ? 11 : round % 4 == 3 ? 6 : 1;
        const bool draft = most == 6;
        std::int32_t tokens[sequences], accepted[sequences];
        for (std::size_t i = 0; i < sequences; ++i) {
            tokens[i] = static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(most + 1));
            accepted[i] =
                draft ? static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(tokens[i] + 1))
                      : tokens[i];
        }
        const std::int32_t seq_ids[sequences] = {2, 0, 1};
        const Batch batch{sequences, seq_ids, tokens, most}, stays{sequences, seq_ids, accepted, most};
        attending.pages(ctx, stays);
        appending.pages(ctx, stays);
        Call call(most, generator);
        const auto a = attending.cache.layer(0), b = appending.cache.layer(0);
        test::Workspace own(workspace_bytes(ctx, a, {.batch = sequences, .tokens = most})),
            small(append_workspace_bytes(ctx, b, {.batch = sequences, .tokens = most}));
        test::Plane<expiry_t> cached(sequences, kv_heads, 400, -5), of_tokens(sequences, kv_heads, most, -5);
        const ChunkExpiry expiry{cached.view(), of_tokens.view()};
        const auto io = call.io<P>(batch), engine = call.engine_io<P>(batch);
        if (most == 1) {
            step(ctx, a, io, own);
            append(ctx, b, engine, small);
            if constexpr (!P::has_selection) {
                off = std::max(off, engine_attention(ctx, b, batch, call, nullptr));
            }
        } else if (draft) {
            append_draft(ctx, a, io, own);
            accept(ctx, a, stays, own);
            append_draft(ctx, b, engine, own);
            chunk_expiry(ctx, b, {.batch = batch}, expiry, small);
            off = std::max(off, engine_attention(ctx, b, batch, call, &expiry));
            accept(ctx, b, stays, own);
        } else {
            prefill(ctx, a, io, own);
            chunk_expiry(ctx, b, engine, expiry, small);
            off = std::max(off, engine_attention(ctx, b, batch, call, &expiry));
            append_chunk(ctx, b, engine, small);
        }
        attending.cache.advance(ctx, stays);
        appending.cache.advance(ctx, stays);
        for (std::int32_t seq = 0; seq < sequences; ++seq) {
            same = same &&
                   test::content_of(a, seq, P::has_selection) == test::content_of(b, seq, P::has_selection);
        }
        if constexpr (P::has_eviction && Pooled) {
            test::Workspace evicting(attending.cache.evict_workspace_bytes(ctx));
            attending.cache.evict(ctx, stays, evicting);
            appending.cache.evict(ctx, stays, evicting);
        }
    }
    CHECK(same);
    // fp32 sums of at most a few hundred terms of weights that sum to 1.
    CHECK(off <= 64 * 1.2e-7 * 5.0);
}

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;
const Budget budget{Sink<>{2}, Window<>{4}, TopKBudget<>{9}};

}  // namespace

TEST_CASE("an engine's attention beside the library's") {
    check_append<false>(budget, 1);
    check_append<true>(budget, 2);
    check_append<true>(
        Policy<Window<>, ThresholdGate<at_least>, Stride<>>{Window<>{3}, ThresholdGate<at_least>{0.5f},
                                                            Stride<>{7}},
        3);
}
TEST_CASE("parts that keep something beside rows") {
    using Parts = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<3>, SnapKVEviction>;
    check_append<true>(Parts{Sink<>{1}, Window<>{5}, TopKBudget<>{40}, QuestPages<3>{2},
                             SnapKVEviction{.average = 20, .share = 0.4f, .observing = 4}},
                       4);
}
TEST_CASE("scorers") {
    LinearScorer<> linear;
    linear.heads = kv_heads;
    linear.head_dim_qk = dim_qk;
    linear.head_dim_vo = dim_vo;
    std::vector<float> weight(static_cast<std::size_t>(kv_heads) * (dim_qk + dim_vo));
    for (std::size_t i = 0; i < weight.size(); ++i) {
        weight[i] = 0.1f * static_cast<float>(i % 7) - 0.3f;
    }
    linear.weights.weight = weight.data();
    using P = Policy<Sink<>, Window<>, TopKBudget<>, LinearScorer<>>;
    check_append<false>(P{Sink<>{2}, Window<>{4}, TopKBudget<>{9}, linear}, 5);
}

namespace {

/// Steps with the engine's masses, beside steps that collect them.
template <bool Pooled, class P>
void check_observed(const P& policy) {
    const host ctx(2);
    Bound<P, Pooled> attending(ctx, policy), appending(ctx, policy);
    std::mt19937 generator(9);
    bool same = true;
    double off = 0.0, masses_off = 0.0;
    const Batch batch{.count = sequences, .length = 1};
    for (int t = 0; t < 60; ++t) {
        attending.pages(ctx, batch);
        appending.pages(ctx, batch);
        Call call(1, generator);
        const auto a = attending.cache.layer(0), b = appending.cache.layer(0);
        test::Workspace own(workspace_bytes(ctx, a, {.batch = sequences, .tokens = 1})),
            small(append_workspace_bytes(ctx, b, {.batch = sequences}));
        step(ctx, a, call.io<P>(batch), own);
        append(ctx, b, call.engine_io<P>(batch), small);
        test::Plane<float> masses(sequences, kv_heads, 400);
        off = std::max(off, engine_attention(ctx, b, batch, call, nullptr, &masses));
        attending.cache.advance(ctx, batch);
        if (t % 2 == 0) {
            appending.cache.advance(ctx, batch);
        }
        if constexpr (P::scorer_type::evicts_at_steps) {
            observe(ctx, b, batch, masses.view());
        }
        if (t % 2 != 0) {
            appending.cache.advance(ctx, batch);
        }
        for (std::int32_t x = 0; x < sequences * kv_heads; ++x) {
            const std::int32_t seq = x / kv_heads, h = x % kv_heads;
            const auto left = a.head_rows(seq, h), right = b.head_rows(seq, h);
            same = same && a.used(seq, h) == b.used(seq, h);
            for (std::int32_t r = 0; same && r < a.used(seq, h); ++r) {
                same = left.position(r) == right.position(r) &&
                       std::equal(left.k(r), left.k(r) + dim_qk, right.k(r)) &&
                       std::equal(left.v(r), left.v(r) + dim_vo, right.v(r));
                masses_off = std::max(masses_off, std::abs(double{left.score(r)} - double{right.score(r)}));
            }
        }
    }
    CHECK(same);
    CHECK(off <= 64 * 1.2e-7 * 5.0);
    // A mass is a sum of up to 60 weights of at most 1, rounded to fp32 after each.
    CHECK(masses_off <= 60 * 60 * 0x1p-24);
}

}  // namespace

TEST_CASE("policies that rank by attention take the engine's masses") {
    check_observed<false>(Policy<Sink<>, Window<>, TopKBudget<>, AccumulatedMass>{
        Sink<>{1}, Window<>{3}, TopKBudget<>{8}, AccumulatedMass{}});
    check_observed<true>(Policy<Window<>, TopKBudget<>, LastMass>{Window<>{2}, TopKBudget<>{9}, LastMass{}});
    check_observed<true>(Policy<Window<>, TopKBudget<>, LastMass>{Window<>{2}, TopKBudget<>{9},
                                                                  LastMass{.whole_layer = false}});
    check_observed<true>(
        Policy<Window<>, TopKBudget<>, WindowMass>{Window<>{2}, TopKBudget<>{9}, WindowMass{}});
}

TEST_CASE("a chunk's queries see keys that the chunk evicts") {
    const host ctx(1);
    using Recent = Policy<Window<2>>;
    test::BoundCache<Recent, float> bound(ctx, shape, Recent{});
    std::mt19937 generator(1);
    const auto ref = bound.cache.layer(0);
    for (int t = 0; t < 2; ++t) {
        Call call(1, generator);
        test::Workspace workspace(append_workspace_bytes(ctx, ref, {.batch = sequences}));
        append(ctx, ref, call.engine_io<Recent>({}), workspace);
        bound.cache.advance(ctx);
    }
    Call call(2, generator);
    test::Plane<expiry_t> cached(sequences, kv_heads, 2), tokens(sequences, kv_heads, 2);
    const StepIO<float> io = call.engine_io<Recent>({});
    test::Workspace workspace(append_workspace_bytes(ctx, ref, {.batch = sequences, .tokens = 2}));
    chunk_expiry(ctx, ref, io, {cached.view(), tokens.view()}, workspace);
    // Tokens 2 and 3: token 2 evicts key 0, token 3 key 1.
    for (std::int32_t h = 0; h < kv_heads; ++h) {
        const expiry_t *const of_cached = cached.view().head(1, h), *const of_tokens =
                                                                        tokens.view().head(1, h);
        CHECK((of_cached[0] == 0 && of_cached[1] == 1));
        CHECK((of_tokens[0] == 2 && of_tokens[1] == 3));
    }
    append_chunk(ctx, ref, io, workspace);
    bound.cache.advance(ctx, {.length = 2});
    CHECK(bound.sorted(0, 0, 1) == std::vector<position_t>{2, 3});
}

TEST_CASE("a pool without pages") {
    const host ctx(1);
    test::BoundDual<Budget, float> bound(ctx, shape, pool, budget);
    std::mt19937 generator(1);
    Call call(1, generator);
    const Batch batch{.count = sequences, .length = 1};
    const auto ref = bound.cache.layer(0);
    test::Workspace workspace(append_workspace_bytes(ctx, ref, {.batch = sequences}));
    CHECK_REFUSED(append(ctx, ref, call.engine_io<Budget>(batch), workspace), "free pages of the pool");
    bound.add_slab(ctx);
    std::uint32_t status[sequences] = {};
    append(ctx, ref, call.engine_io<Budget>(batch), workspace, {.status = status});
    CHECK(std::vector<std::uint32_t>(status, status + sequences) ==
          std::vector<std::uint32_t>{0, status_pool_exhausted, status_pool_exhausted});
    CHECK(ref.used(0, 1) == 1);
    CHECK(ref.used(1, 1) == 0);
}

TEST_CASE("what is refused") {
    const host ctx(1);
    test::BoundCache<Budget, float> bound(ctx, shape, budget);
    const auto ref = bound.cache.layer(0);
    std::mt19937 generator(1);
    Call call(4, generator);
    const Batch one{.count = sequences, .length = 1}, four{.count = sequences, .length = 4};
    test::Workspace workspace(bound.cache.append_workspace_bytes(ctx, {.batch = sequences, .tokens = 4}));
    CHECK_REFUSED(append(ctx, ref, call.engine_io<Budget>(four), workspace), "append_chunk");
    CHECK_REFUSED(append(ctx, ref, call.engine_io<Budget>(one), {workspace.memory.data(), 0}),
                  "workspace.bytes");
    auto io = call.engine_io<Budget>(one);
    io.k = {};
    CHECK_REFUSED(append(ctx, ref, io, workspace), "k");
    io = call.engine_io<Budget>(one);
    io.scores = {};
    CHECK_REFUSED(append(ctx, ref, io, workspace), "io.scores");
    call.scores.at(0, 0, 3) = std::numeric_limits<float>::quiet_NaN();
    CHECK_REFUSED(append_chunk(ctx, ref, call.engine_io<Budget>(four), workspace), "NaN");
    call.scores.at(0, 0, 3) = 0.0f;
    append_chunk(ctx, ref, call.engine_io<Budget>(four), workspace);
    CHECK_REFUSED(append(ctx, ref, call.engine_io<Budget>(one), workspace), "already");
    bound.cache.advance(ctx, four);
    test::Plane<expiry_t> cached(sequences, kv_heads, 3), tokens(sequences, kv_heads, 4);
    CHECK_REFUSED(
        chunk_expiry(ctx, ref, call.engine_io<Budget>(four), {cached.view(), tokens.view()}, workspace),
        "expiry.cached");
    test::Plane<expiry_t> enough(sequences, kv_heads, 4), few(sequences, kv_heads, 3);
    CHECK_REFUSED(
        chunk_expiry(ctx, ref, call.engine_io<Budget>(four), {enough.view(), few.view()}, workspace),
        "expiry.tokens");
    CHECK_REFUSED(chunk_expiry(ctx, ref, {.batch = four}, {enough.view(), tokens.view()}, workspace),
                  "drafted");

    using Observed = Policy<Window<>, TopKBudget<>, AccumulatedMass>;
    const Observed h2o{Window<>{2}, TopKBudget<>{9}, AccumulatedMass{}};
    test::BoundCache<Observed, float> observed(ctx, shape, h2o);
    const auto layer = observed.cache.layer(0);
    test::Workspace more(append_workspace_bytes(ctx, layer, {.batch = sequences}));
    append(ctx, layer, call.engine_io<Observed>(one), more);
    test::Plane<float> masses(sequences, kv_heads, 1);
    masses.at(1, 1, 0) = -0.5f;
    CHECK_REFUSED(observe(ctx, layer, one, masses.view()), "masses[1][1][0]");
    masses.length = 0;
    CHECK_REFUSED(observe(ctx, layer, one, masses.view()), "masses");
}
