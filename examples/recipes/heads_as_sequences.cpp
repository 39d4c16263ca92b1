// Let a paged attention kernel read the cache where it lies: every KV head is exported as a sequence of its
// own, with a page table, and no row is copied.
//
// Heads of one layer hold different numbers of rows, which page tables by (sequence, head) can say:
// FlashInfer's and FlashAttention's paged kernels take such a table with one KV head a sequence. Here a few
// lines stand in for the kernel.
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int heads = 2, dim = 8, page_size = 4;
using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<6>, kvp::TopKBudget<>>;

int main() {
    if (backend::missing()) {
        return 0;
    }
    const backend::context ctx{};
    const std::int32_t budgets[heads] = {3, 12};  // by layer and head
    const Policy policy{kvp::Sink<1>{}, kvp::Window<6>{},
                        kvp::TopKBudget<>{kvp::per_head(budgets, 1, heads)}};
    kvp::FixedBudgetCache<Policy, float> cache{
        {.query_heads = heads, .kv_heads = heads, .head_dim = dim, .page_size = page_size}, policy};
    backend::memory memory{ctx, cache.bytes()};
    cache.bind(ctx, memory.data(), memory.size());

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    constexpr int tokens = 50;
    backend::array<float> q(heads * tokens * dim), k(q), v(q), out(q), scores(heads * tokens);
    for (auto* numbers : {&q, &k, &v, &scores}) {
        for (float& x : *numbers) {
            x = normal(generator);
        }
    }
    const kvp::Batch one{.count = 1};
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = tokens})};
    auto io = cache.hnd(q.data(), k.data(), v.data(), out.data(), {.batch = 1, .tokens = tokens});
    io.scores = kvp::view_bhs(scores.data(), 1, heads, tokens);
    kvp::prefill(ctx, cache.layer(0), io, workspace);
    cache.advance(ctx);

    // Head h of entry i is sequence i * heads + h: pages indices[indptr[s]] .. indices[indptr[s + 1] - 1],
    // the last partial.
    backend::array<std::int32_t> indptr(heads + 1), indices(16), last_page_len(heads);
    kvp::export_heads(ctx, cache.layer(0), one, {indptr.data(), indices.data(), last_page_len.data(), 16});

    // What the library itself says about a query,
    backend::array<float> query(heads * dim, 0.5f), expected(heads * dim), lse(heads);
    kvp::attend(ctx, cache.layer(0),
                {.q = kvp::view_bhsd(query.data(), 1, heads, 1, dim),
                 .out = kvp::view_bhsd(expected.data(), 1, heads, 1, dim),
                 .batch = one,
                 .lse = kvp::view_bhs(lse.data(), 1, heads, 1)},
                workspace);
    backend::wait(ctx);
    // and what a kernel finds that knows the tables alone.
    for (int h = 0; h < heads; ++h) {
        double sum = 0.0, weighted[dim] = {};
        int rows = 0;
        for (int p = indptr[h]; p < indptr[h + 1]; ++p) {
            const int in_page = p + 1 < indptr[h + 1] ? page_size : last_page_len[h];
            for (int r = 0; r < in_page; ++r, ++rows) {
                const std::size_t row = (static_cast<std::size_t>(indices[p]) * page_size + r) * dim;
                double logit = 0.0;
                for (int d = 0; d < dim; ++d) {
                    logit += double{query[h * dim + d]} * cache.layer(0).k[row + static_cast<std::size_t>(d)];
                }
                const double weight = std::exp(logit / std::sqrt(double{dim}));
                sum += weight;
                for (int d = 0; d < dim; ++d) {
                    weighted[d] += weight * cache.layer(0).v[row + static_cast<std::size_t>(d)];
                }
            }
        }
        double off = 0.0;
        for (int d = 0; d < dim; ++d) {
            off = std::fmax(off, std::fabs(weighted[d] / sum - expected[h * dim + d]));
        }
        std::printf("head %d: %d pages, %d rows, %s\n", h, indptr[h + 1] - indptr[h], rows,
                    off < 1e-5 ? "the same output" : "another output");
    }
}

// Prints:
// head 0: 3 pages, 10 rows, the same output
// head 1: 5 pages, 19 rows, the same output
