// Prompts of bf16 rows into caches of either kind with an mLSTMScorer.
#include "mlstm_prefill_case.hpp"

using namespace kvpolicy;
using namespace mlstm_test;

namespace {
Plain plain(std::int32_t d_qk = 0, std::int32_t d_v = 0) { return shaped<Plain>(prompts_of({1}), d_qk, d_v); }
}  // namespace

TEST_CASE("few calls") {
    check_lengths<FixedBudgetCache, bf16>(plain(), {129});
    check_lengths<DualCache, bf16>(plain(), {65});
    check_lengths<FixedBudgetCache, bf16>(plain(128, 128), {100});
}

TEST_CASE("prompts into a FixedBudgetCache") {
    check_lengths<FixedBudgetCache, bf16>(plain(), {1, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000});
}

TEST_CASE("prompts into a DualCache") {
    check_lengths<DualCache, bf16>(plain(), {1, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000});
}

TEST_CASE("other widths") {
    for (const auto& [d_qk, d_v] : {std::pair{128, 64}, {128, 128}, {20, 12}, {64, 64}}) {
        CAPTURE(d_qk);
        CAPTURE(d_v);
        check_lengths<FixedBudgetCache, bf16>(plain(d_qk, d_v), {33, 129, 1000});
    }
    // Step by step, since there are no kernels for chunks.
    const Prompts<FixedBudgetCache, bf16, Plain> wide(prompts_of({150}), plain(256, 64));
    wide.check({{Kind::prefill, {70}}, {Kind::prefill, {80}}});
}

TEST_CASE("workspaces serve smaller chunks") {
    const Lengths tokens{1, 32, 33, 64, 65, 1000, 1024, 2048, 4224, 4288, 4352, 4608, 4864, 6400, 6912, 8128};
    for (const auto& [d_qk, d_v] : {std::pair{128, 64}, {128, 128}, {64, 64}}) {
        const Lengths ones(24, 1);
        Prompts<FixedBudgetCache, bf16, Plain>(prompts_of(ones), plain(d_qk, d_v)).check_sizes(tokens);
        Prompts<DualCache, bf16, Plain>(prompts_of(ones), plain(d_qk, d_v)).check_sizes(tokens);
    }
}

TEST_CASE("prompts of several lengths together") {
    check_ragged<FixedBudgetCache, bf16>(plain());
    check_ragged<DualCache, bf16>(plain());
}

// Enough chunks and planes for segments in parallel, and for more blocks than SMs.
TEST_CASE("many prompts") {
    Lengths lengths;
    for (std::int32_t i = 0; i < 40; ++i) {
        lengths.push_back(i % 7 == 3 ? 0 : 40 + 53 * i);
    }
    const Prompts<FixedBudgetCache, bf16, Plain> prompts(prompts_of(lengths), plain());
    prompts.check_whole(prompts.all);
    Lengths first = lengths, second = lengths;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        first[i] = lengths[i] * static_cast<std::int32_t>(i % 5) / 4;
        second[i] = lengths[i] - first[i];
    }
    prompts.check({{Kind::prefill, first}, {Kind::prefill, second}});
}

namespace {

/// A graph that was captured for one chunk takes the next, with other lengths, as a call does.
template <template <class, class> class Cache>
void check_graph() {
    const Prompts<Cache, bf16, Plain> prompts(prompts_of({400, 130, 77}), plain());
    const Case& c = prompts.sizes();
    constexpr std::int32_t most = 300;
    const Lengths begin{0, 0, 0}, first{300, 0, 70}, second{100, 130, 7};
    const PromptChunk<bf16> chunk(c, prompts.inputs(), begin, first, most);
    const PromptChunk<bf16> next(c, prompts.inputs(), first, second, most);
    auto cache = prompts.cache();
    const Device<std::int32_t> seq_ids(prompts.seq_ids());
    const std::vector<std::uint32_t> none(3, 0);
    const Device<std::uint32_t> status(none);
    const Device<unsigned char> workspace(cache.workspace_bytes(3, most));
    cudaStream_t stream = nullptr;
    test::ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    const auto call = [&] { cache.enqueue(ctx, Kind::prefill, chunk, seq_ids, workspace, status.data()); };
    call();
    test::ok(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    test::ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    call();
    test::ok(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t replay = nullptr;
    test::ok(cudaGraphInstantiate(&replay, graph, 0));
    const auto write = [](const auto& to, const auto& values) {
        test::ok(cudaMemcpy(to.data(), values.data(), to.bytes(), cudaMemcpyHostToDevice));
    };
    write(chunk.k, next.k.read());
    write(chunk.v, next.v.read());
    write(chunk.device_len, second);
    test::ok(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
    test::ok(cudaDeviceSynchronize());
    test::ok(cudaGraphLaunch(replay, stream));
    test::ok(cudaStreamSynchronize(stream));
    test::ok(cudaGraphExecDestroy(replay));
    test::ok(cudaGraphDestroy(graph));
    test::ok(cudaStreamDestroy(stream));
    CHECK(status.read() == none);
    prompts.near_exact(cache, "by a graph");
}

}  // namespace

TEST_CASE("a graph serves other lengths") {
    check_graph<FixedBudgetCache>();
    check_graph<DualCache>();
}
