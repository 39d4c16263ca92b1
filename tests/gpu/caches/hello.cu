// README's program on CUDA: the same calls as on the host (tests/unit/caches/test_hello.cpp), and the memory
// that they run in.
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/streaming_llm.hpp>

#include "gpu/support/device.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

using test::Device;

TEST_CASE("the README's program runs on CUDA as it does on the host") {
    const Device<kvpolicy::bf16> ones(std::vector<kvpolicy::bf16>(8 * 64, kvpolicy::bf16{1.0f}));
    const Device<kvpolicy::bf16> result(std::vector<kvpolicy::bf16>(8 * 64));
    const kvpolicy::bf16 *const q = ones.data(), *const k = ones.data(), *const v = ones.data();
    kvpolicy::bf16* const out = result.data();
    cudaStream_t stream = nullptr;

    namespace kvp = kvpolicy;
    using Policy = kvp::StreamingLLM<4, 60>;
    kvp::cuda ctx{stream};
    kvp::FixedBudgetCache<Policy, kvp::bf16> cache{
        {.layers = 2, .max_sequences = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64}};
    kvp::Buffer memory{ctx, cache.bytes()},
        workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};
    cache.bind(ctx, memory);
    for (int l = 0; l < 2; ++l) kvp::step(ctx, cache.layer(l), cache.nhd(q, k, v, out), workspace);
    cache.advance(ctx);

    CHECK(cache.length(ctx, 0) == 1);
    CHECK(cache.usage(ctx, 1, 0, 1).size() == 1);
    CHECK(std::ranges::all_of(result.read(), [](kvp::bf16 x) { return static_cast<float>(x) == 1.0f; }));
    // Sizes are the same before and after bind().
    const kvp::FixedBudgetCache<Policy, kvp::bf16> unbound{cache.shape()};
    CHECK(unbound.workspace_bytes(ctx, {.batch = 1, .tokens = 9}) ==
          cache.workspace_bytes(ctx, {.batch = 1, .tokens = 9}));
    CHECK(unbound.step_workspace_bytes(ctx, 1) == cache.step_workspace_bytes(ctx, 1));
    CHECK_REFUSED(unbound.workspace_bytes(ctx, {.batch = -1}), "size.batch: -1");
    CHECK_REFUSED(cache.workspace_bytes(kvp::host{1}, {.batch = 1}), "cache: bound to a device's memory");
}

TEST_CASE("advance without a batch on CUDA moves by what the layers have appended, or says why not") {
    using namespace kvpolicy;
    using Policy = StreamingLLM<1, 7>;
    const kvpolicy::cuda ctx{};
    FixedBudgetCache<Policy, float> cache{
        {.layers = 2, .max_sequences = 3, .query_heads = 1, .kv_heads = 1, .head_dim = 8}};
    Buffer memory{ctx, cache.bytes()}, workspace{ctx, cache.workspace_bytes(ctx, {.batch = 3, .tokens = 5})};
    cache.bind(ctx, memory);
    const Device<float> rows(std::vector<float>(3 * 5 * 8, 1.0f));
    const Device<float> out(std::vector<float>(3 * 5 * 8));
    const Device<std::int32_t> q_len(std::vector<std::int32_t>{5, 0, 2});
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0));
    const auto take = [&](std::int32_t layer, const Batch& batch) {
        auto io = cache.nhd(rows.data(), rows.data(), rows.data(), out.data(), {.batch = 3, .tokens = 5});
        io.batch = batch;
        prefill(ctx, cache.layer(layer), io, workspace);
    };
    const auto lengths = [&] {
        return std::vector<position_t>{cache.length(ctx, 0), cache.length(ctx, 1), cache.length(ctx, 2)};
    };
    cache.advance(ctx);  // nothing was appended: nothing moves
    take(0, {.q_len = q_len.data()});
    take(1, {.q_len = q_len.data()});
    cache.advance(ctx, {}, {.status = status.data()});
    CHECK(lengths() == std::vector<position_t>{5, 0, 2});
    CHECK(status.read() == std::vector<std::uint32_t>(3, 0));
    take(0, {});
    take(1, {.q_len = q_len.data()});
    cache.advance(ctx, {}, {.status = status.data()});
    CHECK(lengths() == std::vector<position_t>{10, 0, 2});
    CHECK(status.read() == std::vector<std::uint32_t>{0, status_layer_skipped, status_layer_skipped});
    // A sequence that a batch names must have a token.
    cache.advance(ctx, {.count = 1}, {.status = status.data()});
    CHECK(status.read()[0] == status_layer_skipped);
    CHECK(lengths() == std::vector<position_t>{10, 0, 2});
}

TEST_CASE("a buffer of device memory") {
    using namespace kvpolicy;
    const kvpolicy::cuda ctx{};
    Buffer buffer{ctx, 1000};
    REQUIRE(buffer.size() == 1000);
    cudaPointerAttributes of{};
    REQUIRE(cudaPointerGetAttributes(&of, buffer.data()) == cudaSuccess);
    CHECK(of.type == cudaMemoryTypeDevice);
    void* const where = buffer.data();
    Buffer moved = std::move(buffer);
    CHECK(moved.data() == where);
    CHECK(buffer.size() == 0);  // NOLINT(bugprone-use-after-move): what is left behind is said
    moved.grow(10);
    CHECK(moved.data() == where);
    moved.grow(2000);
    REQUIRE(cudaPointerGetAttributes(&of, moved.data()) == cudaSuccess);
    CHECK(of.type == cudaMemoryTypeDevice);
    CHECK(moved.size() == 2000);
    CHECK(Buffer(ctx, 0).data() == nullptr);
    CHECK_THROWS_AS(Buffer(ctx, std::numeric_limits<std::size_t>::max() / 2), cuda_error);
    static_cast<void>(cudaGetLastError());
}
