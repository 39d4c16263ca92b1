// A gate decides what is worth writing, so memory follows the text: two heads of one layer, and two sequences, share one pool
// of pages.
//
// With WG-KV's rule a key whose gate is closed is gone when it leaves the window. No number bounds the others, so the cache is
// a DualCache: it asks for slabs of pages when it needs them.
#include <kvpolicy/wgkv.hpp>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

constexpr int heads = 2, dim = 8;
using Policy = kvp::WGKV<4>;  // a window of 4; the caller brings the gates' logits

int main() {
    const kvp::host on{1};
    kvp::DualCache<Policy, float> cache{
        {.slots = 2, .query_heads = heads, .kv_heads = heads, .dim_k = dim, .dim_v = dim, .page_rows = 4},
        {.slab_pages = 8, .most_slabs = 32, .longest = 1000}};
    kvp::HostBuffer tables{cache.bytes().total()};
    cache.bind(on, tables);
    kvp::HostBuffer workspace{kvp::cache_workspace_bytes(on, cache.ref(0), 1, 1)};
    std::vector<kvp::HostBuffer> slabs;

    const auto decode = [&](int slot, int tokens) {
        const kvp::Batch one{.count = 1, .slots = &slot};
        for (int t = 0; t < tokens; ++t) {
            // What the next token can need at most. A step that finds no page would do nothing and say so in a status word.
            while (cache.reserve(on, one) > 0) {
                cache.add_slab(on, slabs.emplace_back(cache.slab_bytes()));
            }
            std::vector<float> x(heads * dim, 1.0f), out(heads * dim);
            const float gates[heads] = {t % 2 == 0 ? 1.0f : -1.0f,    // head 0 keeps every second key,
                                        t % 20 == 0 ? 1.0f : -1.0f};  // head 1 every twentieth
            const auto rows = kvp::view_bhsd<const float>(x.data(), 1, heads, 1, dim);
            kvp::step(on, cache.ref(0), one, rows, rows, rows, kvp::view_bhsd(out.data(), 1, heads, 1, dim),
                      workspace, nullptr, {.scores = kvp::view_bhs(gates, 1, heads, 1)});
            cache.advance(on, one);
        }
        std::printf("slot %d: %d and %d rows, %d slabs\n", slot, cache.occupancy(0, slot, 0).rows(),
                    cache.occupancy(0, slot, 1).rows(), cache.slabs());
    };
    decode(0, 200);
    cache.clear(on, 0);  // the sequence has ended: its pages serve the next one
    decode(1, 200);
}

// Prints:
// slot 0: 102 and 14 rows, 4 slabs
// slot 1: 102 and 14 rows, 4 slabs
