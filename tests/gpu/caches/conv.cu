// ConvScorer inside caches' calls: keys get their scores in batches, in the window; those of a device decide
// as the host's do. 16-bit scores agree to 16-bit rounding, so there nothing is evicted.
#define KVPOLICY_TEST_GPU
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/conv.hpp>

#include "../support/lesser_gpu.hpp"
#include "cache_case.hpp"
#include "paged_case.hpp"
#include "two_scorers.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

using namespace kvpolicy;
using namespace test;

namespace {

ConvScorer<> convolution(std::int32_t head_dim_qk, std::int32_t head_dim_vo, std::int32_t batch,
                         rope_layout layout) {
    ConvScorer<> scorer;
    scorer.heads = 2;
    scorer.head_dim_qk = head_dim_qk;
    scorer.head_dim_vo = head_dim_vo;
    scorer.batch = batch;
    scorer.rope = {layout, 10000.0f, 0, nullptr};
    return scorer;
}

CacheShape shaped(const ConvScorer<>& sizes, std::int32_t max_sequences, std::int32_t page_size) {
    return {.layers = 1,
            .max_sequences = max_sequences,
            .query_heads = 4,
            .kv_heads = 2,
            .head_dim_qk = sizes.head_dim_qk,
            .head_dim_vo = sizes.head_dim_vo,
            .page_size = page_size,
            .max_draft_tokens = 6};
}

/// Steps, chunks and draft tokens in turn; see(turn) after each.
template <class T, class Both, class See>
void live(Both& both, const CacheShape& shape, std::int32_t turns, std::int32_t max_seq_len,
          std::mt19937& generator, const See& see) {
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const Mode mode = turn % 3 == 0 ? Mode::prefill : turn % 3 == 1 ? Mode::step : Mode::append_draft;
        const std::int32_t most = mode == Mode::step ? 1 : mode == Mode::append_draft ? 6 : max_seq_len;
        const auto some = [&](std::int32_t limit) {
            return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(limit + 1));
        };
        std::vector<std::int32_t> seq_ids, q_len, accepted;
        for (std::int32_t i = 0; i < shape.max_sequences; ++i) {
            seq_ids.push_back((i + 1) % shape.max_sequences);
            q_len.push_back(some(most));
            accepted.push_back(some(q_len.back()));
        }
        const CallTensors<T> in(shape, shape.max_sequences, most, Scores::random, generator);
        both.call(mode, seq_ids, q_len, in, accepted);
        CAPTURE(turn);
        see();
    }
}

/// With `bits` positions are beyond 2^bits: they move after a chunk, by whole windows and whole batches of
/// keys.
template <std::int32_t Width, std::int32_t Budget, class T, class Dims = all_head_dims>
void check_fixed(const ConvScorer<>& sizes, std::int32_t turns, std::int32_t max_seq_len, float tolerance,
                 int bits = 0) {
    using P = Policy<Sink<2>, Window<Width>, TopKBudget<Budget>, ConvScorer<>>;
    std::mt19937 generator(11);
    const TwoScorers<ConvScorer<>> scorers(sizes, true, generator);
    const P policy{Sink<2>{}, Window<Width>{}, TopKBudget<Budget>{}, scorers.of_host};
    const CacheShape shape = shaped(sizes, 3, 1);
    BothCaches<P, T, Dims> both(shape, policy, &scorers.of_host, &scorers.of_device);
    if (bits != 0) {
        constexpr std::int32_t before = Width + 30;
        const CallTensors<T> in(shape, 3, before, Scores::random, generator);
        both.call(Mode::prefill, {0, 1, 2}, {before, before, before}, in, {});
        const position_t cycle = position_t{Width} * sizes.tokens_at_once(Width);
        for (std::int32_t seq = 0; seq < 3; ++seq) {
            move_positions(both, seq, ((position_t{1} << bits) / cycle + 1) * cycle);
        }
    }
    live<T>(both, shape, turns, max_seq_len, generator, [&] {
        const auto ref = both.cache.layer(0), host_ref = both.oracle.cache.layer(0);
        const auto position = both.fetch(ref.position, ref.max_sequences * ref.rows);
        const auto score = both.fetch(ref.score, ref.max_sequences * ref.rows);
        bool same = true;
        float worst = 0.0f;
        double error = 0.0, size = 0.0;
        for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto first = static_cast<std::size_t>(host_ref.first_row(seq, h));
                for (std::size_t r = first; r < first + static_cast<std::size_t>(host_ref.used(seq, h));
                     ++r) {
                    same = same && position[r] == host_ref.position[r];
                    // A key without a score has 0 in both.
                    same = same && (score[r] == 0.0f) == (host_ref.score[r] == 0.0f);
                    const float off = std::abs(score[r] - host_ref.score[r]);
                    worst = std::max(worst, off / (1.0f + std::abs(host_ref.score[r])));
                    error += static_cast<double>(off) * static_cast<double>(off);
                    size += static_cast<double>(host_ref.score[r]) * static_cast<double>(host_ref.score[r]);
                }
            }
        }
        CHECK(same);
        // 16-bit roundings are of the terms of a score, not of what is left of them. Rounding keys,
        // values, weights and layers to bf16 alone, with everything else in double, is off by 0.2 to
        // 0.5% in the norm.
        if (std::is_same_v<T, float>) {
            CHECK(worst <= tolerance);
        }
        CHECK(std::sqrt(error) <= static_cast<double>(tolerance) * std::sqrt(size));
    });
}

}  // namespace

TEST_CASE("FixedBudgetCache, float: batches of all sizes") {
    for (const std::int32_t batch : {0, 1, 3}) {
        check_fixed<20, 30, float>(convolution(16, 24, batch, rope_layout::half_split), 60, 45, 5e-5f);
    }
    check_fixed<20, 30, float>(convolution(16, 24, 5, rope_layout::interleaved), 40, 60, 5e-5f);
}

TEST_CASE("FixedBudgetCache, bf16: tiles") {
    check_fixed<150, 4000, bf16, head_dims<64>>(convolution(64, 64, 0, rope_layout::half_split), 18, 300,
                                                1e-2f);
    check_fixed<150, 4000, bf16, head_dims<64>>(convolution(64, 32, 17, rope_layout::none), 18, 90, 1e-2f);
    check_fixed<150, 4000, bf16, head_dims<128>>(convolution(128, 128, 0, rope_layout::half_split), 15, 200,
                                                 1e-2f);
}

TEST_CASE("FixedBudgetCache: positions beyond 2^24, 2^30 and 2^40") {
    for (const int bits : {24, 30, 40}) {
        CAPTURE(bits);
        check_fixed<20, 30, float>(convolution(16, 24, 0, rope_layout::half_split), 30, 45, 5e-5f, bits);
        check_fixed<150, 4000, bf16, head_dims<64>>(convolution(64, 64, 0, rope_layout::half_split), 18, 300,
                                                    1e-2f, bits);
    }
}

TEST_CASE("GPUs with less shared memory") {
    for (const int gpu : {test::small_gpu, test::middle_gpu}) {
        const LesserGpu as(gpu);
        check_fixed<20, 30, float, head_dims<128>>(convolution(128, 128, 0, rope_layout::half_split), 30, 90,
                                                   5e-5f);
        check_fixed<150, 4000, bf16, head_dims<128>>(convolution(128, 128, 0, rope_layout::half_split), 15,
                                                     200, 1e-2f);
    }
}

TEST_CASE("DualCache, whose pool runs out") {
    using P = Policy<Sink<2>, Window<20>, TopKBudget<>, ConvScorer<>>;
    std::mt19937 generator(11);
    const auto sizes = convolution(16, 24, 0, rope_layout::half_split);
    const TwoScorers<ConvScorer<>> scorers(sizes, true, generator);
    constexpr std::int32_t budgets[] = {40, unlimited};
    const P policy{Sink<2>{}, Window<20>{}, TopKBudget<>{per_head(budgets, 1, 2)}, scorers.of_host};
    const CacheShape shape = shaped(sizes, 3, 16);
    BothDuals<P, float, all_head_dims, true> both(shape,
                                                  {.slab_pages = 3, .max_slabs = 100, .max_seq_len = 2000},
                                                  policy, &scorers.of_host, &scorers.of_device);
    live<float>(both, shape, 60, 40, generator, [&] { both.near_rows(5e-5f); });
}

TEST_CASE("DualCache, bf16: tiles") {
    using P = Policy<Sink<2>, Window<150>, TopKBudget<>, ConvScorer<>>;
    std::mt19937 generator(12);
    const auto sizes = convolution(64, 64, 0, rope_layout::half_split);
    const TwoScorers<ConvScorer<>> scorers(sizes, true, generator, 0.15f);
    const P policy{Sink<2>{}, Window<150>{}, TopKBudget<>{unlimited}, scorers.of_host};
    const CacheShape shape = shaped(sizes, 3, 16);
    BothDuals<P, bf16, head_dims<64>, true> both(shape,
                                                 {.slab_pages = 64, .max_slabs = 100, .max_seq_len = 4000},
                                                 policy, &scorers.of_host, &scorers.of_device);
    // Of single scores, whose root mean square is 1.9, bf16 alone is off by up to 0.018 (1 + |score|).
    live<bf16>(both, shape, 18, 200, generator, [&] { both.near_rows(4e-2f); });
}
