// A scorer of your own, with a memory: a key is worth more the less it resembles what came after it.
//
// It is asked when a key leaves the window, from a state that has absorbed every token up to then.
// (docs/extend.md has one without a state.) The library keeps the states, one for each sequence and head: in
// caches, snapshots, forks and masks.
#include <kvpolicy/kvpop.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

struct Novelty {
    static constexpr kvp::part_kind kind = kvp::part_kind::scorer;
    static constexpr kvp::score_time when = kvp::score_time::on_leaving;
    static constexpr float forget = 0.9f;
    std::int32_t head_dim = 0;

    // The state: a moving average of keys.
    std::size_t state_size() const { return static_cast<std::size_t>(head_dim); }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const {
        for (std::int32_t d = 0; d < head_dim; ++d) {
            state[d] = 0.0f;
        }
    }
    // A token comes in.
    void absorb(std::int32_t /*head*/, float* state, const float* key, const float* /*value*/,
                float* /*scratch*/) const {
        for (std::int32_t d = 0; d < head_dim; ++d) {
            state[d] = forget * state[d] + (1.0f - forget) * key[d];
        }
    }
    // A key leaves the window: its score, larger is better.
    float read(std::int32_t /*head*/, const float* state, const float* key, const float* /*value*/,
               float* /*scratch*/) const {
        float squares = 0.0f;
        for (std::int32_t d = 0; d < head_dim; ++d) {
            squares += (key[d] - state[d]) * (key[d] - state[d]);
        }
        return std::sqrt(squares);
    }
};

// What does not fit says so in one sentence when it is compiled.
static_assert(kvp::StatefulScorer<Novelty>);

using Policy = kvp::Policy<kvp::Window<4>, kvp::TopKBudget<3>, Novelty>;

int main() {
    constexpr int dim = 8;
    const kvp::host ctx{1};
    const Policy policy{kvp::Window<4>{}, kvp::TopKBudget<3>{}, Novelty{dim}};
    kvp::FixedBudgetCache<Policy, float> cache{{.query_heads = 1, .kv_heads = 1, .head_dim = dim}, policy};
    kvp::Buffer memory{ctx, cache.bytes()};
    cache.bind(ctx, memory);
    kvp::Buffer workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};

    // Sixty tokens of the same key, and three others among them.
    for (int t = 0; t < 60; ++t) {
        std::vector<float> key(dim, 1.0f), out(dim);
        if (t == 11 || t == 25 || t == 40) {
            key.assign(dim, -1.0f);
        }
        const auto row = kvp::view_bhsd<const float>(key.data(), 1, 1, 1, dim);
        kvp::step(ctx, cache.layer(0),
                  {.q = row,
                   .k = row,
                   .v = row,
                   .out = kvp::view_bhsd(out.data(), 1, 1, 1, dim),
                   .batch = {.count = 1}},
                  workspace);
        cache.advance(ctx, {.count = 1});
    }
    std::vector<kvp::position_t> held(static_cast<std::size_t>(cache.usage(0, 0, 0).size()));
    cache.retained(0, 0, 0, held.data());
    std::printf("beside the window:");
    for (std::size_t row = 4; row < held.size(); ++row) {
        std::printf(" %d", static_cast<int>(held[row]));
    }
    std::printf("\n");
}

// Prints:
// beside the window: 40 25 11
