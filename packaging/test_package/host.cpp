// A cache of 8 entries per head, and 100 tokens.
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/version.hpp>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

static_assert(__cplusplus >= 202002L, "the package asks for C++20");

using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<3>>;

int main() {
    const kvp::host ctx{2};
    constexpr int dim = 8;
    kvp::FixedBudgetCache<Policy, float> cache{{.query_heads = 2, .kv_heads = 1, .head_dim = dim}};
    kvp::Buffer memory{ctx, cache.bytes()};
    cache.bind(ctx, memory);
    kvp::Buffer workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};

    std::vector<float> q(2 * dim, 1.0f), k(dim, 1.0f), v(dim, 2.0f), out(2 * dim);
    auto io = cache.nhd(q.data(), k.data(), v.data(), out.data());
    for (int t = 0; t < 100; ++t) {
        const float score = static_cast<float>(t % 10);
        io.scores = kvp::view_bhs(&score, 1, 1, 1);
        kvp::step(ctx, cache.layer(0), io, workspace);
        cache.advance(ctx);
    }
    const int entries = cache.usage(ctx, 0, 0, 0).size();
    std::printf("kvpolicy %s: %lld tokens, %d entries\n", kvp::version_string,
                static_cast<long long>(cache.length(ctx, 0)), entries);
    return entries == 8 && cache.length(ctx, 0) == 100 ? 0 : 1;
}
