// WG-KV's write gate inside both caches: keys before and after RoPE, at the keys' own positions.
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/quest.hpp>
#include <kvpolicy/wgkv.hpp>

#include "arriving_case.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

using namespace kvpolicy;
using namespace test;

namespace {

template <class S>
S gate_of(std::int32_t hidden, const Rope& rope, std::int32_t head_dim_qk = 16,
          std::int32_t head_dim_vo = 24) {
    auto scorer = sized<S>();
    scorer.hidden = hidden;
    scorer.head_dim_qk = head_dim_qk;
    scorer.head_dim_vo = head_dim_vo;
    scorer.input.rope = rope;
    return scorer;
}

using StoredGate = WriteGateScorer<>;
constexpr Rope halves{rope_layout::half_split, 500000.0f}, neighbors{rope_layout::interleaved, 10000.0f, 12};

}  // namespace

TEST_CASE("few calls") {
    contiguous_life<float, true>(gate_of<StoredGate>(37, halves), arriving_shape(3, 16, 24), true, 0, 10, 1);
    paged_life<WGKV<7, StoredGate>, float, true>(gate_of<StoredGate>(37, halves), arriving_shape(3, 16, 24),
                                                 0, true, 0, 10, 1);
}

TEST_CASE("a FixedBudgetCache of a gate and a budget") {
    contiguous_life<float, true>(gate_of<StoredGate>(37, halves), arriving_shape(3, 16, 24), true, 0, 80, 2);
    contiguous_life<float, true>(gate_of<StoredGate>(6, neighbors), arriving_shape(3, 16, 24), false, 0, 80,
                                 3);
}

TEST_CASE("a DualCache of the composition that wgkv.hpp names") {
    paged_life<WGKV<7, StoredGate>, float, true>(gate_of<StoredGate>(37, halves), arriving_shape(3, 16, 24),
                                                 0, true, 0, 80, 2);
    paged_life<WGKV<7, StoredGate>, float, true>(gate_of<StoredGate>(6, neighbors), arriving_shape(3, 16, 24),
                                                 0, false, 0, 80, 3);
}

TEST_CASE("a DualCache of the composition that quest.hpp names: admission, eviction, selection") {
    using Composed =
        Policy<Sink<0>, Window<7>, ThresholdGate<at_least>, StoredGate, SnapKVEviction, QuestPages<16>>;
    paged_life<Composed, float, true>(gate_of<StoredGate>(37, halves), arriving_shape(3, 16, 24), 0, true, 0,
                                      40, 2, SnapKVEviction{}, QuestPages<16>{2});
}

// Steps on the tensor cores begin beside the gate's launch, as clusters and with one block a head.
TEST_CASE("16-bit steps") {
    using Fixed = WriteGateScorer<64>;
    const auto gate = gate_of<Fixed>(128, halves, 64, 64);
    for (const std::int32_t max_sequences : {3, 40}) {
        CAPTURE(max_sequences);
        contiguous_life<bf16, false>(gate, arriving_shape(max_sequences, 64, 64), true, 0, 40, 4);
        paged_life<WGKV<7, Fixed>, bf16, false>(gate, arriving_shape(max_sequences, 64, 64), 0, true, 0, 40,
                                                4);
    }
}

// Positions move after the first chunk, by whole windows: the ring stays as it is.
TEST_CASE("positions around 2^24, 2^30 and 2^40") {
    const CacheShape shape = arriving_shape(1, 16, 24);
    using P = GatedBudget<StoredGate>;
    for (const Rope& rope : {halves, neighbors}) {
        for (const int bits : {24, 30, 40}) {
            CAPTURE(bits);
            const position_t by = ((position_t{1} << bits) / 7 - 4) * 7;
            std::mt19937 generator(static_cast<unsigned>(bits));
            const TwoScorers<StoredGate> scorers(gate_of<StoredGate>(37, rope), true, generator);
            BothCaches<P, float, head_dims<64>> both(shape, P{{}, {}, {}, {}, scorers.of_host},
                                                     &scorers.of_host, &scorers.of_device);
            struct {
                std::map<std::pair<std::int32_t, position_t>, double> exact;
                double device = 0.0, host = 0.0;
                std::size_t seen = 0;
                void score(std::int32_t, std::int32_t head, position_t position, float of_device,
                           float of_host) {
                    const auto found = exact.find({head, position});
                    if (found == exact.end()) {
                        return;
                    }
                    const double scale = 1.0 + std::abs(found->second);
                    device =
                        std::max(device, std::abs(static_cast<double>(of_device) - found->second) / scale);
                    host = std::max(host, std::abs(static_cast<double>(of_host) - found->second) / scale);
                    ++seen;
                }
                void states(std::int32_t, std::int32_t, const float*, const float*, std::int64_t) {}
            } near;
            position_t next = 0;
            const auto feed = [&](Mode mode, std::int32_t tokens) {
                const CallTensors<float> in(shape, 1, tokens, Scores::random, generator);
                both.call(mode, {0}, {tokens}, in, {tokens});
                for (std::int32_t t = 0; t < tokens; ++t, ++next) {
                    for (std::int32_t h = 0; next > 20 && h < 2; ++h) {
                        near.exact[{h, next}] = exact_score(scorers.of_host, in, 0, h, t, next);
                    }
                }
                both.near_rows(near);
            };
            feed(Mode::prefill, 20);
            move_positions(both, 0, by);
            next += by;
            REQUIRE(next < position_t{1} << bits);
            for (const std::int32_t tokens : {1, 1, 11, 1, 1, 1}) {
                feed(tokens == 1 ? Mode::step : Mode::prefill, tokens);
            }
            REQUIRE(next > position_t{1} << bits);
            CHECK(near.seen > 40);
            MESSAGE("2^", bits, ": the furthest from double: ", near.device, ", the host's ", near.host);
            CHECK(near.device <= score_tolerance);
            CHECK(near.host <= score_tolerance);
        }
    }
}

TEST_CASE("a key that is NaN is reported, and is not admitted") {
    std::mt19937 generator(3);
    const TwoScorers<StoredGate> scorers(gate_of<StoredGate>(5, halves), true, generator);
    const CacheShape shape = arriving_shape(2, 16, 24);
    const auto spoil = [](CallTensors<float>& in, std::int32_t t) {
        in.k.view().row(1, 1, t)[3] = std::numeric_limits<float>::quiet_NaN();
    };
    for (const bool chunk : {false, true}) {
        CAPTURE(chunk);
        using P = GatedBudget<StoredGate>;
        BothCaches<P, float, head_dims<64>> contiguous(shape, P{{}, {}, {}, {}, scorers.of_host},
                                                       &scorers.of_host, &scorers.of_device);
        check_nan_scores<float>(contiguous, 0, chunk, spoil);
        using Named = WGKV<7, StoredGate, 2>;
        BothDuals<Named, float, head_dims<64>, true> paged(
            shape, {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 200}, Named{{}, {}, {}, scorers.of_host},
            &scorers.of_host, &scorers.of_device);
        REQUIRE(paged.add_slab());
        check_nan_scores<float>(paged, 0, chunk, spoil);
    }
}

TEST_CASE("a gate that does not fit the heads, or says no RoPE") {
    using Named = WGKV<7, StoredGate>;
    using Cache = DualCache<Named, float>;
    std::mt19937 generator(3);
    const TwoScorers<StoredGate> scorers(gate_of<StoredGate>(5, halves), true, generator);
    constexpr PoolShape pool{.slab_pages = 4, .max_slabs = 1, .max_seq_len = 100};
    const auto made = [&](const StoredGate& gate, const CacheShape& shape) {
        const Named policy{{}, {}, {}, gate};
        const Cache cache(shape, pool, policy, &gate);
    };
    CHECK_REFUSED(made(scorers.of_device, arriving_shape(1, 24, 24)),
                  "WriteGateScorer.head_dim_qk: 16 is not allowed; it must be the width of the keys, 24");
    StoredGate other = scorers.of_device;
    other.heads = 3;
    CHECK_REFUSED(made(other, arriving_shape(1, 16, 24)),
                  "WriteGateScorer.heads: 3 is not allowed; it must be the layer's KV heads, 2");
    other = scorers.of_device;
    other.input.rope = {};
    CHECK_REFUSED(made(other, arriving_shape(1, 16, 24)), "WriteGateScorer.input.rope.layout: none");
}
