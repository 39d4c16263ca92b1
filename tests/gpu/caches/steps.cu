// Steps of 16-bit caches at every head_dim and group, on caches long enough to be shared by many blocks; and
// what surrounds a step: graphs, empty sequences, rows that nobody wrote, refusals, status.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "cache_case.hpp"
#include "support/step_io.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;

Budget policy_of(std::int32_t budget) { return Budget{Sink<>{4}, Window<>{60}, TopKBudget<>{budget}}; }

/// Fills both caches with the same tokens, the device's by a snapshot of the host's.
template <class Both, class T>
void fill(Both& both, const std::vector<std::int32_t>& lengths, const CallTensors<T>& in) {
    const auto count = static_cast<std::int32_t>(lengths.size());
    const Batch batch{count, nullptr, lengths.data(), in.q.length};
    Tensor<T> out(count, both.shape.query_heads, in.q.length, both.shape.head_dim_vo);
    Workspace workspace(
        workspace_bytes(both.ctx, both.oracle.cache.layer(0), {.batch = count, .tokens = in.q.length}));
    test::Extras extras;
    extras.scores = in.scores.view();
    prefill(both.ctx, both.oracle.cache.layer(0),
            test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), out.view(), extras), workspace);
    both.oracle.cache.advance(both.ctx, batch);
    for (std::int32_t seq = 0; seq < count; ++seq) {
        std::vector<unsigned char> blob(both.oracle.cache.snapshot_bytes(seq));
        both.oracle.cache.snapshot(both.ctx, seq, blob.data(), blob.size());
        both.cache.restore(both.device, seq, blob.data(), blob.size());
    }
    both.same_rows("after restoring");
}

template <class T>
void check(std::int32_t head_dim_qk, std::int32_t head_dim_vo, std::int32_t group, std::int32_t budget,
           Scores kind, const AttentionParams& attention = {}) {
    CAPTURE(head_dim_qk);
    CAPTURE(group);
    CAPTURE(budget);
    std::mt19937 generator(static_cast<unsigned>(head_dim_qk * 16 + group));
    BothCaches<Budget, T, all_head_dims, false> both({.layers = 1,
                                                      .max_sequences = 3,
                                                      .query_heads = 2 * group,
                                                      .kv_heads = 2,
                                                      .head_dim_qk = head_dim_qk,
                                                      .head_dim_vo = head_dim_vo},
                                                     policy_of(budget), nullptr, nullptr, attention);
    fill(both, {budget + 300, budget / 2, 3}, CallTensors<T>(both.shape, 3, budget + 300, kind, generator));
    for (std::int32_t t = 0; t < 12; ++t) {
        const CallTensors<T> in(both.shape, 3, 1, kind, generator);
        both.call(Mode::step, {2, 0, 1}, {1, 1, t % 4 == 3 ? 0 : 1}, in);
        both.same_rows("step " + std::to_string(t));
    }
}

/// One cache of bf16 with its tensors in device memory, for calls by hand.
struct Call {
    static constexpr std::int32_t max_sequences = 3, kv_heads = 2, group = 4, dim = 64;
    FixedBudgetCache<Budget, bf16> cache{{.layers = 1,
                                          .max_sequences = max_sequences,
                                          .query_heads = kv_heads * group,
                                          .kv_heads = kv_heads,
                                          .head_dim_qk = dim,
                                          .head_dim_vo = dim},
                                         policy_of(100)};
    Device<unsigned char> memory{cache.bytes().total()};
    Device<bf16> q{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * group * dim, bf16(0.5f))};
    Device<bf16> k{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * dim, bf16(0.25f))};
    Device<bf16> v{std::vector<bf16>(std::size_t{max_sequences} * kv_heads * dim, bf16(1.0f))};
    Device<bf16> out{std::size_t{max_sequences} * kv_heads * group * dim};
    Device<float> scores{std::vector<float>(std::size_t{max_sequences} * kv_heads, 1.0f)};
    Device<std::uint32_t> status{std::vector<std::uint32_t>(max_sequences, 0)};
    kvpolicy::cuda ctx{};

    Call() { cache.bind(ctx, memory.data(), memory.size()); }
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
    void run(const Batch& batch, workspace_view workspace) const {
        step(ctx, cache.layer(0), test::step_io(batch, q_view(), k_view(), v_view(), out_view(), extras()),
             workspace, {.status = status.data()});
    }
};

}  // namespace

TEST_CASE_TEMPLATE("steps at every head_dim and group", T, bf16, fp16) {
    for (const std::int32_t dim : {64, 80, 96, 128, 256}) {
        check<T>(dim, dim, 4, 600, Scores::random);
    }
    for (const std::int32_t group : {1, 3, 5, 7, 8, 16}) {
        check<T>(64, 64, group, 400, Scores::few_values);
    }
    check<T>(72, 128, 4, 300, Scores::improving);
    check<T>(128, 64, 3, 3000, Scores::improving, {.sm_scale = 0.2f, .logits_soft_cap = 5.0f});
}

namespace {

void check_graph(std::int32_t steps) {
    Call by_graph, by_hand;
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    const Device<unsigned char> workspace(by_graph.bytes());
    by_graph.run({Call::max_sequences}, workspace);  // loads the kernels, which a capture may not
    by_graph.cache.advance(by_graph.ctx, {Call::max_sequences});
    ok(cudaDeviceSynchronize());
    by_graph.ctx = kvpolicy::cuda{stream};
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    by_graph.run({Call::max_sequences}, workspace);
    by_graph.cache.advance(by_graph.ctx, {Call::max_sequences});
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    std::mt19937 generator(5);
    const Device<unsigned char> other(by_hand.bytes());
    by_hand.run({Call::max_sequences}, other);
    by_hand.cache.advance(by_hand.ctx, {Call::max_sequences});
    const ReturningTokens<bf16> tokens(by_hand.v.size(), by_hand.scores.size(), generator);
    for (std::int32_t t = 1; t < steps; ++t) {
        for (const Call* call : {&by_graph, &by_hand}) {
            tokens.give(t, call->k.data(), call->v.data(), call->scores.data(), call->ctx.stream);
        }
        ok(cudaMemsetAsync(workspace.data(), 0xff, workspace.bytes(), stream));
        ok(cudaGraphLaunch(executable, stream));
        by_hand.run({Call::max_sequences}, other);
        by_hand.cache.advance(by_hand.ctx, {Call::max_sequences});
        if (t % 50 == 0 || steps < 100) {
            const auto a = by_graph.out.read(), b = by_hand.out.read();
            CHECK(std::equal(a.begin(), a.end(), b.begin(), [](bf16 x, bf16 y) { return x.bits == y.bits; }));
        }
    }
    ok(cudaStreamSynchronize(stream));
    CHECK(by_graph.status.read() == std::vector<std::uint32_t>(Call::max_sequences, 0));
    std::vector<unsigned char> x(by_graph.cache.snapshot_bytes(by_graph.ctx, 1)), y(x.size());
    by_graph.cache.snapshot(by_graph.ctx, 1, x.data(), x.size());
    by_hand.cache.snapshot(by_hand.ctx, 1, y.data(), y.size());
    CHECK(x == y);
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

}  // namespace

TEST_CASE("few steps by one graph") { check_graph(12); }
TEST_CASE("one graph serves 10,000 steps") { check_graph(10000); }

TEST_CASE("what a host would refuse: counts, sequences and scores in device memory") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{1, 2, -1}),
        named(std::vector<std::int32_t>{0, 7, -3});
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    const auto before = call.out.read();
    call.run({Call::max_sequences, nullptr, lengths.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    const auto after = call.out.read();
    const std::size_t each = before.size() / Call::max_sequences;
    CHECK(static_cast<float>(after[0]) == 1.0f);  // the only value
    CHECK(std::equal(after.begin() + static_cast<std::ptrdiff_t>(each), after.end(),
                     before.begin() + static_cast<std::ptrdiff_t>(each),
                     [](bf16 x, bf16 y) { return x.bits == y.bits; }));
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.clear(call.ctx, 0);
    call.run({Call::max_sequences, named.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    // Entries of sequence -1 bring no token, and nothing is wrong with them: a padded batch.
    const Device<std::int32_t> padded(std::vector<std::int32_t>{-1, 2, -1});
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    call.run({Call::max_sequences, padded.data()}, workspace);
    call.cache.advance(call.ctx, {Call::max_sequences, padded.data()}, {.status = call.status.data()});
    CHECK(call.status.read() == std::vector<std::uint32_t>(Call::max_sequences, 0));
    const auto of_second = call.out.read();
    CHECK(of_second[0].bits == before[0].bits);
    CHECK(static_cast<float>(of_second[each]) == 1.0f);
    CHECK(of_second[2 * each].bits == before[0].bits);
    CHECK(fetch_from(call.cache.layer(0).length, Call::max_sequences) == std::vector<position_t>{0, 0, 1});
    // A NaN ranks last: once the budget is full of numbers, none is left.
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.clear(call.ctx, 0);
    const float numbers[] = {std::numeric_limits<float>::quiet_NaN(), 1.0f};
    const Device<std::int32_t> first(std::vector<std::int32_t>{1, 0, 0});
    for (std::int32_t t = 0; t < 400; ++t) {
        for (std::int32_t h = 0; h < Call::kv_heads; ++h) {
            ok(cudaMemcpy(call.scores.data() + h, numbers + (t % 3 == 0 ? 0 : 1), sizeof(float),
                          cudaMemcpyHostToDevice));
        }
        call.run({Call::max_sequences, nullptr, first.data()}, workspace);
        call.cache.advance(call.ctx, {Call::max_sequences, nullptr, first.data()});
    }
    CHECK(call.status.read() == std::vector<std::uint32_t>{status_nan_score, 0, 0});
    const auto ref = call.cache.layer(0);
    for (const position_t t : BothCaches<Budget, bf16>::fetch(ref.position + 64, 100)) {
        CHECK(t % 3 != 0);
    }
}

TEST_CASE("attention over rows, pages, an empty sequence") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{1, 0, 1});
    for (std::int32_t t = 0; t < 70; ++t) {
        call.run({Call::max_sequences, nullptr, lengths.data()}, workspace);
        call.cache.advance(call.ctx, {Call::max_sequences, nullptr, lengths.data()});
    }
    const auto stepped = call.out.read();
    const Device<float> lse(std::size_t{Call::max_sequences} * Call::kv_heads * Call::group);
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    attend(call.ctx, call.cache.layer(0),
           {.q = call.q_view(),
            .out = call.out_view(),
            .batch = {Call::max_sequences},
            .lse = view_bhs(lse.data(), Call::max_sequences, Call::kv_heads * Call::group, 1)},
           workspace);
    const auto looked = call.out.read();
    const std::size_t each = looked.size() / Call::max_sequences;
    for (std::size_t x = 0; x < looked.size(); ++x) {
        const float wanted = x / each == 1 ? 0.0f : static_cast<float>(stepped[x]);
        CHECK(static_cast<float>(looked[x]) == doctest::Approx(wanted));
    }
    CHECK(lse.read()[Call::kv_heads * Call::group] == -std::numeric_limits<float>::infinity());
    const Device<std::int32_t> indptr(std::size_t{Call::max_sequences} * Call::kv_heads + 1),
        last(std::size_t{Call::max_sequences} * Call::kv_heads),
        indices(std::size_t{Call::max_sequences} * Call::kv_heads * 164);
    export_heads(call.ctx, call.cache.layer(0), {Call::max_sequences},
                 {indptr.data(), indices.data(), last.data(), static_cast<std::int64_t>(indices.size())});
    CHECK(indptr.read() == std::vector<std::int32_t>{0, 70, 140, 140, 140, 210, 280});
    CHECK(last.read() == std::vector<std::int32_t>{1, 1, 0, 0, 1, 1});
    CHECK(indices.read()[69] == 69);
    CHECK(indices.read()[70] == 164);
    CHECK(indices.read()[140] == 2 * 2 * 164);
}

TEST_CASE("the workspace of a batch serves smaller ones, whose heads are cut among more blocks") {
    constexpr std::int32_t max_sequences = 64;
    FixedBudgetCache<Budget, bf16> cache({.layers = 1,
                                          .max_sequences = max_sequences,
                                          .query_heads = 32,
                                          .kv_heads = 8,
                                          .head_dim_qk = 64,
                                          .head_dim_vo = 64},
                                         policy_of(100));
    const Device<unsigned char> memory(cache.bytes().total());
    const kvpolicy::cuda ctx{};
    cache.bind(ctx, memory.data(), memory.size());
    const std::size_t all = step_workspace_bytes(ctx, cache.layer(0), max_sequences);
    for (const std::int32_t fewer : {1, 4, 5, 8, 32, 63}) {
        CAPTURE(fewer);
        CHECK(step_workspace_bytes(ctx, cache.layer(0), fewer) <= all);
    }
    // Of a whole cache: what the layer that needs most needs.
    constexpr std::int32_t budgets[] = {100, 4000};
    FixedBudgetCache<Budget, bf16> uneven(
        {.layers = 2,
         .max_sequences = max_sequences,
         .query_heads = 4,
         .kv_heads = 1,
         .head_dim_qk = 64,
         .head_dim_vo = 64},
        Budget{Sink<>{4}, Window<>{60}, TopKBudget<>{per_head(budgets, 2, 1)}});
    const Device<unsigned char> other(uneven.bytes().total());
    uneven.bind(ctx, other.data(), other.size());
    const std::size_t first = step_workspace_bytes(ctx, uneven.layer(0), max_sequences),
                      second = step_workspace_bytes(ctx, uneven.layer(1), max_sequences);
    CHECK(first < second);
    CHECK(uneven.step_workspace_bytes(ctx, max_sequences) == second);
}

TEST_CASE("rows that begin beyond 2^31 and 2^32 bytes") {
    constexpr std::int32_t budget = 4300000;  // keys of 2.2e9 bytes a sequence
    FixedBudgetCache<Budget, bf16> cache({.layers = 1,
                                          .max_sequences = 3,
                                          .query_heads = 4,
                                          .kv_heads = 2,
                                          .head_dim_qk = 128,
                                          .head_dim_vo = 8},
                                         policy_of(budget));
    void* provided = nullptr;
    if (cudaMalloc(&provided, cache.bytes().total()) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        MESSAGE("skipped: the GPU has not 7.5 GB to spare");
        return;
    }
    const kvpolicy::cuda ctx{};
    cache.bind(ctx, provided, cache.bytes().total());
    const auto ref = cache.layer(0);
    CHECK(2 * ref.rows * 128 > std::int64_t{1} << 31);
    CHECK(4 * ref.rows * 128 > std::int64_t{1} << 32);
    const Device<unsigned char> workspace(step_workspace_bytes<head_dims<128>>(ctx, ref, 1));
    std::mt19937 generator(1);
    for (std::int32_t t = 0; t < 150; ++t) {
        const CallTensors<bf16> in(cache.shape(), 1, 1, Scores::random, generator);
        const Device<bf16> q(in.q.data), k(in.k.data), v(in.v.data);
        const Device<float> scores(in.scores.data);
        test::Extras extras;
        extras.scores = view_bhs<const float>(scores.data(), 1, 2, 1);
        std::vector<std::uint16_t> first;
        for (std::int32_t seq = 0; seq < 3; ++seq) {
            const Device<std::int32_t> named(std::vector<std::int32_t>{seq});
            const Device<bf16> out(std::size_t{4} * 8);
            step<head_dims<128>>(
                ctx, ref,
                test::step_io({1, named.data()}, view_bhsd<const bf16>(q.data(), 1, 4, 1, 128),
                              view_bhsd<const bf16>(k.data(), 1, 2, 1, 128),
                              view_bhsd<const bf16>(v.data(), 1, 2, 1, 8), view_bhsd(out.data(), 1, 4, 1, 8),
                              extras),
                workspace);
            cache.advance(ctx, {1, named.data()});
            std::vector<std::uint16_t> bits;
            for (const bf16 x : out.read()) {
                bits.push_back(x.bits);
            }
            first = seq == 0 ? bits : first;
            CHECK(bits == first);
        }
    }
    ok(cudaFree(provided));
}

TEST_CASE("refusals: one sentence, before anything runs") {
    Call call;
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
    CHECK_REFUSED(run({.count = Call::max_sequences, .length = 2}, call.q_view(), provided, call.extras()),
                  "batch.length");
    CHECK_REFUSED(run({Call::max_sequences}, call.q_view(), provided, {}), "io.scores");
    test::Extras packed = call.extras();
    packed.cu_seqlens = reinterpret_cast<const std::int32_t*>(provided.data);
    CHECK_REFUSED(run({Call::max_sequences}, call.q_view(), provided, packed), "io.cu_seqlens");
    rows_view<const bf16> q = call.q_view();
    q.data += 1;
    CHECK_REFUSED(run({Call::max_sequences}, q, provided, call.extras()), "aligned to 16 bytes");
    FixedBudgetCache<Budget, bf16> wide({.layers = 1,
                                         .max_sequences = 1,
                                         .query_heads = 1,
                                         .kv_heads = 1,
                                         .head_dim_qk = 128,
                                         .head_dim_vo = 64},
                                        policy_of(1));
    CHECK_REFUSED(static_cast<void>(wide.layer(0)), "unbound");
    const Device<unsigned char> more(wide.bytes().total());
    wide.bind(call.ctx, more.data(), more.size());
    CHECK_REFUSED(static_cast<void>(step_workspace_bytes<head_dims<64>>(call.ctx, wide.layer(0), 1)),
                  "head_dim");
    CHECK_REFUSED(
        attend(host{1}, ref, {.q = call.q_view(), .out = call.out_view(), .batch = {Call::max_sequences}},
               provided),
        "device's memory");
    CHECK_REFUSED(static_cast<void>(call.cache.length(0)), "device's memory");
    CHECK_REFUSED(call.cache.clear(host{1}, 0), "device's memory");
    CHECK_REFUSED(call.cache.clear(call.ctx, 3), "seq");
}
