// A gate decides what is worth writing, so memory follows the text: two heads of one layer, and two
// sequences, share one pool of pages.
//
// With WG-KV's rule a key whose gate is closed is gone when it leaves the window. No number bounds the
// others, so the cache is a DualCache: it asks for slabs of pages when it needs them.
#include <kvpolicy/wgkv.hpp>

#include "backend.hpp"

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

constexpr int heads = 2, dim = 8;
using Policy = kvp::WGKV<4>;  // a window of 4; the caller brings the gates' logits

int main() {
    if (backend::missing()) {
        return 0;
    }
    const backend::context ctx{};
    kvp::DualCache<Policy, float> cache{
        {.max_sequences = 2, .query_heads = heads, .kv_heads = heads, .head_dim = dim, .page_size = 16},
        {.slab_pages = 4, .max_slabs = 32, .max_seq_len = 1000}};
    backend::memory tables{ctx, cache.bytes()};
    cache.bind(ctx, tables.data(), tables.size());
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};
    std::vector<backend::memory> slabs;
    backend::array<int> seq_ids(1);
    backend::array<float> x(heads * dim, 1.0f), out(heads * dim), gates(heads);

    const auto decode = [&](int seq, int tokens) {
        seq_ids[0] = seq;
        const kvp::Batch one{.count = 1, .seq_ids = seq_ids.data()};
        for (int t = 0; t < tokens; ++t) {
            // What the next token can need at most. A step that finds no page would do nothing and say so
            // in a status word.
            while (cache.reserve(ctx, one) > 0) {
                auto& slab = slabs.emplace_back(ctx, cache.slab_bytes());
                cache.add_slab(ctx, slab.data(), slab.size());
            }
            gates[0] = t % 2 == 0 ? 1.0f : -1.0f;   // head 0 keeps every second key,
            gates[1] = t % 20 == 0 ? 1.0f : -1.0f;  // head 1 every twentieth
            const auto rows = kvp::view_bhsd<const float>(x.data(), 1, heads, 1, dim);
            kvp::step(ctx, cache.layer(0),
                      {.q = rows,
                       .k = rows,
                       .v = rows,
                       .out = kvp::view_bhsd(out.data(), 1, heads, 1, dim),
                       .batch = one,
                       .scores = kvp::view_bhs<const float>(gates.data(), 1, heads, 1)},
                      workspace);
            cache.advance(ctx, one);
            backend::wait(ctx);  // the next token has other gates
        }
        std::printf("sequence %d: %d and %d rows, %d slabs\n", seq, cache.layer(0).used(seq, 0),
                    cache.layer(0).used(seq, 1), cache.slabs());
    };
    decode(0, 200);
    cache.clear(ctx, 0);  // the sequence has ended: its pages serve the next one
    decode(1, 200);
}

// Prints:
// sequence 0: 102 and 14 rows, 2 slabs
// sequence 1: 102 and 14 rows, 2 slabs
