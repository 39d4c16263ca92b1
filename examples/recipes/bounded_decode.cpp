// Decode for as long as you like in memory that does not grow.
//
// The policy is a type: 4 sinks, the 16 newest keys, and of all others the 44 with the best scores. Scores
// come from one trained vector a head here (LinearScorer); scorers/ has larger ones.
#include <kvpolicy/kvpop.hpp>

#include "backend.hpp"

#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int layers = 2, query_heads = 4, kv_heads = 2, dim = 16;
using Scorer = kvp::LinearScorer<dim>;
using Policy = kvp::KVpop<4, 16, 44, Scorer>;

int main() {
    if (backend::missing()) {
        return 0;
    }
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](backend::array<float>& numbers) {
        for (float& x : numbers) {
            x = normal(generator);
        }
    };

    // The weights of all layers, [layers, kv_heads, key and value]: a program of yours would load them.
    backend::array<float> weights(layers * kv_heads * 2 * dim);
    fill(weights);
    std::vector<Scorer> scorers(layers);
    for (int layer = 0; layer < layers; ++layer) {
        scorers[layer].heads = kv_heads;
        scorers[layer].weights.weight = weights.data() + layer * kv_heads * 2 * dim;
    }

    // One cache for the model, and the memory that it asks for.
    const backend::context ctx{};
    kvp::FixedBudgetCache<Policy, float> cache{{.layers = layers,
                                                .max_sequences = 1,
                                                .query_heads = query_heads,
                                                .kv_heads = kv_heads,
                                                .head_dim = dim},
                                               Policy{},
                                               scorers.data()};
    backend::memory memory{ctx, cache.bytes()};
    cache.bind(ctx, memory.data(), memory.size());
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};

    backend::array<float> q(query_heads * dim), k(kv_heads * dim), v(kv_heads * dim), out(query_heads * dim);
    const auto ref = cache.layer(0);
    for (int token = 0; token < 3000; ++token) {
        for (int layer = 0; layer < layers; ++layer) {
            fill(q), fill(k), fill(v);  // what the layer's projections would give
            // Appends the key, decides who leaves, and attends to what is left. Nothing is allocated.
            kvp::step(ctx, cache.layer(layer), cache.nhd(q.data(), k.data(), v.data(), out.data()),
                      workspace);
            backend::wait(ctx);  // the next layer has other numbers in the same places
        }
        cache.advance(ctx);  // once a token, after the last layer
        if ((token + 1) % 1000 == 0) {
            backend::wait(ctx);
            const auto full =
                static_cast<long long>(sizeof(float)) * (token + 1) * layers * kv_heads * 2 * dim;
            std::printf("%lld tokens: %d entries per head, %zu KiB of keys and values (a full cache: %lld)\n",
                        static_cast<long long>(ref.length[0]), ref.used(0, 0),
                        cache.bytes().keys_and_values / 1024, full / 1024);
        }
    }
}

// Prints:
// 1000 tokens: 64 entries per head, 32 KiB of keys and values (a full cache: 500)
// 2000 tokens: 64 entries per head, 32 KiB of keys and values (a full cache: 1000)
// 3000 tokens: 64 entries per head, 32 KiB of keys and values (a full cache: 1500)
