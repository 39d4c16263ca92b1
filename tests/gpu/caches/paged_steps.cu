// Steps of a DualCache on a device: every structure of a policy, ragged heads, every head_dim and group, a
// pool that runs out, one graph across promotions, refusals.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/decay.hpp>
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

constexpr std::int32_t layers = 2, kv_heads = 3;

constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 4, 17, 2, 40, 3},
                       budgets[] = {unlimited, 0, 400, 130, unlimited, 1}, steps[] = {1, 1, 1, 3, 1, 1};
constexpr float slopes[] = {0.0f, 0.0f, -0.1f, -0.4f, -0.02f, 0.0f},
                gates[] = {-9.0f, 9.0f, 0.0f, -1.0f, 0.5f, 1.5f};

CacheShape shape_of(std::int32_t group) {
    return {.layers = layers,
            .max_sequences = 4,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .head_dim_qk = 8,
            .head_dim_vo = 16,
            .page_size = 16};
}

/// Lives with slabs of few pages, as they are needed; and with a pool that never suffices.
template <class P>
void check(const P& policy, position_t rebase_limit = kvpolicy::rebase_limit,
           const AttentionParams& attention = {}) {
    std::mt19937 generator(7);
    for (const Scores kind : {Scores::random, Scores::few_values, Scores::improving}) {
        CAPTURE(name(kind));
        BothDuals<P, float> ample(shape_of(kind == Scores::random ? 3 : 1),
                                  {.slab_pages = 7, .max_slabs = 200, .max_seq_len = 4000}, policy, nullptr,
                                  nullptr, attention, rebase_limit);
        CHECK(random_life(ample, kind, 120, generator) != 0);
        BothDuals<P, float> scarce(shape_of(1), {.slab_pages = 13, .max_slabs = 3, .max_seq_len = 4000},
                                   policy, nullptr, nullptr, attention, rebase_limit);
        CHECK(random_life(scarce, kind, 120, generator) != 0);
    }
}

using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;

template <class T>
void check_shape(std::int32_t head_dim_qk, std::int32_t head_dim_vo, std::int32_t group,
                 std::int32_t page_size, const AttentionParams& attention = {}) {
    CAPTURE(head_dim_qk);
    CAPTURE(group);
    std::mt19937 generator(static_cast<unsigned>(head_dim_qk * 16 + group));
    // Of random scores: heads that keep all, a half, hardly any.
    constexpr float thresholds[] = {-100.0f, 0.0f, 2.5f};
    constexpr std::int32_t windows_of[] = {20, 5, 64};
    const Gated policy{Sink<>{4}, Window<>{per_head(windows_of, 1, 3)},
                       ThresholdGate<at_least>{per_head(thresholds, 1, 3)}};
    BothDuals<Gated, T> both({.layers = 1,
                              .max_sequences = 3,
                              .query_heads = 3 * group,
                              .kv_heads = 3,
                              .head_dim_qk = head_dim_qk,
                              .head_dim_vo = head_dim_vo,
                              .page_size = page_size},
                             {.slab_pages = 64, .max_slabs = 20, .max_seq_len = 3000}, policy, nullptr,
                             nullptr, attention);
    for (std::int32_t t = 0; t < 110; ++t) {
        const CallTensors<T> in(both.shape, 3, 1, Scores::random, generator);
        both.call(Mode::step, {2, 0, 1}, {1, t % 5 == 0 ? 1 : 0, t % 2}, in);
    }
    both.same_rows("after 110 steps");
}

/// One cache of bf16 with its tensors in device memory, for calls by hand. Every other key is promoted.
struct Call {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
    static constexpr std::int32_t max_sequences = 3, kv_heads = 2, group = 4, dim = 64;
    DualCache<P, bf16> cache{{.layers = 2,
                              .max_sequences = max_sequences,
                              .query_heads = kv_heads * group,
                              .kv_heads = kv_heads,
                              .head_dim_qk = dim,
                              .head_dim_vo = dim,
                              .page_size = 16},
                             {.slab_pages = 32, .max_slabs = 300, .max_seq_len = 10100},
                             P{Sink<>{4}, Window<>{30}, ThresholdGate<at_least>{25.0f}}};
    Device<unsigned char> memory{cache.bytes().total()};
    std::vector<std::unique_ptr<Device<unsigned char>>> slabs;
    Device<bf16> q{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * group * dim, bf16(0.5f))};
    Device<bf16> k{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * dim, bf16(0.25f))};
    Device<bf16> v{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * dim, bf16(1.0f))};
    Device<bf16> out{std::size_t{max_sequences} * kv_heads * group * dim};
    Device<float> scores{std::vector<float>(std::size_t{max_sequences} * kv_heads, 30.0f)};
    Device<std::uint32_t> status{std::vector<std::uint32_t>(max_sequences, 0)};
    kvpolicy::cuda ctx{};

    explicit Call(std::int32_t provided) {
        cache.bind(ctx, memory.data(), memory.size());
        for (std::int32_t i = 0; i < provided; ++i) {
            attach();
        }
    }
    void attach() {
        slabs.push_back(std::make_unique<Device<unsigned char>>(cache.slab_bytes()));
        cache.add_slab(ctx, slabs.back()->data(), slabs.back()->size());
    }
    [[nodiscard]] rows_view<const bf16> q_view() const {
        return view_bhsd<const bf16>(q.data(), max_sequences, kv_heads * group, 1, dim);
    }
    [[nodiscard]] rows_view<const bf16> k_view() const {
        return view_bhsd<const bf16>(k.data(), max_sequences, kv_heads, 1, dim);
    }
    [[nodiscard]] rows_view<const bf16> v_view() const {
        return view_bhsd<const bf16>(v.data(), max_sequences, kv_heads, 1, dim);
    }
    [[nodiscard]] rows_view<bf16> out_view() const {
        return view_bhsd(out.data(), max_sequences, kv_heads * group, 1, dim);
    }
    [[nodiscard]] test::Extras extras() const {
        test::Extras extras;
        extras.scores = view_bhs<const float>(scores.data(), max_sequences, kv_heads, 1);
        return extras;
    }
    [[nodiscard]] std::size_t bytes() const {
        return step_workspace_bytes(ctx, cache.layer(0), max_sequences);
    }
    void run(const Batch& batch, workspace_view workspace, std::int32_t layer = 0) const {
        step(ctx, cache.layer(layer),
             test::step_io(batch, q_view(), k_view(), v_view(), out_view(), extras()), workspace,
             {.status = status.data()});
    }
    void token(workspace_view workspace) {
        run({max_sequences}, workspace, 0);
        run({max_sequences}, workspace, 1);
        cache.advance(ctx, {max_sequences}, {.status = status.data()});
    }
};

bool same(const std::vector<bf16>& a, const std::vector<bf16>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](bf16 x, bf16 y) { return x.bits == y.bits; });
}

}  // namespace

TEST_CASE("budgets by layer and head, some unlimited") {
    check(Policy<Sink<>, Window<>, TopKBudget<>>{Sink<>{per_head(sinks, layers, kv_heads)},
                                                 Window<>{per_head(windows, layers, kv_heads)},
                                                 TopKBudget<>{per_head(budgets, layers, kv_heads)}});
}

TEST_CASE("gates by layer and head") {
    check(Gated{Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
                ThresholdGate<at_least>{per_head(gates, layers, kv_heads)}});
}

TEST_CASE("capped gates, with decay, rebased often, with a logits_soft_cap") {
    check(
        Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>{
            Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
            ThresholdGate<above>{-0.5f}, TopKBudget<>{per_head(budgets, layers, kv_heads)},
            Decay<dynamic>{per_head(slopes, layers, kv_heads), per_head(steps, layers, kv_heads)}},
        11, {.sm_scale = 0.3f, .logits_soft_cap = 2.0f});
}

TEST_CASE("sinks and a window alone") { check(Policy<Sink<3>, Window<20>>{}); }

TEST_CASE_TEMPLATE("16-bit steps at every head_dim and group", T, bf16, fp16) {
    for (const std::int32_t dim : {64, 80, 128, 256}) {
        check_shape<T>(dim, dim, 4, 16);
    }
    for (const std::int32_t group : {1, 3, 8, 12}) {
        check_shape<T>(64, 64, group, 48);
    }
    check_shape<T>(72, 128, 5, 32, {.sm_scale = 0.2f, .logits_soft_cap = 5.0f});
}

namespace {

void check_graph(std::int32_t steps) {
    Call by_graph(2), by_hand(2);
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    const Device<unsigned char> workspace(by_graph.bytes()), other(by_hand.bytes());
    by_graph.token(workspace);  // loads the kernels, which a capture may not
    by_hand.token(other);
    ok(cudaDeviceSynchronize());
    by_graph.ctx = kvpolicy::cuda{stream};
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    by_graph.token(workspace);
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    std::mt19937 generator(5);
    const Device<std::int32_t> ahead(std::vector<std::int32_t>(Call::max_sequences, 50));
    const ReturningTokens<bf16> tokens(by_hand.v.size(), by_hand.scores.size(), generator);
    for (std::int32_t t = 0; t < steps; ++t) {
        for (Call* call : {&by_graph, &by_hand}) {
            while (t % 50 == 0 &&
                   call->cache.reserve(call->ctx, {Call::max_sequences, nullptr, ahead.data()}) > 0) {
                call->attach();
            }
        }
        for (const Call* call : {&by_graph, &by_hand}) {
            tokens.give(t, call->k.data(), call->v.data(), call->scores.data(), call->ctx.stream);
        }
        ok(cudaMemsetAsync(workspace.data(), 0xff, workspace.bytes(), stream));
        ok(cudaGraphLaunch(executable, stream));
        by_hand.token(other);
        if (t % 50 == 0 || steps < 100) {
            CHECK(same(by_graph.out.read(), by_hand.out.read()));
        }
    }
    ok(cudaStreamSynchronize(stream));
    CHECK(by_graph.status.read() == std::vector<std::uint32_t>(Call::max_sequences, 0));
    CHECK(by_hand.status.read() == std::vector<std::uint32_t>(Call::max_sequences, 0));
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

}  // namespace

TEST_CASE("few steps by one graph") { check_graph(60); }
TEST_CASE("one graph serves 10,000 steps, across promotions and slabs") { check_graph(10000); }

namespace {

void check_scarce(std::int32_t tokens) {
    Call scarce(0);
    const Device<unsigned char> workspace(scarce.bytes());
    const std::vector<std::uint32_t> none(Call::max_sequences, 0),
        all(Call::max_sequences, status_pool_exhausted);
    ok(cudaMemset(scarce.out.data(), 0x11, scarce.out.bytes()));
    scarce.token(workspace);
    CHECK(scarce.status.read() == all);
    for (const bf16 x : scarce.out.read()) {
        CHECK(static_cast<float>(x) == 0.0f);
    }
    for (std::int32_t t = 0; t < tokens; ++t) {
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            ok(cudaMemset(scarce.status.data(), 0, scarce.status.bytes()));
            scarce.run({Call::max_sequences}, workspace, layer);
            const auto refused = scarce.status.read();
            if (refused == none) {
                continue;
            }
            std::vector<std::int32_t> ones;
            std::vector<std::uint32_t> words;
            for (const std::uint32_t word : refused) {
                ones.push_back(word != 0 ? 1 : 0);
                words.push_back(word != 0 ? word : std::uint32_t{status_layer_skipped});
            }
            const Device<std::int32_t> again(ones);
            // An advance that should not be made moves nobody: it leaves out tokens that were taken, too.
            ok(cudaMemset(scarce.status.data(), 0, scarce.status.bytes()));
            scarce.cache.advance(scarce.ctx, {Call::max_sequences, nullptr, again.data()},
                                 {.status = scarce.status.data()});
            CHECK(scarce.status.read() == words);
            scarce.attach();
            ok(cudaMemset(scarce.status.data(), 0, scarce.status.bytes()));
            scarce.run({Call::max_sequences, nullptr, again.data()}, workspace, layer);
            CHECK(scarce.status.read() == none);
        }
        scarce.cache.advance(scarce.ctx, {Call::max_sequences}, {.status = scarce.status.data()});
        CHECK(scarce.status.read() == none);
    }
    CHECK(BothDuals<Call::P, bf16>::fetch(scarce.cache.layer(0).length, Call::max_sequences) ==
          std::vector<position_t>(Call::max_sequences, tokens));
    for (std::int32_t seq = 0; seq < Call::max_sequences; ++seq) {
        scarce.cache.clear(scarce.ctx, seq);
    }
    CHECK(scarce.cache.free_pages(scarce.ctx) == scarce.cache.attached_pages());
}

}  // namespace

TEST_CASE("few tokens from a pool that runs out") { check_scarce(40); }
TEST_CASE("a pool that runs out: nothing is lost, and pages come back") { check_scarce(300); }

TEST_CASE("pages of heads as sequences, and what a device finds too late") {
    Call call(16);
    const Device<unsigned char> workspace(call.bytes());
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{1, 0, 1});
    for (std::int32_t t = 0; t < 70; ++t) {
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            call.run({Call::max_sequences, nullptr, lengths.data()}, workspace, layer);
        }
        call.cache.advance(call.ctx, {Call::max_sequences, nullptr, lengths.data()},
                           {.status = call.status.data()});
    }
    const auto capacity = static_cast<std::size_t>(call.cache.pool().max_slabs) * 32;
    const Device<std::int32_t> indptr(std::size_t{Call::max_sequences} * Call::kv_heads + 1),
        last(std::size_t{Call::max_sequences} * Call::kv_heads),
        indices(std::vector<std::int32_t>(capacity, -1));
    export_heads(call.ctx, call.cache.layer(0), {Call::max_sequences},
                 {indptr.data(), indices.data(), last.data(), static_cast<std::int64_t>(capacity)});
    // 70 rows of a head are 5 pages, the last of 6 rows.
    CHECK(indptr.read() == std::vector<std::int32_t>{0, 5, 10, 10, 10, 15, 20});
    CHECK(last.read() == std::vector<std::int32_t>{6, 6, 0, 0, 6, 6});
    const auto ref = call.cache.layer(0);
    const auto table = BothDuals<Call::P, bf16>::fetch(ref.table, 5);
    const auto pages = indices.read();
    CHECK(std::equal(table.begin(), table.end(), pages.begin()));
    const Device<std::int32_t> wrong(std::vector<std::int32_t>{1, 2, -1}),
        named(std::vector<std::int32_t>{0, 7, -3});
    call.run({Call::max_sequences, nullptr, wrong.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.clear(call.ctx, 0);
    call.run({Call::max_sequences, named.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.advance(call.ctx, {Call::max_sequences, named.data()}, {.status = call.status.data()});
    CHECK(call.status.read()[1] == status_bad_length);
}

TEST_CASE("pages that begin around 2^31 and 2^32 bytes") {
    using P = Policy<Window<4>, ThresholdGate<at_least>>;
    const kvpolicy::cuda ctx{};
    // What 60 tokens give, from a slab of so many pages of 16 rows of 256 bytes; where it says so from those
    // at 2^31 and 2^32 bytes first.
    const auto outputs_of = [&](std::int32_t pages, bool far_first) {
        DualCache<P, bf16> cache({.layers = 1,
                                  .max_sequences = 2,
                                  .query_heads = 4,
                                  .kv_heads = 2,
                                  .head_dim_qk = 128,
                                  .head_dim_vo = 128,
                                  .page_size = 16},
                                 {.slab_pages = pages, .max_slabs = 1, .max_seq_len = 100},
                                 P{Window<4>{}, ThresholdGate<at_least>{0.0f}});
        std::vector<float> outputs;
        void* slab = nullptr;
        if (cudaMalloc(&slab, cache.slab_bytes()) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            return outputs;
        }
        const Device<unsigned char> memory(cache.bytes().total());
        cache.bind(ctx, memory.data(), memory.size());
        cache.add_slab(ctx, slab, cache.slab_bytes());
        const auto ref = cache.layer(0);
        if (far_first) {
            auto ids = fetch_from(ref.pool.free_ids, pages);
            constexpr std::int32_t borders[] = {1 << 19, 1 << 20};  // of 2^12 bytes a page
            for (std::int32_t i = 0; i < 16; ++i) {
                const auto first = std::find(ids.begin(), ids.end(), borders[i % 2] + i / 2 - 4);
                std::iter_swap(first, ids.end() - 1 - i);
            }
            ok(cudaMemcpy(ref.pool.free_ids, ids.data(), ids.size() * sizeof ids[0], cudaMemcpyHostToDevice));
        }
        std::mt19937 generator(1);
        const Device<unsigned char> workspace(step_workspace_bytes(ctx, ref, 2));
        for (std::int32_t t = 0; t < 60; ++t) {
            const CallTensors<bf16> in(cache.shape(), 2, 1, Scores::random, generator);
            const Device<bf16> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size());
            const Device<float> scores(in.scores.data);
            test::Extras extras;
            extras.scores = view_bhs<const float>(scores.data(), 2, 2, 1);
            step(ctx, ref,
                 test::step_io({2}, view_bhsd<const bf16>(q.data(), 2, 4, 1, 128),
                               view_bhsd<const bf16>(k.data(), 2, 2, 1, 128),
                               view_bhsd<const bf16>(v.data(), 2, 2, 1, 128),
                               view_bhsd(out.data(), 2, 4, 1, 128), extras),
                 workspace);
            cache.advance(ctx, {2});
            for (const bf16 x : out.read()) {
                outputs.push_back(static_cast<float>(x));
            }
        }
        ok(cudaFree(slab));
        return outputs;
    };
    const auto far = outputs_of(1100000, true);
    if (far.empty()) {
        MESSAGE("skipped: the GPU has not 9.3 GB to spare");
        return;
    }
    CHECK(far == outputs_of(100, false));
}

TEST_CASE("a sequence ends at `longest`") {
    using P = Policy<Window<4>, ThresholdGate<at_least>>;
    DualCache<P, float> cache({.layers = 1,
                               .max_sequences = 1,
                               .query_heads = 1,
                               .kv_heads = 1,
                               .head_dim_qk = 8,
                               .head_dim_vo = 8,
                               .page_size = 16},
                              {.slab_pages = 8, .max_slabs = 1, .max_seq_len = 40},
                              P{Window<4>{}, ThresholdGate<at_least>{0.0f}});
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> memory(cache.bytes().total()), slab(cache.slab_bytes());
    cache.bind(ctx, memory.data(), memory.size());
    cache.add_slab(ctx, slab.data(), slab.size());
    const Device<float> row(std::vector<float>(8, 1.0f)), out(8), score(std::vector<float>(1, 1.0f));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
    const Device<unsigned char> workspace(step_workspace_bytes(ctx, cache.layer(0), 1));
    test::Extras extras;
    extras.scores = view_bhs<const float>(score.data(), 1, 1, 1);
    const auto rows = view_bhsd<const float>(row.data(), 1, 1, 1, 8);
    for (std::int32_t t = 0; t < 41; ++t) {
        CHECK(status.read()[0] == 0);
        step(ctx, cache.layer(0),
             test::step_io({1}, rows, rows, rows, view_bhsd(out.data(), 1, 1, 1, 8), extras), workspace,
             {.status = status.data()});
        cache.advance(ctx, {1}, {.status = status.data()});
        if (t == 39) {  // one that is full can be attended to as any other
            const std::vector<float> wanted = out.read();
            ok(cudaMemset(out.data(), 0xff, out.bytes()));
            attend(ctx, cache.layer(0), {.q = rows, .out = view_bhsd(out.data(), 1, 1, 1, 8), .batch = {1}},
                   workspace, {.status = status.data()});
            CHECK(out.read() == wanted);
        }
    }
    CHECK(status.read()[0] == status_bad_length);
    CHECK(BothDuals<P, float>::fetch(cache.layer(0).length, 1)[0] == 40);
}

TEST_CASE("refusals: one sentence, before anything runs") {
    Call call(1);
    const Device<unsigned char> workspace(call.bytes());
    const auto ref = call.cache.layer(0);
    const workspace_view provided = workspace;
    const auto run = [&](const Batch& batch, rows_view<const bf16> q, workspace_view memory,
                         const test::Extras& extras) {
        step(call.ctx, ref, test::step_io(batch, q, call.k_view(), call.v_view(), call.out_view(), extras),
             memory);
    };
    CHECK_REFUSED(run({Call::max_sequences}, call.q_view(), {provided.data, 8}, call.extras()),
                  "workspace.bytes");
    CHECK_REFUSED(run({Call::max_sequences + 1}, call.q_view(), provided, call.extras()), "batch.count");
    CHECK_REFUSED(run({Call::max_sequences}, call.q_view(), provided, {}), "io.scores");
    CHECK_REFUSED(static_cast<void>(call.cache.free_pages()), "device's memory");
    CHECK_REFUSED(static_cast<void>(call.cache.reserve(host{1}, {1})), "device's memory");
    CHECK_REFUSED(call.cache.clear(host{1}, 0), "device's memory");
    CHECK_REFUSED(call.cache.clear(call.ctx, 3), "seq");
    CHECK_REFUSED(call.cache.add_slab(call.ctx, call.slabs[0]->data(), call.slabs[0]->size()),
                  "memory that no slab has yet");
    DualCache<Call::P, bf16> odd({.layers = 1,
                                  .max_sequences = 1,
                                  .query_heads = 1,
                                  .kv_heads = 1,
                                  .head_dim_qk = 64,
                                  .head_dim_vo = 64,
                                  .page_size = 24},
                                 {.slab_pages = 1, .max_slabs = 1, .max_seq_len = 10},
                                 Call::P{Sink<>{4}, Window<>{30}, ThresholdGate<at_least>{25.0f}});
    CHECK_REFUSED(odd.bind(call.ctx, call.memory.data(), call.memory.size()), "page_size");
}
