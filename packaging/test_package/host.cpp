// A cache of 8 entries per head, and 100 tokens.
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/version.hpp>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

static_assert(__cplusplus >= 202002L, "the package asks for C++20");

using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<3>>;

int main() {
    const kvp::host on{2};
    constexpr int dim = 8;
    kvp::FixedBudgetCache<Policy, float> cache{{.layers = 1,
                                                .max_sequences = 1,
                                                .query_heads = 2,
                                                .kv_heads = 1,
                                                .head_dim_qk = dim,
                                                .head_dim_vo = dim}};
    kvp::HostBuffer memory{cache.bytes().total()};
    cache.bind(on, memory);
    kvp::HostBuffer workspace{kvp::cache_workspace_bytes(on, cache.layer(0), 1, 1)};

    std::vector<float> q(2 * dim, 1.0f), k(dim, 1.0f), v(dim, 2.0f), out(2 * dim);
    for (int t = 0; t < 100; ++t) {
        const float score = static_cast<float>(t % 10);
        kvp::step(on, cache.layer(0), {.count = 1}, kvp::view_bhsd(q.data(), 1, 2, 1, dim),
                  kvp::view_bhsd(k.data(), 1, 1, 1, dim), kvp::view_bhsd(v.data(), 1, 1, 1, dim),
                  kvp::view_bhsd(out.data(), 1, 2, 1, dim), workspace, nullptr,
                  {.scores = kvp::view_bhs(&score, 1, 1, 1)});
        cache.advance(on, {.count = 1});
    }
    const int rows = cache.usage(0, 0, 0).size();
    std::printf("kvpolicy %s: %lld tokens, %d rows\n", kvp::version_string,
                static_cast<long long>(cache.length(0)), rows);
    return rows == 8 && cache.length(0) == 100 ? 0 : 1;
}
