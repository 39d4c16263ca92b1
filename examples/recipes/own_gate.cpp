// A gate of your own: keys whose score lies in a band, neither dull nor extreme, are worth keeping.
//
// A part is a struct with a kind. KVPOLICY_HOST_DEVICE lets `open` run in kernels too, so on a GPU the same
// part serves as a mask for training and as a cache for decoding.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/window.hpp>

#include "backend.hpp"

#include <cstdio>

namespace kvp = kvpolicy;

struct Band {
    static constexpr kvp::part_kind kind = kvp::part_kind::gate;
    float low, high;

    // Numbers by layer and head would go into the rule.
    KVPOLICY_HOST_DEVICE constexpr void write(kvp::HeadParams&, std::int32_t /*layer*/,
                                              std::int32_t /*head*/) const {}
    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const kvp::HeadParams&) const {
        return score >= low && score <= high;
    }
};
// What does not fit says so in one sentence when it is compiled.
static_assert(kvp::Gate<Band>);

using Policy = kvp::Policy<kvp::Window<6>, Band>;  // no scorer: scores come from the caller

int main() {
    if (backend::missing()) {
        return 0;
    }
    constexpr int tokens = 40, dim = 8;
    const Policy policy{kvp::Window<6>{}, Band{0.0f, 1.0f}};
    const backend::context ctx{};
    backend::array<float> scores(tokens, -3.0f), x(tokens * dim, 1.0f), out(tokens * dim);
    scores[7] = scores[19] = scores[23] = 0.5f;
    scores[11] = 9.0f;
    const auto given = kvp::view_bhs<const float>(scores.data(), 1, 1, tokens);

    // As a mask: for each key the first query that no longer sees it.
    const kvp::Sequences sequences{.batch = 1, .length = tokens};
    backend::array<kvp::expiry_t> expiry(tokens);
    backend::memory scratch{ctx, kvp::build_mask_workspace_bytes(ctx, policy, sequences, 1)};
    kvp::build_mask(ctx, policy, given, sequences, kvp::view_bhs(expiry.data(), 1, 1, tokens), scratch);
    backend::wait(ctx);
    std::printf("the last query sees:");
    for (int t = 0; t < tokens; ++t) {
        if (kvp::visible(tokens - 1, t, expiry[static_cast<std::size_t>(t)])) {
            std::printf(" %d", t);
        }
    }

    // As a cache. A gate alone bounds nothing, so it is one of pages.
    kvp::DualCache<Policy, float> cache{{.query_heads = 1, .kv_heads = 1, .head_dim = dim, .page_size = 16},
                                        {.slab_pages = 4, .max_slabs = 1, .max_seq_len = tokens},
                                        policy};
    backend::memory tables{ctx, cache.bytes()}, slab{ctx, cache.slab_bytes()};
    cache.bind(ctx, tables.data(), tables.size());
    cache.add_slab(ctx, slab.data(), slab.size());
    backend::memory workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = tokens})};
    const kvp::Batch prompt{.count = 1, .length = tokens};
    const auto rows = kvp::view_bhsd<const float>(x.data(), 1, 1, tokens, dim);
    kvp::prefill(ctx, cache.layer(0),
                 {.q = rows,
                  .k = rows,
                  .v = rows,
                  .out = kvp::view_bhsd(out.data(), 1, 1, tokens, dim),
                  .batch = prompt,
                  .scores = given},
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
