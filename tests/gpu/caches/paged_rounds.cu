// Chunks into a DualCache whose entries are attended to in rounds: one entry after another, or two at once,
// since KVPOLICY_TEST_LISTS_BYTES is little.
#define KVPOLICY_TEST_LISTS_BYTES 100000

#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

/// `together`: entries at once, of rows of 3 heads of up to `max_seq_len` tokens, listed in 8 bytes each.
void check(std::int32_t together, std::int32_t max_sequences, std::int32_t turns, std::size_t more = 0) {
    CAPTURE(together);
    constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 4, 17, 2, 40, 3};
    constexpr float gates[] = {-9.0f, 9.0f, 0.0f, -1.0f, 0.5f, 1.5f};
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
    const P policy{Sink<>{per_head(sinks, 2, 3)}, Window<>{per_head(windows, 2, 3)},
                   ThresholdGate<at_least>{per_head(gates, 2, 3)}};
    const CacheShape shape{.layers = 2,
                           .max_sequences = max_sequences,
                           .query_heads = 3,
                           .kv_heads = 3,
                           .head_dim_qk = 8,
                           .head_dim_vo = 16,
                           .page_size = 16,
                           .max_draft_tokens = 5};
    const position_t max_seq_len = KVPOLICY_TEST_LISTS_BYTES / (3 * 8 * together);
    std::mt19937 generator(11);
    BothDuals<P, float, all_head_dims, true> ample(
        shape, {.slab_pages = 40, .max_slabs = 400, .max_seq_len = max_seq_len}, policy);
    ample.more_workspace = more;
    CHECK(random_life(ample, Scores::random, turns, generator) != 0);
    BothDuals<P, float, all_head_dims, true> scarce(
        shape, {.slab_pages = 100, .max_slabs = 2, .max_seq_len = max_seq_len}, policy);
    CHECK(random_life(scarce, Scores::few_values, turns, generator) != 0);
}

}  // namespace

TEST_CASE("few calls") { check(1, 3, 12); }

TEST_CASE("an entry at a time") { check(1, 4, 80); }

TEST_CASE("two entries at a time, of five") { check(2, 5, 80); }

TEST_CASE("as many entries at a time as fit") {
    check(1, 5, 80, std::size_t{4} * KVPOLICY_TEST_LISTS_BYTES);
    check(1, 5, 60, std::size_t{2} * KVPOLICY_TEST_LISTS_BYTES);
}

TEST_CASE("a workspace for long chunks does for shorter ones") {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
    const P policy{Sink<>{4}, Window<>{32}, ThresholdGate<at_least>{0.0f}};
    const kvpolicy::cuda ctx{};
    constexpr std::int32_t count = 4, longest = 3000;
    DualCache<P, float> cache(
        {.max_sequences = count, .query_heads = 2, .kv_heads = 2, .head_dim = 64, .page_size = 16},
        {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 3500}, policy);
    const Device<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, memory.data(), memory.size());
    const Device<float> rows(std::vector<float>(std::size_t{count} * 2 * longest * 64));
    const Device<float> scores(std::vector<float>(std::size_t{count} * 2 * longest));
    const Device<std::int32_t> none{std::vector<std::int32_t>(count)};
    for (const std::int32_t most : {longest, 2048, 1024}) {
        const Device<unsigned char> workspace(
            workspace_bytes<head_dims<64>>(ctx, cache.layer(0), {.batch = count, .tokens = most}));
        for (const std::int32_t n : {most, most - 1, 2047, 1025, 1024, 1023, 100, 1}) {
            if (n > most) {
                continue;
            }
            // Sizes follow from the shapes; no entry brings a token.
            const auto view = [&] { return view_bhsd(rows.data(), count, 2, n, 64); };
            StepIO<float> io{.q = view(), .k = view(), .v = view(), .out = view()};
            io.batch = {.count = count, .q_len = none.data()};
            io.scores = view_bhs<const float>(scores.data(), count, 2, n);
            prefill<head_dims<64>>(ctx, cache.layer(0), io, workspace);
        }
    }
    ok(cudaDeviceSynchronize());
}

TEST_CASE("a workspace does not grow with the entries' rows beyond a round's") {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
    const P policy{Sink<>{4}, Window<>{32}, ThresholdGate<at_least>{0.0f}};
    const kvpolicy::cuda ctx{};
    const auto bytes = [&](std::int32_t count) {
        DualCache<P, float> cache({.layers = 1,
                                   .max_sequences = 64,
                                   .query_heads = 2,
                                   .kv_heads = 2,
                                   .head_dim_qk = 64,
                                   .head_dim_vo = 64,
                                   .page_size = 16},
                                  {.slab_pages = 4000, .max_slabs = 100, .max_seq_len = 20000}, policy);
        const Device<unsigned char> memory(cache.bytes().total());
        cache.bind(ctx, memory.data(), memory.size());
        return workspace_bytes<head_dims<64>>(ctx, cache.layer(0), {.batch = count, .tokens = 16});
    };
    // A row has 512 bytes of keys and values, which are not copied. What the chunk decides of it takes 9.
    const std::size_t one = bytes(1), all = bytes(64);
    CHECK(one < 2 * 20000 * 64);
    CHECK(all < one + 63 * 2 * std::size_t{20000} * 9);
}
