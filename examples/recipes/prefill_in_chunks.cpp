// A prompt at once, in chunks, or token by token: the cache holds the same keys afterwards.
//
// So an engine may cut a long prompt wherever its scheduler likes.
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int dim = 8, tokens = 100;
using Policy = kvp::Policy<kvp::Sink<2>, kvp::Window<8>, kvp::TopKBudget<6>>;  // scores come from the caller

// Takes the prompt in chunks of `chunk` tokens, and returns the positions that are held afterwards.
std::vector<kvp::position_t> held_after(int chunk, const backend::array<float>& rows,
                                        const backend::array<float>& scores) {
    const backend::context ctx{};
    kvp::FixedBudgetCache<Policy, float> cache{{.query_heads = 1, .kv_heads = 1, .head_dim = dim}};
    backend::memory memory{ctx, cache.bytes()};
    cache.bind(ctx, memory.data(), memory.size());
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = chunk})};
    backend::array<float> out(static_cast<std::size_t>(chunk) * dim);

    for (int first = 0; first < tokens; first += chunk) {
        const int n = chunk < tokens - first ? chunk : tokens - first;
        const kvp::Batch batch{.count = 1, .length = n};
        const auto part = kvp::view_bhsd(rows.data() + first * dim, 1, 1, n, dim);
        kvp::prefill(ctx, cache.layer(0),
                     {.q = part,
                      .k = part,
                      .v = part,
                      .out = kvp::view_bhsd(out.data(), 1, 1, n, dim),
                      .batch = batch,
                      .scores = kvp::view_bhs(scores.data() + first, 1, 1, n)},
                     workspace);
        cache.advance(ctx, batch);
    }
    backend::wait(ctx);
    const auto held = cache.layer(0).head_rows(0, 0);
    std::vector<kvp::position_t> positions;
    for (int row = 0; row < cache.layer(0).used(0, 0); ++row) {
        positions.push_back(held.position(row));
    }
    return positions;
}

int main() {
    if (backend::missing()) {
        return 0;
    }
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    backend::array<float> rows(tokens * dim), scores(tokens);
    for (float& x : rows) {
        x = normal(generator);
    }
    for (float& x : scores) {
        x = normal(generator);
    }

    const auto at_once = held_after(tokens, rows, scores);
    std::printf("at once: %zu rows\n", at_once.size());
    for (const int chunk : {1, 7, 64}) {
        std::printf("in chunks of %d: %s\n", chunk,
                    held_after(chunk, rows, scores) == at_once ? "the same" : "others");
    }
}

// Prints:
// at once: 16 rows
// in chunks of 1: the same
// in chunks of 7: the same
// in chunks of 64: the same
