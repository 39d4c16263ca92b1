// reserve() of a DualCache beside the host's: many layers, entries that get nothing, pools that do not
// suffice, and layers that are ahead.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"
#include "support/step_io.hpp"

#include <array>

using namespace kvpolicy;
using namespace test;

namespace {

using P = Policy<Sink<2>, Window<5>, TopKBudget<>>;
using Both = BothDuals<P, float>;

/// Pages of all heads, and how far sequences are reserved, are the host's; no page is anybody's twice.
void check_pages(const Both& both) {
    const CacheShape& shape = both.shape;
    std::vector<std::int32_t> seen;
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        const auto ref = both.cache.layer(layer), host_ref = both.oracle.cache.layer(layer);
        const std::int64_t heads = std::int64_t{shape.max_sequences} * shape.kv_heads;
        const auto held = fetch_from(ref.held, heads);
        const std::vector<std::int32_t> wanted(host_ref.held, host_ref.held + heads);
        CAPTURE(layer);
        CHECK(held == wanted);
        const auto offsets = fetch_from(ref.table_offset, shape.kv_heads + 1);
        const auto table = fetch_from(ref.table, shape.max_sequences * offsets.back());
        for (std::int32_t x = 0; x < heads; ++x) {
            const std::int32_t seq = x / shape.kv_heads;
            const auto* const first =
                table.data() + seq * offsets.back() + offsets[static_cast<std::size_t>(x % shape.kv_heads)];
            seen.insert(seen.end(), first, first + held[static_cast<std::size_t>(x)]);
        }
    }
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
    CHECK(both.cache.free_pages(both.device) == both.oracle.cache.free_pages());
    CHECK(both.cache.free_pages(both.device) + static_cast<std::int64_t>(seen.size()) ==
          both.cache.attached_pages());
    const auto ref = both.cache.layer(0), host_ref = both.oracle.cache.layer(0);
    CHECK(fetch_from(ref.reserved, shape.max_sequences) ==
          std::vector<position_t>(host_ref.reserved, host_ref.reserved + shape.max_sequences));
}

}  // namespace

TEST_CASE("many layers, in pools that grow") {
    constexpr std::int32_t layers = 70, heads = 5, max_sequences = 6;
    std::vector<std::int32_t> budgets;
    for (std::int32_t x = 0; x < layers * heads; ++x) {
        budgets.push_back(x % 3 == 0 ? unlimited : x % 7 * 20);
    }
    Both both({.layers = layers,
               .max_sequences = max_sequences,
               .query_heads = heads,
               .kv_heads = heads,
               .head_dim_qk = 8,
               .head_dim_vo = 8,
               .page_size = 16},
              {.slab_pages = 2500, .max_slabs = 80, .max_seq_len = 3000},
              P{{}, {}, TopKBudget<>{per_head(budgets.data(), layers, heads)}});
    std::mt19937 generator(3);
    for (std::int32_t turn = 0; turn < 12; ++turn) {
        CAPTURE(turn);
        std::vector<std::int32_t> named{5, 2, 0, 3, 1, 4}, tokens;
        for (std::int32_t i = 0; i < max_sequences; ++i) {
            tokens.push_back(generator() % 4 == 0 ? 0
                                                  : static_cast<std::int32_t>(generator() % 90) * (turn + 1));
        }
        CHECK(both.reserve(named, tokens));
        check_pages(both);
        // Padding, bad sequences, bad counts and what is too long get nothing; the others get theirs.
        const std::vector<std::int32_t> bad_slots{Batch::no_seq, 1, 17, 4, 0, 3},
            bad_tokens{3, 2990 + turn, 5, 3001, -2, 100 * turn};
        const Device<std::int32_t> device_seq_ids(bad_slots), device_tokens(bad_tokens);
        const std::vector<std::int32_t> good_slots{1, 3},
            good_tokens{2990 + turn <= 3000 ? 2990 + turn : 0, bad_tokens.back()};
        std::int64_t wanted = 1;
        while (wanted > 0) {
            wanted = both.oracle.cache.reserve(both.ctx, {2, good_slots.data(), good_tokens.data()});
            CHECK(both.cache.reserve(both.device, {6, device_seq_ids.data(), device_tokens.data()}) ==
                  wanted);
            check_pages(both);
            for (std::int64_t i = 0; i < wanted; ++i) {
                REQUIRE(both.add_slab());
            }
        }
        const std::int32_t seq = turn % max_sequences;
        both.oracle.cache.clear(both.ctx, seq);
        both.cache.clear(both.device, seq);
        check_pages(both);
    }
}

TEST_CASE("a layer that is ahead") {
    constexpr std::array<std::int32_t, 2> budgets{unlimited,
                                                  6};  // only layer 0 is bounded by the longest sequence
    Both both({.layers = 2,
               .max_sequences = 2,
               .query_heads = 1,
               .kv_heads = 1,
               .head_dim_qk = 8,
               .head_dim_vo = 8,
               .page_size = 16},
              {.slab_pages = 60, .max_slabs = 1, .max_seq_len = 300},
              P{{}, {}, TopKBudget<>{per_head(budgets.data(), 2, 1)}});
    both.add_slab();
    std::mt19937 generator(3);
    for (std::int32_t t = 0; t < 20; ++t) {
        both.call(Mode::step, {1}, {1}, CallTensors<float>(both.shape, 1, 1, Scores::random, generator));
    }
    // Layer 1 takes the next token: 280 more would be 301.
    const CallTensors<float> in(both.shape, 1, 1, Scores::random, generator);
    const std::vector<std::int32_t> seq{1}, too_many{280}, enough{279};
    const Device<std::int32_t> device_slot(seq), device_many(too_many), device_enough(enough);
    const Device<float> q(in.q.data), k(in.k.data), v(in.v.data), out(in.v.data.size()),
        scores(in.scores.data);
    Tensor<float> host_out(1, 1, 1, 8);
    const auto rows = [](const Device<float>& of) { return view_bhsd<const float>(of.data(), 1, 1, 1, 8); };
    test::Extras extras, host_extras;
    extras.scores = view_bhs<const float>(scores.data(), 1, 1, 1);
    host_extras.scores = in.scores.view();
    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0});
    const Device<unsigned char> workspace(
        step_workspace_bytes<all_head_dims>(both.device, both.cache.layer(1), 1));
    step<all_head_dims>(both.device, both.cache.layer(1),
                        test::step_io({1, device_slot.data()}, rows(q), rows(k), rows(v),
                                      view_bhsd(out.data(), 1, 1, 1, 8), extras),
                        workspace, {.status = status.data()});
    call_ref<P, float>(both.ctx, both.oracle.cache.layer(1), {1, seq.data()}, in.q.view(), in.k.view(),
                       in.v.view(), host_out.view(), host_extras, true);
    CHECK(status.read()[0] == 0);
    check_pages(both);
    CHECK(both.cache.reserve(both.device, {1, device_slot.data(), device_many.data()}) == 0);
    check_pages(both);  // nothing was given, as the host refuses it
    CHECK(both.cache.reserve(both.device, {1, device_slot.data(), device_enough.data()}) == 0);
    CHECK(both.oracle.cache.reserve(both.ctx, {1, seq.data(), enough.data()}) == 0);
    check_pages(both);
    CHECK(fetch_from(both.cache.layer(0).reserved + 1, 1)[0] == 300);
}
