// Steps of 16-bit caches at every head_dim and group, on caches long enough to be shared by many blocks; and what surrounds
// a step: graphs, empty slots, rows that nobody wrote, refusals, status.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "cache_case.hpp"

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
    Tensor<T> out(count, both.shape.query_heads, in.q.length, both.shape.dim_v);
    Workspace workspace(cache_workspace_bytes(both.on, both.oracle.cache.ref(0), count, in.q.length));
    CacheExtras extras;
    extras.scores = in.scores.view();
    prefill(both.on, both.oracle.cache.ref(0), batch, in.q.view(), in.k.view(), in.v.view(), out.view(),
            workspace, nullptr, extras);
    both.oracle.cache.advance(both.on, batch);
    for (std::int32_t slot = 0; slot < count; ++slot) {
        std::vector<unsigned char> blob(both.oracle.cache.snapshot_bytes(slot));
        both.oracle.cache.snapshot(both.on, slot, blob.data(), blob.size());
        both.cache.restore(both.device, slot, blob.data(), blob.size());
    }
    both.same_rows("after restoring");
}

template <class T>
void check(std::int32_t dim_k, std::int32_t dim_v, std::int32_t group, std::int32_t budget, Scores kind,
           const Attention& attention = {}) {
    CAPTURE(dim_k);
    CAPTURE(group);
    CAPTURE(budget);
    std::mt19937 generator(static_cast<unsigned>(dim_k * 16 + group));
    BothCaches<Budget, T, all_head_dims, false> both(
        {.layers = 1, .slots = 3, .query_heads = 2 * group, .kv_heads = 2, .dim_k = dim_k, .dim_v = dim_v},
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
    static constexpr std::int32_t slots = 3, kv_heads = 2, group = 4, dim = 64;
    FixedBudgetCache<Budget, bf16> cache{{.layers = 1,
                                          .slots = slots,
                                          .query_heads = kv_heads * group,
                                          .kv_heads = kv_heads,
                                          .dim_k = dim,
                                          .dim_v = dim},
                                         policy_of(100)};
    Device<unsigned char> memory{cache.bytes().total()};
    Device<bf16> q{std::vector<bf16>(std::size_t{slots} * kv_heads * group * dim, bf16(0.5f))};
    Device<bf16> k{std::vector<bf16>(std::size_t{slots} * kv_heads * dim, bf16(0.25f))};
    Device<bf16> v{std::vector<bf16>(std::size_t{slots} * kv_heads * dim, bf16(1.0f))};
    Device<bf16> out{std::size_t{slots} * kv_heads * group * dim};
    Device<float> scores{std::vector<float>(std::size_t{slots} * kv_heads, 1.0f)};
    Device<std::uint32_t> status{std::vector<std::uint32_t>(slots, 0)};
    kvpolicy::cuda on{};

    Call() { cache.bind(on, memory.data(), memory.size()); }
    [[nodiscard]] rows_view<const bf16> q_view() const {
        return view_bhsd<const bf16>(q.data(), slots, kv_heads * group, 1, dim);
    }
    [[nodiscard]] rows_view<const bf16> k_view() const {
        return view_bhsd<const bf16>(k.data(), slots, kv_heads, 1, dim);
    }
    [[nodiscard]] rows_view<const bf16> v_view() const {
        return view_bhsd<const bf16>(v.data(), slots, kv_heads, 1, dim);
    }
    [[nodiscard]] rows_view<bf16> out_view() const {
        return view_bhsd(out.data(), slots, kv_heads * group, 1, dim);
    }
    [[nodiscard]] CacheExtras extras() const {
        CacheExtras extras;
        extras.scores = view_bhs<const float>(scores.data(), slots, kv_heads, 1);
        return extras;
    }
    [[nodiscard]] std::size_t bytes() const { return step_workspace_bytes(on, cache.ref(0), slots); }
    void run(const Batch& batch, workspace_view workspace) const {
        step(on, cache.ref(0), batch, q_view(), k_view(), v_view(), out_view(), workspace, status.data(),
             extras());
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
    check<T>(128, 64, 3, 3000, Scores::improving, {.scale = 0.2f, .softcap = 5.0f});
}

namespace {

void check_graph(std::int32_t steps) {
    Call by_graph, by_hand;
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    const Device<unsigned char> workspace(by_graph.bytes());
    by_graph.run({Call::slots}, workspace);  // loads the kernels, which a capture may not
    by_graph.cache.advance(by_graph.on, {Call::slots});
    ok(cudaDeviceSynchronize());
    by_graph.on = kvpolicy::cuda{stream};
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    by_graph.run({Call::slots}, workspace);
    by_graph.cache.advance(by_graph.on, {Call::slots});
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    std::mt19937 generator(5);
    const Device<unsigned char> other(by_hand.bytes());
    by_hand.run({Call::slots}, other);
    by_hand.cache.advance(by_hand.on, {Call::slots});
    const ReturningTokens<bf16> tokens(by_hand.v.size(), by_hand.scores.size(), generator);
    for (std::int32_t t = 1; t < steps; ++t) {
        for (const Call* call : {&by_graph, &by_hand}) {
            tokens.give(t, call->k.data(), call->v.data(), call->scores.data(), call->on.stream);
        }
        ok(cudaMemsetAsync(workspace.data(), 0xff, workspace.bytes(), stream));
        ok(cudaGraphLaunch(executable, stream));
        by_hand.run({Call::slots}, other);
        by_hand.cache.advance(by_hand.on, {Call::slots});
        if (t % 50 == 0 || steps < 100) {
            const auto a = by_graph.out.read(), b = by_hand.out.read();
            CHECK(std::equal(a.begin(), a.end(), b.begin(), [](bf16 x, bf16 y) { return x.bits == y.bits; }));
        }
    }
    ok(cudaStreamSynchronize(stream));
    CHECK(by_graph.status.read() == std::vector<std::uint32_t>(Call::slots, 0));
    std::vector<unsigned char> x(by_graph.cache.snapshot_bytes(by_graph.on, 1)), y(x.size());
    by_graph.cache.snapshot(by_graph.on, 1, x.data(), x.size());
    by_hand.cache.snapshot(by_hand.on, 1, y.data(), y.size());
    CHECK(x == y);
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

}  // namespace

TEST_CASE("few steps by one graph") { check_graph(12); }
TEST_CASE("one graph serves 10,000 steps") { check_graph(10000); }

TEST_CASE("what a host would refuse: counts, slots and scores in device memory") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{1, 2, -1}),
        slots(std::vector<std::int32_t>{0, 7, -3});
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    const auto before = call.out.read();
    call.run({Call::slots, nullptr, lengths.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    const auto after = call.out.read();
    const std::size_t each = before.size() / Call::slots;
    CHECK(static_cast<float>(after[0]) == 1.0f);  // the only value
    CHECK(std::equal(after.begin() + static_cast<std::ptrdiff_t>(each), after.end(),
                     before.begin() + static_cast<std::ptrdiff_t>(each),
                     [](bf16 x, bf16 y) { return x.bits == y.bits; }));
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.clear(call.on, 0);
    call.run({Call::slots, slots.data()}, workspace);
    CHECK(call.status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});
    // Entries of slot -1 bring no token, and nothing is wrong with them: a padded batch.
    const Device<std::int32_t> padded(std::vector<std::int32_t>{-1, 2, -1});
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    call.run({Call::slots, padded.data()}, workspace);
    call.cache.advance(call.on, {Call::slots, padded.data()}, call.status.data());
    CHECK(call.status.read() == std::vector<std::uint32_t>(Call::slots, 0));
    const auto of_second = call.out.read();
    CHECK(of_second[0].bits == before[0].bits);
    CHECK(static_cast<float>(of_second[each]) == 1.0f);
    CHECK(of_second[2 * each].bits == before[0].bits);
    CHECK(fetch_from(call.cache.ref(0).length, Call::slots) == std::vector<position_t>{0, 0, 1});
    // A NaN ranks last: once the budget is full of numbers, none is left.
    ok(cudaMemset(call.status.data(), 0, call.status.bytes()));
    call.cache.clear(call.on, 0);
    const float numbers[] = {std::numeric_limits<float>::quiet_NaN(), 1.0f};
    const Device<std::int32_t> first(std::vector<std::int32_t>{1, 0, 0});
    for (std::int32_t t = 0; t < 400; ++t) {
        for (std::int32_t h = 0; h < Call::kv_heads; ++h) {
            ok(cudaMemcpy(call.scores.data() + h, numbers + (t % 3 == 0 ? 0 : 1), sizeof(float),
                          cudaMemcpyHostToDevice));
        }
        call.run({Call::slots, nullptr, first.data()}, workspace);
        call.cache.advance(call.on, {Call::slots, nullptr, first.data()});
    }
    CHECK(call.status.read() == std::vector<std::uint32_t>{status_nan_score, 0, 0});
    const auto ref = call.cache.ref(0);
    for (const position_t t : BothCaches<Budget, bf16>::fetch(ref.position + 64, 100)) {
        CHECK(t % 3 != 0);
    }
}

TEST_CASE("attention over rows, pages, an empty slot") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{1, 0, 1});
    for (std::int32_t t = 0; t < 70; ++t) {
        call.run({Call::slots, nullptr, lengths.data()}, workspace);
        call.cache.advance(call.on, {Call::slots, nullptr, lengths.data()});
    }
    const auto stepped = call.out.read();
    const Device<float> lse(std::size_t{Call::slots} * Call::kv_heads * Call::group);
    ok(cudaMemset(call.out.data(), 0x11, call.out.bytes()));
    attend(call.on, call.cache.ref(0), {Call::slots}, call.q_view(), call.out_view(),
           view_bhs(lse.data(), Call::slots, Call::kv_heads * Call::group, 1), workspace);
    const auto looked = call.out.read();
    const std::size_t each = looked.size() / Call::slots;
    for (std::size_t x = 0; x < looked.size(); ++x) {
        const float wanted = x / each == 1 ? 0.0f : static_cast<float>(stepped[x]);
        CHECK(static_cast<float>(looked[x]) == doctest::Approx(wanted));
    }
    CHECK(lse.read()[Call::kv_heads * Call::group] == -std::numeric_limits<float>::infinity());
    const Device<std::int32_t> indptr(std::size_t{Call::slots} * Call::kv_heads + 1),
        last(std::size_t{Call::slots} * Call::kv_heads),
        indices(std::size_t{Call::slots} * Call::kv_heads * 164);
    export_heads(call.on, call.cache.ref(0), {Call::slots},
                 {indptr.data(), indices.data(), last.data(), static_cast<std::int64_t>(indices.size())});
    CHECK(indptr.read() == std::vector<std::int32_t>{0, 70, 140, 140, 140, 210, 280});
    CHECK(last.read() == std::vector<std::int32_t>{1, 1, 0, 0, 1, 1});
    CHECK(indices.read()[69] == 69);
    CHECK(indices.read()[70] == 164);
    CHECK(indices.read()[140] == 2 * 2 * 164);
}

TEST_CASE("the workspace of a batch serves smaller ones, whose heads are cut among more blocks") {
    constexpr std::int32_t slots = 64;
    FixedBudgetCache<Budget, bf16> cache(
        {.layers = 1, .slots = slots, .query_heads = 32, .kv_heads = 8, .dim_k = 64, .dim_v = 64},
        policy_of(100));
    const Device<unsigned char> memory(cache.bytes().total());
    const kvpolicy::cuda on{};
    cache.bind(on, memory.data(), memory.size());
    const std::size_t all = step_workspace_bytes(on, cache.ref(0), slots);
    for (const std::int32_t fewer : {1, 4, 5, 8, 32, 63}) {
        CAPTURE(fewer);
        CHECK(step_workspace_bytes(on, cache.ref(0), fewer) <= all);
    }
    // Of a whole cache: what the layer that needs most needs.
    constexpr std::int32_t budgets[] = {100, 4000};
    FixedBudgetCache<Budget, bf16> uneven(
        {.layers = 2, .slots = slots, .query_heads = 4, .kv_heads = 1, .dim_k = 64, .dim_v = 64},
        Budget{Sink<>{4}, Window<>{60}, TopKBudget<>{per_head(budgets, 2, 1)}});
    const Device<unsigned char> other(uneven.bytes().total());
    uneven.bind(on, other.data(), other.size());
    const std::size_t first = step_workspace_bytes(on, uneven.ref(0), slots),
                      second = step_workspace_bytes(on, uneven.ref(1), slots);
    CHECK(first < second);
    CHECK(step_workspace_bytes(on, uneven, slots) == second);
}

TEST_CASE("rows that begin beyond 2^31 and 2^32 bytes") {
    constexpr std::int32_t budget = 4300000;  // keys of 2.2e9 bytes a slot
    FixedBudgetCache<Budget, bf16> cache(
        {.layers = 1, .slots = 3, .query_heads = 4, .kv_heads = 2, .dim_k = 128, .dim_v = 8},
        policy_of(budget));
    void* lent = nullptr;
    if (cudaMalloc(&lent, cache.bytes().total()) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        MESSAGE("skipped: the card has not 7.5 GB to spare");
        return;
    }
    const kvpolicy::cuda on{};
    cache.bind(on, lent, cache.bytes().total());
    const auto ref = cache.ref(0);
    CHECK(2 * ref.rows * 128 > std::int64_t{1} << 31);
    CHECK(4 * ref.rows * 128 > std::int64_t{1} << 32);
    const Device<unsigned char> workspace(step_workspace_bytes<head_dims<128>>(on, ref, 1));
    std::mt19937 generator(1);
    for (std::int32_t t = 0; t < 150; ++t) {
        const CallTensors<bf16> in(cache.shape(), 1, 1, Scores::random, generator);
        const Device<bf16> q(in.q.data), k(in.k.data), v(in.v.data);
        const Device<float> scores(in.scores.data);
        CacheExtras extras;
        extras.scores = view_bhs<const float>(scores.data(), 1, 2, 1);
        std::vector<std::uint16_t> first;
        for (std::int32_t slot = 0; slot < 3; ++slot) {
            const Device<std::int32_t> named(std::vector<std::int32_t>{slot});
            const Device<bf16> out(std::size_t{4} * 8);
            step<head_dims<128>>(on, ref, {1, named.data()}, view_bhsd<const bf16>(q.data(), 1, 4, 1, 128),
                                 view_bhsd<const bf16>(k.data(), 1, 2, 1, 128),
                                 view_bhsd<const bf16>(v.data(), 1, 2, 1, 8),
                                 view_bhsd(out.data(), 1, 4, 1, 8), workspace, nullptr, extras);
            cache.advance(on, {1, named.data()});
            std::vector<std::uint16_t> bits;
            for (const bf16 x : out.read()) {
                bits.push_back(x.bits);
            }
            first = slot == 0 ? bits : first;
            CHECK(bits == first);
        }
    }
    ok(cudaFree(lent));
}

TEST_CASE("refusals: one sentence, before anything runs") {
    Call call;
    const Device<unsigned char> workspace(call.bytes());
    const auto ref = call.cache.ref(0);
    const workspace_view lent = workspace;
    const auto run = [&](const Batch& batch, rows_view<const bf16> q, workspace_view memory,
                         const CacheExtras& extras) {
        step(call.on, ref, batch, q, call.k_view(), call.v_view(), call.out_view(), memory, nullptr, extras);
    };
    CHECK_REFUSED(run({Call::slots}, call.q_view(), {lent.data, 8}, call.extras()), "workspace.bytes");
    CHECK_REFUSED(run({Call::slots + 1}, call.q_view(), lent, call.extras()), "batch.count");
    CHECK_REFUSED(run({.count = Call::slots, .length = 2}, call.q_view(), lent, call.extras()),
                  "batch.length");
    CHECK_REFUSED(run({Call::slots}, call.q_view(), lent, {}), "extras.scores");
    CacheExtras packed = call.extras();
    packed.cu_seqlens = reinterpret_cast<const std::int32_t*>(lent.data);
    CHECK_REFUSED(run({Call::slots}, call.q_view(), lent, packed), "extras.cu_seqlens");
    rows_view<const bf16> q = call.q_view();
    q.data += 1;
    CHECK_REFUSED(run({Call::slots}, q, lent, call.extras()), "aligned to 16 bytes");
    FixedBudgetCache<Budget, bf16> wide(
        {.layers = 1, .slots = 1, .query_heads = 1, .kv_heads = 1, .dim_k = 128, .dim_v = 64}, policy_of(1));
    CHECK_REFUSED(static_cast<void>(wide.ref(0)), "unbound");
    const Device<unsigned char> more(wide.bytes().total());
    wide.bind(call.on, more.data(), more.size());
    CHECK_REFUSED(static_cast<void>(step_workspace_bytes<head_dims<64>>(call.on, wide.ref(0), 1)),
                  "head_dim");
    CHECK_REFUSED(attend(host{1}, ref, {Call::slots}, call.q_view(), call.out_view(), {}, lent),
                  "device's memory");
    CHECK_REFUSED(static_cast<void>(call.cache.length(0)), "device's memory");
    CHECK_REFUSED(call.cache.clear(host{1}, 0), "device's memory");
    CHECK_REFUSED(call.cache.clear(call.on, 3), "slot");
}
