// README's program, as it is printed there.
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

TEST_CASE("the README's program runs as it is printed") {
    const std::vector<kvpolicy::bf16> ones(8 * 64, kvpolicy::bf16{1.0f});
    std::vector<kvpolicy::bf16> result(8 * 64);
    const kvpolicy::bf16 *const q = ones.data(), *const k = ones.data(), *const v = ones.data();
    kvpolicy::bf16* const out = result.data();

    namespace kvp = kvpolicy;
    using Policy = kvp::StreamingLLM<4, 60>;
    kvp::host ctx{2};
    kvp::FixedBudgetCache<Policy, kvp::bf16> cache{
        {.layers = 2, .max_sequences = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64}};
    kvp::Buffer memory{ctx, cache.bytes()},
        workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};
    cache.bind(ctx, memory);
    for (int l = 0; l < 2; ++l) kvp::step(ctx, cache.layer(l), cache.nhd(q, k, v, out), workspace);
    cache.advance(ctx);

    CHECK(cache.length(ctx, 0) == 1);
    CHECK(cache.usage(ctx, 1, 0, 1).size() == 1);
    CHECK(std::ranges::all_of(result, [](kvp::bf16 x) { return static_cast<float>(x) == 1.0f; }));
}
