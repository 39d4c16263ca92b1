// A rule of your own: tokens that the tokenizer marks (line ends, say) stay for good.
//
// A part is a struct with a kind. A keep part says for a position whether its key stays, and nothing else; it composes with the
// parts that are there, as a mask for training and as a cache for decoding.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/window.hpp>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

struct KeepMarked {
    static constexpr kvp::part_kind kind = kvp::part_kind::keep;
    const unsigned char* marks = nullptr;  // one a token; the caller's
    kvp::position_t count = 0;

    // For any t: a snapshot, say, also asks about tokens that have not come.
    KVPOLICY_HOST_DEVICE constexpr bool keeps(kvp::position_t t) const { return t < count && marks[t] != 0; }
};

using Policy = kvp::Policy<kvp::Window<6>, KeepMarked>;

int main() {
    constexpr int tokens = 40, dim = 8;
    std::vector<unsigned char> marks(tokens);
    marks[7] = marks[19] = marks[23] = 1;
    const Policy policy{kvp::Window<6>{}, KeepMarked{marks.data(), tokens}};
    const kvp::host on{1};

    // As a mask: for each key the first query that no longer sees it.
    std::vector<kvp::expiry_t> expiry(tokens);
    kvp::build_mask(on, policy, {}, {.batch = 1, .length = tokens},
                    kvp::view_bhs(expiry.data(), 1, 1, tokens), {});
    std::printf("the last query sees:");
    for (int t = 0; t < tokens; ++t) {
        if (kvp::visible(tokens - 1, t, expiry[static_cast<std::size_t>(t)])) {
            std::printf(" %d", t);
        }
    }

    // As a cache. No number bounds the rule, so it is one of pages.
    kvp::DualCache<Policy, float> cache{
        {.query_heads = 1, .kv_heads = 1, .dim_k = dim, .dim_v = dim, .page_rows = 4},
        {.slab_pages = 16, .most_slabs = 1, .longest = tokens},
        policy};
    kvp::HostBuffer tables{cache.bytes().total()}, slab{cache.slab_bytes()};
    cache.bind(on, tables);
    cache.add_slab(on, slab);
    kvp::HostBuffer workspace{kvp::cache_workspace_bytes(on, cache.ref(0), 1, tokens)};
    std::vector<float> x(tokens * dim, 1.0f), out(tokens * dim);
    const kvp::Batch prompt{.count = 1, .length = tokens};
    const auto rows = kvp::view_bhsd<const float>(x.data(), 1, 1, tokens, dim);
    kvp::prefill(on, cache.ref(0), prompt, rows, rows, rows, kvp::view_bhsd(out.data(), 1, 1, tokens, dim),
                 workspace);
    cache.advance(on, prompt);

    std::vector<kvp::position_t> held(static_cast<std::size_t>(cache.occupancy(0, 0, 0).rows()));
    cache.retained(0, 0, 0, held.data());
    std::printf("\nthe cache holds (its window is a ring):");
    for (const kvp::position_t t : held) {
        std::printf(" %d", static_cast<int>(t));
    }
    std::printf("\n");
}

// Prints:
// the last query sees: 7 19 23 34 35 36 37 38 39
// the cache holds (its window is a ring): 36 37 38 39 34 35 7 19 23
