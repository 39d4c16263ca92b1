// A sequence is put away and taken up again, in another cache: of another kind, with other pages, in
// another sequence.
//
// A snapshot holds rows, positions, scores and scorer states. It says which policy it is of, and another
// policy refuses it.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int dim = 8;
using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<5>>;

// The next token of a sequence; gives what attention answers.
template <class Cache>
backend::array<float> next(const backend::context& ctx, Cache& cache, int seq, std::mt19937& generator) {
    std::normal_distribution<float> normal;
    backend::array<float> x(dim), out(dim), score(1, normal(generator));
    backend::array<int> seq_ids(1, seq);
    for (float& number : x) {
        number = normal(generator);
    }
    const kvp::Batch one{.count = 1, .seq_ids = seq_ids.data()};
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};
    const auto row = kvp::view_bhsd<const float>(x.data(), 1, 1, 1, dim);
    kvp::step(ctx, cache.layer(0),
              {.q = row,
               .k = row,
               .v = row,
               .out = kvp::view_bhsd(out.data(), 1, 1, 1, dim),
               .batch = one,
               .scores = kvp::view_bhs<const float>(score.data(), 1, 1, 1)},
              workspace);
    cache.advance(ctx, one);
    backend::wait(ctx);
    return out;
}

int main() {
    if (backend::missing()) {
        return 0;
    }
    const backend::context ctx{};
    kvp::FixedBudgetCache<Policy, float> from{{.query_heads = 1, .kv_heads = 1, .head_dim = dim}};
    backend::memory memory{ctx, from.bytes()};
    from.bind(ctx, memory.data(), memory.size());
    std::mt19937 generator(1);
    for (int t = 0; t < 30; ++t) {
        next(ctx, from, 0, generator);
    }

    std::vector<unsigned char> blob(from.snapshot_bytes(ctx, 0));  // host memory
    from.snapshot(ctx, 0, blob.data(), blob.size());

    kvp::DualCache<Policy, float> into{
        {.max_sequences = 3, .query_heads = 1, .kv_heads = 1, .head_dim = dim, .page_size = 16},
        {.slab_pages = 16, .max_slabs = 1, .max_seq_len = 1000}};
    backend::memory tables{ctx, into.bytes()}, slab{ctx, into.slab_bytes()};
    into.bind(ctx, tables.data(), tables.size());
    into.add_slab(ctx, slab.data(), slab.size());
    into.restore(ctx, 2, blob.data(), blob.size());

    // Both go on with the same tokens.
    std::mt19937 again = generator;
    bool same = true;
    for (int t = 0; t < 30; ++t) {
        const auto a = next(ctx, from, 0, generator), b = next(ctx, into, 2, again);
        for (int d = 0; d < dim; ++d) {
            same = same && a[d] - b[d] < 1e-5f && b[d] - a[d] < 1e-5f;
        }
    }
    std::printf("%lld tokens each, %s outputs\n", static_cast<long long>(into.layer(0).length[2]),
                same ? "the same" : "other");

    // Another policy is another cache: its snapshots do not fit.
    using Larger = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<6>>;
    kvp::FixedBudgetCache<Larger, float> larger{{.query_heads = 1, .kv_heads = 1, .head_dim = dim}};
    backend::memory more{ctx, larger.bytes()};
    larger.bind(ctx, more.data(), more.size());
    try {
        larger.restore(ctx, 0, blob.data(), blob.size());
    } catch (const kvp::invalid_argument&) {
        std::printf("a cache with a larger budget refuses it\n");
    }
}

// Prints:
// 60 tokens each, the same outputs
// a cache with a larger budget refuses it
