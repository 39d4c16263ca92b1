// Speculative decoding: several guessed tokens are answered at once, and only those that turn
// out right are kept.
//
// Eviction overwrites rows, so it cannot be undone: append_draft() decides nothing, and accept(m) does for
// the first m tokens what m steps would have done.
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int dim = 8, guesses = 4;
using Policy = kvp::Policy<kvp::Sink<1>, kvp::Window<4>, kvp::TopKBudget<5>>;
using Cache = kvp::FixedBudgetCache<Policy, float>;

int main() {
    if (backend::missing()) {
        return 0;
    }
    const backend::context ctx{};
    // `draft tokens`: spare rows of every head for so many tokens.
    const kvp::CacheShape shape{
        .query_heads = 1, .kv_heads = 1, .head_dim_qk = dim, .head_dim_vo = dim, .max_draft_tokens = guesses};
    Cache guessing{shape}, stepping{shape};
    backend::memory memory{ctx, guessing.bytes()}, other{ctx, stepping.bytes()};
    guessing.bind(ctx, memory.data(), memory.size());
    stepping.bind(ctx, other.data(), other.size());
    backend::memory workspace{ctx, guessing.workspace_bytes(ctx, {.batch = 1, .tokens = guesses})};

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    int answered = 0, kept = 0;
    bool same = true;
    for (int round = 0; round < 30; ++round) {
        backend::array<float> x(guesses * dim), scores(guesses), out(guesses * dim), alone(dim);
        for (auto* numbers : {&x, &scores}) {
            for (float& number : *numbers) {
                number = normal(generator);
            }
        }
        const auto rows = kvp::view_bhsd<const float>(x.data(), 1, 1, guesses, dim);
        kvp::append_draft(ctx, guessing.layer(0),
                          {.q = rows,
                           .k = rows,
                           .v = rows,
                           .out = kvp::view_bhsd(out.data(), 1, 1, guesses, dim),
                           .batch = {.count = 1, .length = guesses},
                           .scores = kvp::view_bhs(scores.data(), 1, 1, guesses)},
                          workspace);

        // The model looks at the outputs and accepts the first few.
        const kvp::Batch accepted{.count = 1, .length = 1 + round % guesses};
        kvp::accept(ctx, guessing.layer(0), accepted, workspace);
        guessing.advance(ctx, accepted);
        answered += guesses, kept += accepted.length;

        // The same tokens, one after another.
        for (int t = 0; t < accepted.length; ++t) {
            const auto row = kvp::view_bhsd<const float>(x.data() + t * dim, 1, 1, 1, dim);
            kvp::step(ctx, stepping.layer(0),
                      {.q = row,
                       .k = row,
                       .v = row,
                       .out = kvp::view_bhsd(alone.data(), 1, 1, 1, dim),
                       .batch = {.count = 1},
                       .scores = kvp::view_bhs<const float>(&scores[t], 1, 1, 1)},
                      workspace);
            stepping.advance(ctx, {.count = 1});
            backend::wait(ctx);
            for (int d = 0; d < dim; ++d) {
                const float off = alone[d] - out[t * dim + d];
                same = same && off < 1e-5f && off > -1e-5f;
            }
        }
    }
    const auto a = guessing.layer(0), b = stepping.layer(0);
    const int rows = a.used(0, 0);
    same = same && b.used(0, 0) == rows;
    for (int row = 0; row < rows; ++row) {
        same = same && a.head_rows(0, 0).position(row) == b.head_rows(0, 0).position(row);
    }
    std::printf("%d tokens answered, %d kept, %d rows; %s stepping\n", answered, kept, rows,
                same ? "as" : "unlike");
}

// Prints:
// 120 tokens answered, 73 kept, 10 rows; as stepping
