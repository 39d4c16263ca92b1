// A rule of your own: tokens that the tokenizer marks (line ends, say) stay for good.
//
// A part is a struct with a kind. A keep part says for a position whether its key stays, and nothing else; it
// composes with the parts that are there, as a mask for training and as a cache for decoding.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/window.hpp>

#include "backend.hpp"

#include <cstdio>

namespace kvp = kvpolicy;

struct KeepMarked {
    static constexpr kvp::part_kind kind = kvp::part_kind::keep;
    const unsigned char* marks = nullptr;  // one a token; the caller's, in memory that the backend reads
    kvp::position_t count = 0;

    // For any t: a snapshot, say, also asks about tokens that have not come.
    KVPOLICY_HOST_DEVICE constexpr bool keeps(kvp::position_t t) const { return t < count && marks[t] != 0; }
};

using Policy = kvp::Policy<kvp::Window<6>, KeepMarked>;

int main() {
    if (backend::missing()) {
        return 0;
    }
    constexpr int tokens = 40, dim = 8;
    backend::array<unsigned char> marks(tokens);
    marks[7] = marks[19] = marks[23] = 1;
    const Policy policy{kvp::Window<6>{}, KeepMarked{marks.data(), tokens}};
    const backend::context ctx{};

    // As a mask: for each key the first query that no longer sees it.
    backend::array<kvp::expiry_t> expiry(tokens);
    const kvp::Sequences sequences{.batch = 1, .length = tokens};
    backend::memory scratch{ctx, kvp::build_mask_workspace_bytes(ctx, policy, sequences, 1)};
    kvp::build_mask(ctx, policy, {}, sequences, kvp::view_bhs(expiry.data(), 1, 1, tokens), scratch);
    backend::wait(ctx);
    std::printf("the last query sees:");
    for (int t = 0; t < tokens; ++t) {
        if (kvp::visible(tokens - 1, t, expiry[static_cast<std::size_t>(t)])) {
            std::printf(" %d", t);
        }
    }

    // As a cache. No number bounds the rule, so it is one of pages.
    kvp::DualCache<Policy, float> cache{{.query_heads = 1, .kv_heads = 1, .head_dim = dim, .page_size = 16},
                                        {.slab_pages = 4, .max_slabs = 1, .max_seq_len = tokens},
                                        policy};
    backend::memory tables{ctx, cache.bytes()}, slab{ctx, cache.slab_bytes()};
    cache.bind(ctx, tables.data(), tables.size());
    cache.add_slab(ctx, slab.data(), slab.size());
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = tokens})};
    backend::array<float> x(tokens * dim, 1.0f), out(tokens * dim);
    const kvp::Batch prompt{.count = 1, .length = tokens};
    const auto rows = kvp::view_bhsd<const float>(x.data(), 1, 1, tokens, dim);
    kvp::prefill(ctx, cache.layer(0),
                 {.q = rows,
                  .k = rows,
                  .v = rows,
                  .out = kvp::view_bhsd(out.data(), 1, 1, tokens, dim),
                  .batch = prompt},
                 workspace);
    cache.advance(ctx, prompt);

    backend::wait(ctx);
    std::printf("\nthe cache holds (its window is a ring):");
    for (int row = 0; row < cache.layer(0).used(0, 0); ++row) {
        std::printf(" %d", static_cast<int>(cache.layer(0).head_rows(0, 0).position(row)));
    }
    std::printf("\n");
}

// Prints:
// the last query sees: 7 19 23 34 35 36 37 38 39
// the cache holds (its window is a ring): 36 37 38 39 34 35 7 19 23
