// One of two shared libraries, each with a version of its own inside. What it returns shows which
// version's code ran.
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/version.hpp>

#include <cstring>
#include <vector>

namespace kvp = kvpolicy;

using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<3>>;

extern "C" [[gnu::visibility("default")]] int KVPOLICY_TEST_LIBRARY(char* text, std::size_t size) {
    const kvp::host ctx{2};
    constexpr int dim = 8;
    kvp::CacheShape shape;
    shape.query_heads = 1;
    shape.kv_heads = 1;
    shape.head_dim_qk = dim;
    shape.head_dim_vo = dim;
    kvp::FixedBudgetCache<Policy, float> cache{shape};
    kvp::Buffer memory{ctx, cache.bytes().total()};
    cache.bind(ctx, memory);
    kvp::Buffer workspace{ctx, kvp::workspace_bytes(ctx, cache.layer(0), {.batch = 1, .tokens = 1})};
    std::vector<float> x(dim, 1.0f), out(dim);
    for (int t = 0; t < 100; ++t) {
        const float score = static_cast<float>(t % 10);
        const auto row = kvp::view_bhsd<const float>(x.data(), 1, 1, 1, dim);
        kvp::step(ctx, cache.layer(0),
                  {.q = row,
                   .k = row,
                   .v = row,
                   .out = kvp::view_bhsd(out.data(), 1, 1, 1, dim),
                   .batch = {.count = 1},
                   .scores = kvp::view_bhs(&score, 1, 1, 1)},
                  workspace);
        cache.advance(ctx, {.count = 1});
    }
    try {
        static_cast<void>(cache.length(7));
    } catch (const kvp::invalid_argument& error) {
        std::strncpy(text, kvp::version_string, size - 1);
        std::strncat(text, ": ", size - std::strlen(text) - 1);
        std::strncat(text, error.what(), size - std::strlen(text) - 1);
    }
    return cache.usage(0, 0, 0).size();
}
