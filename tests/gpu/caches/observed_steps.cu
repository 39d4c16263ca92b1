// Steps of a FixedBudgetCache whose policy ranks keys by attention, against the host's: sums and last masses,
// of a head and of a layer, means and largest weights, equal masses, groups of any size, few and many heads,
// sequences that are copied, moved and restored. Inputs that are not finite, layers stepped twice, refusals.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/tova.hpp>

#include "../../support/refusal.hpp"
#include "observed_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

constexpr std::int32_t few[] = {1, 2, 3};

template <class T, class P>
void live(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns,
          const AttentionParams& attention = {}) {
    std::mt19937 generator(static_cast<unsigned>(shape.query_heads + 100 * static_cast<int>(kind)));
    CAPTURE(shape.query_heads);
    BothCaches<P, T, Dims, false> both(shape, policy, nullptr, nullptr, attention);
    observed_life<T>(both, kind, turns, generator, attention);
}

}  // namespace

TEST_CASE("sums of masses, of groups of any size") {
    live<bf16>(shape_of(3, 1), ragged(accumulated), Keys::random, 200);
    live<bf16>(shape_of(3, 4), ragged(accumulated), Keys::equal, 200);
    live<bf16>(shape_of(3, 7), ragged({.aggregate = group_aggregate::max}), Keys::random, 200);
    live<bf16>(shape_of(3, 9), ragged(accumulated), Keys::far, 200);
}

TEST_CASE("last masses, of a head and of a layer") {
    live<bf16>(shape_of(3, 4), ragged(last_of_head), Keys::equal, 200);
    live<bf16>(shape_of(3, 2), even(last_of_layer), Keys::random, 130);
    live<bf16>(shape_of(10, 3), even(last_of_layer), Keys::equal, 130);
    live<bf16>(shape_of(2, 4), even({.accumulate = true, .whole_layer = true}), Keys::random, 130);
}

TEST_CASE("a soft cap") {
    live<bf16>(shape_of(3, 4), ragged(accumulated), Keys::random, 120, {.logits_soft_cap = 5.0f});
}

TEST_CASE("many heads: blocks that are no cluster, and leaders with entries of their own") {
    live<bf16>(shape_of(3, 2, 64, 12), ragged(accumulated), Keys::equal, 100);
    live<bf16>(shape_of(3, 1, 8, 50), ragged(last_of_head, few), Keys::equal, 40);
}

TEST_CASE("float") {
    live<float>(shape_of(3, 4, 24), ragged(accumulated), Keys::random, 150);
    live<float>(shape_of(3, 3, 24), even(last_of_layer), Keys::equal, 120);
}

TEST_CASE("TOVA, fp16") { live<fp16>(shape_of(2, 4), tova_for_total(70), Keys::random, 120); }

namespace {

/// A cache of two layers of H2O in device memory, with steps by hand.
struct Hand {
    static constexpr std::int32_t heads = 2, group = 2, dim = 64, rows = 8;
    FixedBudgetCache<H2O<>, bf16> cache{{.layers = 2,
                                         .max_sequences = 2,
                                         .query_heads = heads * group,
                                         .kv_heads = heads,
                                         .head_dim_qk = dim,
                                         .head_dim_vo = dim},
                                        h2o_for_total(rows)};
    kvpolicy::cuda ctx{};
    Device<unsigned char> memory{std::vector<unsigned char>(cache.bytes().total(), 0)};
    std::mt19937 generator{5};

    Hand() { cache.bind(ctx, memory.data(), memory.size()); }
    [[nodiscard]] std::size_t bytes() const { return step_workspace_bytes<Dims>(ctx, cache.layer(0), 2); }

    /// A token for both sequences in layer `layer`; element `bad` of query head 0 of entry 1 is NaN. Returns
    /// the status words.
    std::vector<std::uint32_t> step(std::int32_t layer, bool bad = false) {
        CallTensors<bf16> in(cache.shape(), 2, 1, Scores::random, generator);
        if (bad) {
            in.q.data[std::size_t{heads} * group * dim] = bf16(NAN);
        }
        const Device<bf16> q(in.q.data), k(in.k.data), v(in.v.data),
            out(std::size_t{2} * heads * group * dim);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(2, 0));
        const Device<unsigned char> workspace(bytes());
        kvpolicy::step<Dims>(ctx, cache.layer(layer),
                             cache.hnd(q.data(), k.data(), v.data(), out.data(), {2, 1}), workspace,
                             {.status = status.data()});
        return status.read();
    }
    /// Scores of all rows of layer 0.
    [[nodiscard]] std::vector<float> scores() const {
        const auto ref = cache.layer(0);
        return fetch_from(ref.score, 2 * ref.rows);
    }
};

}  // namespace

TEST_CASE("a query that is not finite gives no mass, and is reported") {
    Hand hand;
    const std::vector<std::uint32_t> fine{0, 0}, bad{0, status_nan_score};
    for (std::int32_t t = 0; t < 20; ++t) {
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            CHECK(hand.step(layer, t % 3 == 2) == (t % 3 == 2 ? bad : fine));
        }
        hand.cache.advance(hand.ctx, {2});
    }
    double sum = 0.0;
    for (const float score : hand.scores()) {
        CHECK(score >= 0.0f);
        sum += static_cast<double>(score);
    }
    CHECK(sum > 1.0);
}

TEST_CASE("a layer that is stepped twice keeps its masses") {
    Hand hand;
    const std::vector<std::uint32_t> repeated{status_layer_repeated, status_layer_repeated};
    for (std::int32_t t = 0; t < 12; ++t) {
        CHECK(hand.step(0) == std::vector<std::uint32_t>{0, 0});
        const std::vector<float> before = hand.scores();
        CHECK(hand.step(0) == repeated);
        CHECK(hand.scores() == before);
        CHECK(hand.step(1) == std::vector<std::uint32_t>{0, 0});
        hand.cache.advance(hand.ctx, {2});
    }
}

TEST_CASE("refusals") {
    Hand hand;
    Device<unsigned char> little(hand.bytes() - 1);
    const Device<bf16> rows(std::size_t{2} * Hand::heads * Hand::group * Hand::dim);
    CHECK_REFUSED(
        step<Dims>(hand.ctx, hand.cache.layer(0),
                   hand.cache.hnd(rows.data(), rows.data(), rows.data(), rows.data(), {2, 1}), little),
        "workspace");

    FixedBudgetCache<Observed, bf16> uneven(shape_of(3, 1), ragged(last_of_layer));
    const Device<unsigned char> memory(uneven.bytes().total());
    CHECK_REFUSED(uneven.bind(hand.ctx, memory.data(), memory.size()),
                  "keeps the same keys in all its heads");

    FixedBudgetCache<Observed, bf16> pooled(shape_of(3, 1), even({.pool = 3}));
    const Device<unsigned char> more(pooled.bytes().total());
    pooled.bind(hand.ctx, more.data(), more.size());
    const Device<unsigned char> workspace(step_workspace_bytes<Dims>(hand.ctx, pooled.layer(0), 3));
    const Device<bf16> few_rows(std::size_t{3} * 3 * 64);
    CHECK_REFUSED(step<Dims>(hand.ctx, pooled.layer(0),
                             pooled.hnd(few_rows.data(), few_rows.data(), few_rows.data(), few_rows.data(),
                                        {.batch = 3, .tokens = 1}),
                             workspace),
                  "decode steps do not pool");
}
