// Caches at the ends of what can be: a row a head, budgets and windows that no sequence fills, calls that
// bring nothing, tensors that heads share, very large groups.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "paged_case.hpp"
#include "support/step_io.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;
using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>>;

CacheShape shape_of(std::int32_t group, std::int32_t dim, std::int32_t page_size = 1) {
    return {.layers = 2,
            .max_sequences = 3,
            .query_heads = 2 * group,
            .kv_heads = 2,
            .head_dim_qk = dim,
            .head_dim_vo = dim,
            .page_size = page_size,
            .max_draft_tokens = 4};
}

/// A device's step and chunk, of which nothing remains to be done.
template <class Cache>
void check_nothing(Cache& cache, std::int32_t dim, std::int32_t heads) {
    const kvpolicy::cuda ctx{};
    const auto ref = cache.layer(0);
    const Device<unsigned char> workspace(
        workspace_bytes<head_dims<64>>(ctx, ref, {.batch = 3, .tokens = 4}));
    const Device<float> rows(
        std::vector<float>(std::size_t{3} * 4 * static_cast<std::size_t>(heads * dim), 1.0f));
    const Device<float> out(std::vector<float>(rows.size(), 5.0f));
    const Device<std::int32_t> none(std::vector<std::int32_t>{0, 0, 0}),
        nobody(std::vector<std::int32_t>{Batch::no_seq, Batch::no_seq, Batch::no_seq});
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0));
    const test::Extras extras{.scores = view_bhs<const float>(rows.data(), 3, 2, 1)};
    const auto view = [&](std::int32_t n, std::int32_t length) {
        return view_bhsd<const float>(rows.data(), 3, n, length, dim);
    };
    const std::vector<unsigned char> before = [&] {
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, 0));
        cache.snapshot(ctx, 0, blob.data(), blob.size());
        return blob;
    }();
    for (const Batch& batch :
         {Batch{3, nullptr, none.data(), 1}, Batch{3, nobody.data(), nullptr, 1}, Batch{0}}) {
        const bool empty = batch.count == 0;
        const auto q = empty ? view_bhsd<const float>(nullptr, 0, heads, 1, dim) : view(heads, 1);
        const auto k = empty ? view_bhsd<const float>(nullptr, 0, 2, 1, dim) : view(2, 1);
        const auto to = view_bhsd(empty ? nullptr : out.data(), empty ? 0 : 3, heads, 1, dim);
        const test::Extras given = empty ? test::Extras{} : extras;
        step<head_dims<64>>(ctx, ref, test::step_io(batch, q, k, k, to, given), workspace,
                            {.status = status.data()});
        prefill<head_dims<64>>(ctx, ref, test::step_io(batch, q, k, k, to, given), workspace,
                               {.status = status.data()});
        append_draft<head_dims<64>>(ctx, ref, test::step_io(batch, q, k, k, to, given), workspace,
                                    {.status = status.data()});
        accept<head_dims<64>>(ctx, ref, batch, workspace, {.status = status.data()});
        cache.advance(ctx, batch, {.status = status.data()});
    }
    CHECK(status.read() == std::vector<std::uint32_t>(3, 0));
    CHECK(out.read() == std::vector<float>(rows.size(), 5.0f));
    std::vector<unsigned char> after(cache.snapshot_bytes(ctx, 0));
    cache.snapshot(ctx, 0, after.data(), after.size());
    CHECK(after == before);
}

}  // namespace

TEST_CASE("a row a head; windows and budgets that no sequence fills; heads without places") {
    const std::int32_t sinks[] = {0, 0, 0, 5000}, windows[] = {1, 3000, 1, 1}, budgets[] = {0, 0, 1, 4000};
    const Budget policy{Sink<>{per_head(sinks, 2, 2)}, Window<>{per_head(windows, 2, 2)},
                        TopKBudget<>{per_head(budgets, 2, 2)}};
    for (const Scores kind : {Scores::random, Scores::few_values}) {
        std::mt19937 generator(3);
        BothCaches<Budget, float> fixed(shape_of(2, 8), policy);
        random_life(fixed, kind, 60, generator);
    }
    std::mt19937 generator(4);
    BothDuals<Budget, float, all_head_dims, true> dual(
        shape_of(2, 8, 16), {.slab_pages = 7, .max_slabs = 300, .max_seq_len = 6000}, policy);
    random_life(dual, Scores::random, 60, generator);
}

TEST_CASE("calls that bring nothing change nothing") {
    const kvpolicy::cuda ctx{};
    FixedBudgetCache<Budget, float> fixed(shape_of(2, 8), Budget{Sink<>{1}, Window<>{2}, TopKBudget<>{3}});
    const Device<unsigned char> memory(fixed.bytes().total());
    fixed.bind(ctx, memory.data(), memory.size());
    check_nothing(fixed, 8, 4);
    DualCache<Gated, float> dual(
        shape_of(2, 8, 16), {.slab_pages = 1, .max_slabs = 1, .max_seq_len = 100},
        Gated{Sink<>{1}, Window<>{2}, ThresholdGate<at_least>{0.0f}, TopKBudget<>{unlimited}});
    const Device<unsigned char> other(dual.bytes().total());
    dual.bind(ctx, other.data(), other.size());
    check_nothing(dual, 8, 4);  // without a slab
    CHECK(dual.reserve(ctx, {0}) == 0);
}

TEST_CASE("steps of very large groups") {
    for (const std::int32_t group : {17, 64, 200}) {
        CAPTURE(group);
        std::mt19937 generator(static_cast<unsigned>(group));
        BothCaches<Budget, bf16, head_dims<128>, false> both(
            {.layers = 1,
             .max_sequences = 2,
             .query_heads = 2 * group,
             .kv_heads = 2,
             .head_dim_qk = 128,
             .head_dim_vo = 80},
            Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{100}});
        for (std::int32_t t = 0; t < 150; ++t) {
            const CallTensors<bf16> in(both.shape, 2, 1, Scores::random, generator);
            both.call(Mode::step, {1, 0}, {1, t % 4 == 0 ? 0 : 1}, in);
        }
        both.same_rows("after 150 steps");
    }
}

TEST_CASE("keys and values that heads share; outputs that they would") {
    constexpr std::int32_t group = 2, dim = 64;
    const kvpolicy::cuda ctx{};
    const CacheShape shape{.layers = 1,
                           .max_sequences = 2,
                           .query_heads = 2 * group,
                           .kv_heads = 2,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim};
    const Budget policy{Sink<>{2}, Window<>{9}, TopKBudget<>{20}};
    FixedBudgetCache<Budget, bf16> shared(shape, policy), apart(shape, policy);
    const Device<unsigned char> a(shared.bytes().total()), b(apart.bytes().total());
    shared.bind(ctx, a.data(), a.size());
    apart.bind(ctx, b.data(), b.size());
    const Device<unsigned char> workspace(step_workspace_bytes<head_dims<64>>(ctx, shared.layer(0), 2));
    std::mt19937 generator(6);
    for (std::int32_t t = 0; t < 60; ++t) {
        CallTensors<bf16> in(shape, 2, 1, Scores::random, generator);
        for (auto* const rows : {&in.k.data, &in.v.data}) {  // of one head
            for (std::int32_t h = 1; h < 4; ++h) {
                std::copy_n(rows->begin(), dim, rows->begin() + h * dim);
            }
        }
        const Device<bf16> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size()), other(out.size());
        const Device<float> scores(in.scores.data);
        const test::Extras extras{.scores = view_bhs<const float>(scores.data(), 2, 2, 1)};
        const auto q_view = view_bhsd<const bf16>(q.data(), 2, 2 * group, 1, dim);
        const rows_view<const bf16> one_k{k.data(), 2, 2, 1, dim, 0, 0, 0},
            one_v{v.data(), 2, 2, 1, dim, 0, 0, 0};
        step<head_dims<64>>(
            ctx, shared.layer(0),
            test::step_io({2}, q_view, one_k, one_v, view_bhsd(out.data(), 2, 2 * group, 1, dim), extras),
            workspace);
        shared.advance(ctx, {2});
        step<head_dims<64>>(ctx, apart.layer(0),
                            test::step_io({2}, q_view, view_bhsd<const bf16>(k.data(), 2, 2, 1, dim),
                                          view_bhsd<const bf16>(v.data(), 2, 2, 1, dim),
                                          view_bhsd(other.data(), 2, 2 * group, 1, dim), extras),
                            workspace);
        apart.advance(ctx, {2});
        const auto x = out.read(), y = other.read();
        CHECK(std::equal(x.begin(), x.end(), y.begin(), [](bf16 i, bf16 j) { return i.bits == j.bits; }));
        rows_view<bf16> to = view_bhsd(out.data(), 2, 2 * group, 1, dim);
        to.head_stride = 0;
        CHECK_REFUSED((step<head_dims<64>>(ctx, shared.layer(0),
                                           test::step_io({2}, q_view, one_k, one_v, to, extras), workspace)),
                      "out: a head stride of 0");
    }
}
