// Eviction over all heads of a sequence in a DualCache on a device (WG-KV, appendix K): the host's rows,
// whatever calls came before. In double, where masses agree so closely that the order of two keys never
// depends on who computed them; and few rounds of others.
#include "../../support/refusal.hpp"
#include "paged_parts.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <limits>

using namespace kvpolicy;
using namespace test;

namespace {

using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SnapKVEviction>;

Gated gated(const SnapKVEviction& head_params) {
    return Gated{Sink<>{of_parts(part_sinks)}, Window<>{of_parts(part_windows)},
                 ThresholdGate<at_least>{of_parts(part_gates)}, head_params};
}

/// Steps of rows of type T, evicted by themselves.
template <class T, int Dim>
void check_steps(std::int32_t group, float share) {
    constexpr std::int32_t dim = Dim;
    constexpr float thresholds[] = {-100.0f, 0.0f, 1.5f};
    const Gated policy{Sink<>{4}, Window<>{9}, ThresholdGate<at_least>{per_head(thresholds, 1, 3)},
                       SnapKVEviction{.average = 40, .share = share, .observing = 24}};
    BothDuals<Gated, T, head_dims<Dim>> both({.layers = 1,
                                              .max_sequences = 2,
                                              .query_heads = 3 * group,
                                              .kv_heads = 3,
                                              .head_dim_qk = dim,
                                              .head_dim_vo = dim,
                                              .page_size = 32},
                                             {.slab_pages = 64, .max_slabs = 20, .max_seq_len = 3000},
                                             policy);
    std::mt19937 generator(static_cast<unsigned>(dim + group));
    for (std::int32_t t = 0; t < 120; ++t) {
        const CallTensors<T> in(both.shape, 2, 1, Scores::random, generator);
        both.call(Mode::step, {1, 0}, {1, t % 3 == 0 ? 0 : 1}, in);
    }
    both.same_rows("after 120 steps");
    CHECK(both.rounds >= 2);
}

}  // namespace

TEST_CASE("few calls") { check_parts<float>(gated({.average = 20, .share = 0.2f, .observing = 8}), 16, 14); }

TEST_CASE("gates by layer and head") {
    // A scale that is exact: the host rounds the one of a head_dim to fp32.
    const AttentionParams attention{.sm_scale = 0.375f};
    CHECK(check_parts<double>(gated({.average = 30, .share = 0.1f, .observing = 20}), 16, 100, rebase_limit,
                              attention) > 10);
    CHECK(check_parts<double>(gated({.average = 12, .share = 0.4f, .observing = 3, .pool = 1}), 32, 100,
                              rebase_limit, attention) > 10);
}

TEST_CASE("beside budgets, a stride and a selection; means of a group; with a logits_soft_cap") {
    CHECK(check_parts<double>(
              Policy<Sink<>, Window<>, TopKBudget<>, Stride<7>, QuestPages<16>, SnapKVEviction>{
                  Sink<>{of_parts(part_sinks)}, Window<>{of_parts(part_windows)},
                  TopKBudget<>{of_parts(part_budgets)}, Stride<7>{}, QuestPages<16>{of_parts(part_pages)},
                  SnapKVEviction{.average = 25,
                                 .share = 0.2f,
                                 .observing = 40,
                                 .pool = 3,
                                 .aggregate = group_aggregate::mean}},
              32, 100, kvpolicy::rebase_limit, {.sm_scale = 0.3f, .logits_soft_cap = 2.0f}) > 10);
}

TEST_CASE("floats and 16-bit rows") {
    check_steps<float, 64>(3, 0.1f);
    check_steps<bf16, 64>(4, 0.1f);
    check_steps<fp16, 128>(1, 0.2f);
}

TEST_CASE("a share of a head's rows is the decimal number that was written") {
    struct {
        float share;
        std::int32_t rows, dropped;
    } constexpr cases[] = {{0.7f, 10, 7}, {0.9f, 10, 9}, {0.29f, 100, 29}, {0.57f, 100, 57}, {0.7f, 9, 6}};
    for (const auto& one : cases) {
        CAPTURE(one.share);
        const Gated policy{Sink<>{0}, Window<>{1}, ThresholdGate<at_least>{-100.0f},
                           SnapKVEviction{.average = one.rows - 1, .share = one.share, .observing = 8}};
        BothDuals<Gated, double> both({.layers = 1,
                                       .max_sequences = 1,
                                       .query_heads = 1,
                                       .kv_heads = 1,
                                       .head_dim_qk = 8,
                                       .head_dim_vo = 8,
                                       .page_size = 16},
                                      {.slab_pages = 12, .max_slabs = 1, .max_seq_len = 200}, policy, nullptr,
                                      nullptr, {.sm_scale = 0.375f});
        both.add_slab();
        std::mt19937 generator(5);
        both.call(Mode::prefill, {0}, {one.rows},
                  CallTensors<double>(both.shape, 1, one.rows, Scores::random, generator));
        both.same_rows("after the prompt");
        CHECK(both.oracle.cache.usage(0, 0, 0).size() == one.rows - one.dropped);
        CHECK(both.cache.usage(both.device, 0, 0, 0).size() == one.rows - one.dropped);
    }
}

TEST_CASE("keys and queries that are no numbers") {
    // A query with a logit that is none counts for nothing; a NaN key makes all that see it such,
    // until it is dropped.
    for (const bool of_key : {true, false}) {
        CAPTURE(of_key);
        const Gated policy{Sink<>{1}, Window<>{5}, ThresholdGate<at_least>{-100.0f},
                           SnapKVEviction{.average = 30, .share = 0.2f, .observing = 12}};
        BothDuals<Gated, double> both({.layers = 1,
                                       .max_sequences = 2,
                                       .query_heads = 4,
                                       .kv_heads = 2,
                                       .head_dim_qk = 8,
                                       .head_dim_vo = 8,
                                       .page_size = 16},
                                      {.slab_pages = 64, .max_slabs = 1, .max_seq_len = 300}, policy, nullptr,
                                      nullptr, {.sm_scale = 0.375f});
        both.add_slab();
        both.outputs_count = false;
        std::mt19937 generator(7);
        for (std::int32_t t = 0; t < 90; ++t) {
            CallTensors<double> in(both.shape, 2, 1, Scores::random, generator);
            if (t % 17 == 9) {
                (of_key ? in.k.view().row(0, 1, 0) : in.q.view().row(0, 2, 0))[3] =
                    std::numeric_limits<double>::quiet_NaN();
            }
            both.call(Mode::step, {0, 1}, {1, 1}, in);
        }
        both.same_rows("after 90 steps");
        CHECK(both.rounds > 6);
    }
}

TEST_CASE("a reservation holds across evictions") {
    const Gated policy{Sink<>{4}, Window<>{9}, ThresholdGate<at_least>{-100.0f},
                       SnapKVEviction{.average = 40, .share = 0.3f, .observing = 8}};
    BothDuals<Gated, double> both({.layers = 1,
                                   .max_sequences = 2,
                                   .query_heads = 1,
                                   .kv_heads = 1,
                                   .head_dim_qk = 8,
                                   .head_dim_vo = 8,
                                   .page_size = 16},
                                  {.slab_pages = 12, .max_slabs = 1, .max_seq_len = 2000}, policy, nullptr,
                                  nullptr, {.sm_scale = 0.375f});
    both.add_slab();
    std::mt19937 generator(3);
    // The other sequence takes all pages that are free.
    std::int32_t appended = 0;
    const auto drain = [&] {
        const Device<std::int32_t> seq(std::vector<std::int32_t>{1});
        const std::int32_t other = 1;
        while (both.oracle.cache.free_pages() != 0) {
            appended += 16;
            REQUIRE(both.oracle.cache.reserve(both.ctx,
                                              {.count = 1, .seq_ids = &other, .length = appended}) == 0);
            REQUIRE(both.cache.reserve(both.device,
                                       {.count = 1, .seq_ids = seq.data(), .length = appended}) == 0);
        }
    };
    for (std::int32_t round = 0; round < 12; ++round) {
        CHECK(both.reserve({0}, {25}));
        drain();
        for (std::int32_t t = 0; t < 25; ++t) {
            const bool refused = both.call(Mode::step, {0}, {1},
                                           CallTensors<double>(both.shape, 1, 1, Scores::random, generator));
            REQUIRE(!refused);
            drain();
        }
        both.same_rows("round " + std::to_string(round));
        both.oracle.cache.clear(both.ctx, 1);
        both.cache.clear(both.device, 1);
        appended = 0;
    }
    CHECK(both.rounds > 10);
}

TEST_CASE("one graph serves 10,000 steps, with evictions and selections") {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SnapKVEviction, QuestPages<16>>;
    using Dims = head_dims<64>;
    constexpr std::int32_t max_sequences = 2, heads = 2, group = 4, dim = 64;
    struct Side {
        kvpolicy::cuda ctx{};
        DualCache<P, bf16> cache{
            {.layers = 1,
             .max_sequences = max_sequences,
             .query_heads = heads * group,
             .kv_heads = heads,
             .head_dim_qk = dim,
             .head_dim_vo = dim,
             .page_size = 16},
            {.slab_pages = 200, .max_slabs = 1, .max_seq_len = 11000},
            P{Sink<>{4}, Window<>{20}, ThresholdGate<at_least>{0.0f},
              SnapKVEviction{.average = 90, .share = 0.2f, .observing = 16}, QuestPages<16>{3}}};
        Device<unsigned char> memory{cache.bytes().total()}, slab{cache.slab_bytes()};
        Device<bf16> q{std::size_t{max_sequences} * heads * group * dim},
            k{std::size_t{max_sequences} * heads * dim}, v{k.size()}, out{q.size()};
        Device<float> scores{std::vector<float>(std::size_t{max_sequences} * heads, 1.0f)};
        Device<EvictionReport> reports{max_sequences};
        Device<std::uint32_t> status{std::vector<std::uint32_t>(max_sequences, 0)};
        std::unique_ptr<Device<unsigned char>> workspace, eviction;
        Side() {
            cache.bind(ctx, memory.data(), memory.size());
            cache.add_slab(ctx, slab.data(), slab.size());
            workspace = std::make_unique<Device<unsigned char>>(
                step_workspace_bytes<Dims>(ctx, cache.layer(0), max_sequences));
            eviction = std::make_unique<Device<unsigned char>>(cache.evict_workspace_bytes(ctx));
        }
        void token() {
            test::Extras extras;
            extras.scores = view_bhs<const float>(scores.data(), max_sequences, heads, 1);
            step<Dims>(ctx, cache.layer(0),
                       test::step_io({max_sequences},
                                     view_bhsd<const bf16>(q.data(), max_sequences, heads * group, 1, dim),
                                     view_bhsd<const bf16>(k.data(), max_sequences, heads, 1, dim),
                                     view_bhsd<const bf16>(v.data(), max_sequences, heads, 1, dim),
                                     view_bhsd(out.data(), max_sequences, heads * group, 1, dim), extras),
                       *workspace, {.status = status.data()});
            cache.advance(ctx, {max_sequences}, {.status = status.data()});
            cache.evict(ctx, {max_sequences}, *eviction,
                        {.reports = reports.data(), .status = status.data()});
        }
    } by_graph, by_hand;
    std::mt19937 generator(5);
    std::normal_distribution<float> normal;
    const auto give = [&] {
        for (auto array : {&Side::q, &Side::k, &Side::v}) {
            std::vector<bf16> numbers((by_hand.*array).size());
            for (bf16& x : numbers) {
                x = bf16(normal(generator));
            }
            for (Side* side : {&by_graph, &by_hand}) {
                ok(cudaMemcpy((side->*array).data(), numbers.data(), (side->*array).bytes(),
                              cudaMemcpyHostToDevice));
            }
        }
    };
    give();
    by_graph.token();  // loads the kernels, which a capture may not
    by_hand.token();
    ok(cudaDeviceSynchronize());
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    by_graph.ctx = kvpolicy::cuda{stream};
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    by_graph.token();
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    std::int64_t dropped = 0;
    bool same = true;
    for (std::int32_t t = 0; t < 10000; ++t) {
        give();
        ok(cudaDeviceSynchronize());
        ok(cudaGraphLaunch(executable, stream));
        ok(cudaStreamSynchronize(stream));
        by_hand.token();
        const auto a = by_graph.out.read(), b = by_hand.out.read();
        same = same &&
               std::equal(a.begin(), a.end(), b.begin(), [](bf16 x, bf16 y) { return x.bits == y.bits; });
        dropped += by_graph.reports.read()[0].dropped;
    }
    CHECK(same);
    CHECK(dropped > 10000);
    CHECK(by_graph.status.read() == std::vector<std::uint32_t>(max_sequences, 0));
    CHECK(by_graph.cache.free_pages(by_graph.ctx) == by_hand.cache.free_pages(by_hand.ctx));
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

TEST_CASE("in the middle of a token nothing is evicted") {
    const Gated policy{Sink<>{4}, Window<>{9}, ThresholdGate<at_least>{-100.0f},
                       SnapKVEviction{.average = 40, .share = 0.3f, .observing = 8}};
    DualCache<Gated, double> cache({.layers = 2,
                                    .max_sequences = 1,
                                    .query_heads = 1,
                                    .kv_heads = 1,
                                    .head_dim_qk = 8,
                                    .head_dim_vo = 8,
                                    .page_size = 16},
                                   {.slab_pages = 20, .max_slabs = 1, .max_seq_len = 200}, policy);
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> memory(cache.bytes().total()), slab(cache.slab_bytes());
    cache.bind(ctx, memory.data(), memory.size());
    cache.add_slab(ctx, slab.data(), slab.size());
    const Device<unsigned char> workspace(cache.step_workspace_bytes(ctx, 1)),
        eviction(cache.evict_workspace_bytes(ctx));
    const Device<double> rows(std::vector<double>(8, 0.25)), out(8);
    const Device<float> score(std::vector<float>(1, 0.0f));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
    const Device<EvictionReport> report(1);
    const auto in = view_bhsd<const double>(rows.data(), 1, 1, 1, 8);
    const auto take = [&](std::int32_t layer) {
        step(ctx, cache.layer(layer),
             {.q = in,
              .k = in,
              .v = in,
              .out = view_bhsd(out.data(), 1, 1, 1, 8),
              .batch = {1},
              .scores = view_bhs<const float>(score.data(), 1, 1, 1)},
             workspace, {.status = status.data()});
    };
    for (std::int32_t t = 0; t < 60; ++t) {
        take(0);
        take(1);
        cache.advance(ctx, {1}, {.status = status.data()});
    }
    for (const std::int32_t layer : {0, 1}) {
        take(1 - layer);
        const auto before = memory.read(), of_slab = slab.read();
        cache.evict(ctx, {1}, eviction, {.reports = report.data(), .status = status.data()});
        CHECK(status.read()[0] == status_layer_skipped);
        CHECK(report.read()[0].rows == 0);
        CHECK(memory.read() == before);
        CHECK(slab.read() == of_slab);
        CHECK_REFUSED(static_cast<void>(cache.snapshot_bytes(ctx, 0)), "a sequence between two tokens");
        ok(cudaMemset(status.data(), 0, status.bytes()));
        take(layer);
        cache.advance(ctx, {1}, {.status = status.data()});
    }
    cache.evict(ctx, {1}, eviction, {.reports = report.data(), .status = status.data()});
    CHECK(status.read()[0] == status_ok);
    CHECK(report.read()[0].rounds > 0);
    CHECK(report.read()[0].dropped > 20);
}

namespace {

/// Slabs that are attached after a graph has captured an eviction. One head keeps all keys, the other what it
/// must: 100 and 13 rows.
void check_captured(std::int32_t average, bool drops) {
    CAPTURE(average);
    const Gated policy{Sink<>{4}, Window<>{9}, ThresholdGate<at_least>{0.0f},
                       SnapKVEviction{.average = average, .share = 0.2f, .observing = 4}};
    DualCache<Gated, float> cache({.layers = 1,
                                   .max_sequences = 1,
                                   .query_heads = 2,
                                   .kv_heads = 2,
                                   .head_dim_qk = 8,
                                   .head_dim_vo = 8,
                                   .page_size = 16},
                                  {.slab_pages = 4, .max_slabs = 2, .max_seq_len = 200}, policy);
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    const Device<unsigned char> memory(cache.bytes().total()), first(cache.slab_bytes()),
        second(cache.slab_bytes());
    cache.bind(ctx, memory.data(), memory.size());
    cache.add_slab(ctx, first.data(), first.size());
    const Device<float> row(std::vector<float>(16, 0.5f)), out(16), score(std::vector<float>{1.0f, -1.0f});
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
    const Device<EvictionReport> report(1);
    const auto in = view_bhsd<const float>(row.data(), 1, 2, 1, 8);
    const Device<unsigned char> provided(step_workspace_bytes(ctx, cache.layer(0), 1));
    const auto tokens = [&](int count) {
        for (int t = 0; t < count; ++t) {
            step(ctx, cache.layer(0),
                 {.q = in,
                  .k = in,
                  .v = in,
                  .out = view_bhsd(out.data(), 1, 2, 1, 8),
                  .batch = {.count = 1},
                  .scores = view_bhs<const float>(score.data(), 1, 2, 1)},
                 provided, {.status = status.data()});
            cache.advance(ctx, {.count = 1}, {.status = status.data()});
        }
        ok(cudaStreamSynchronize(stream));
    };
    const std::size_t bytes = cache.evict_workspace_bytes(ctx);
    const Device<unsigned char> workspace(std::vector<unsigned char>(bytes + 4096, 0xa5));
    const auto evict = [&] {
        cache.evict(ctx, {1}, {workspace.data(), bytes}, {.reports = report.data(), .status = status.data()});
    };
    evict();  // loads the kernel, which a capture may not
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t captured = nullptr;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    evict();
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&captured, graph, 0));
    cache.add_slab(ctx, second.data(), second.size());
    tokens(100);
    CHECK(status.read()[0] == status_ok);
    ok(cudaGraphLaunch(captured, stream));
    ok(cudaStreamSynchronize(stream));
    CHECK(status.read()[0] == (drops ? status_small_workspace : status_ok));
    CHECK(report.read()[0].rows == 113);
    CHECK(report.read()[0].dropped == 0);
    CHECK(cache.length(ctx, 0) == 100);
    CHECK(cache.usage(ctx, 0, 0, 0).long_range == 100 - 13);
    CHECK(cache.usage(ctx, 0, 0, 1).long_range == 0);
    const auto left = workspace.read();
    CHECK(std::all_of(left.begin() + static_cast<std::ptrdiff_t>(bytes), left.end(),
                      [](unsigned char x) { return x == 0xa5; }));
    // Called by itself it is refused before anything happens; with the workspace that it asks for it evicts.
    CHECK_REFUSED(evict(), "workspace.bytes");
    const Device<unsigned char> larger(cache.evict_workspace_bytes(ctx));
    cache.evict(ctx, {1}, larger, {.reports = report.data(), .status = status.data()});
    ok(cudaStreamSynchronize(stream));
    CHECK((report.read()[0].dropped != 0) == drops);
    CHECK(report.read()[0].rows <= 2 * average);
    ok(cudaGraphExecDestroy(captured));
    ok(cudaGraphDestroy(graph));
    ok(cudaStreamDestroy(stream));
}

}  // namespace

TEST_CASE("slabs that are attached after a graph has captured an eviction") { check_captured(20, true); }

// A head has more rows than the captured workspace has space for, but the sequence no more than it may.
TEST_CASE("nothing to drop beyond a captured eviction's workspace") { check_captured(60, false); }

TEST_CASE("a workspace that is too small is refused") {
    const Gated policy = gated({.average = 30});
    DualCache<Gated, float> cache({.layers = 2,
                                   .max_sequences = 1,
                                   .query_heads = 3,
                                   .kv_heads = 3,
                                   .head_dim_qk = 8,
                                   .head_dim_vo = 8,
                                   .page_size = 16},
                                  {.slab_pages = 1, .max_slabs = 1, .max_seq_len = 10}, policy);
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, memory.data(), memory.size());
    CHECK_REFUSED(cache.evict(ctx, {1}, {memory.data(), 8}), "workspace.bytes");
    CHECK_REFUSED(cache.evict(ctx, {2}, {memory.data(), 8}), "batch.count");
    CHECK_REFUSED(static_cast<void>(cache.evict_workspace_bytes(host{1})), "device's memory");
}
