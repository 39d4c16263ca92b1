// What reserve() promises: so many further tokens of a sequence cannot fail, whatever happens in between; and
// pages that are not the pool's.
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_dual.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <random>

using namespace kvpolicy;

namespace {

using Evicting = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SnapKVEviction>;
constexpr CacheShape shape{
    .max_sequences = 3, .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 16};

Evicting evicting(float share) {
    return Evicting{Sink<>{4}, Window<>{9}, ThresholdGate<at_least>{-100.0f},
                    SnapKVEviction{.average = 40, .share = share, .observing = 8}};
}

/// A token of one sequence, which must find its pages, and an eviction; returns its rounds.
std::int32_t token(const host& ctx, test::BoundDual<Evicting, float>& bound, std::int32_t seq,
                   std::mt19937& generator) {
    test::Tensor<float> q(1, 1, 1, 8), k(1, 1, 1, 8), v(1, 1, 1, 8), out(1, 1, 1, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    const test::Plane<float> scores(1, 1, 1, 0.0f);
    const Batch batch{.count = 1, .seq_ids = &seq};
    test::call_ref<Evicting, float>(ctx, bound.cache.layer(0), batch, q.view(), k.view(), v.view(),
                                    out.view(), {.scores = scores.view()}, true);
    bound.cache.advance(ctx, batch);
    test::Workspace workspace(bound.cache.evict_workspace_bytes(ctx));
    EvictionReport report;
    bound.cache.evict(ctx, batch, workspace, {.reports = &report});
    return report.rounds;
}

/// Gives a sequence all pages that are free.
void drain(const host& ctx, test::BoundDual<Evicting, float>& bound, std::int32_t seq,
           std::int32_t& appended) {
    while (bound.cache.free_pages() != 0) {
        appended += 16;
        REQUIRE(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = appended}) == 0);
    }
}

}  // namespace

TEST_CASE("a reservation holds across evictions") {
    const host ctx(1);
    for (const float share : {0.05f, 0.3f, 0.7f}) {
        CAPTURE(share);
        test::BoundDual<Evicting, float> bound(
            ctx, shape, {.slab_pages = 12, .max_slabs = 1, .max_seq_len = 2000}, evicting(share));
        bound.add_slab(ctx);
        std::mt19937 generator(3);
        std::int32_t rounds = 0;
        for (std::int32_t round = 0; round < 20; ++round) {
            const std::int32_t seq = 0, ahead = 11 + round;
            REQUIRE(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = ahead}) == 0);
            std::int32_t appended = 0;
            drain(ctx, bound, 1, appended);
            for (std::int32_t t = 0; t < ahead; ++t) {
                rounds += token(ctx, bound, seq, generator);  // would be refused without a page
                drain(ctx, bound, 1, appended);
            }
            bound.cache.clear(ctx, 1);
        }
        CHECK(rounds > 10);
        bound.cache.clear(ctx, 0);
        CHECK(bound.cache.free_pages() == bound.cache.attached_pages());
    }
}

TEST_CASE("what is no longer reserved goes back with an eviction; copies have no reservation") {
    const host ctx(1);
    test::BoundDual<Evicting, float> bound(
        ctx, shape, {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 2000}, evicting(0.2f));
    bound.add_slab(ctx);
    std::mt19937 generator(3);
    const std::int32_t seq = 0;
    REQUIRE(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 60}) == 0);
    std::int32_t t = 0;
    for (; t < 60; ++t) {
        token(ctx, bound, seq, generator);
    }
    while (token(ctx, bound, seq, generator) == 0) {
    }
    const auto ref = bound.cache.layer(0);
    const auto pages = [&](std::int32_t of) { return (ref.used(of, 0) + 15) / 16; };
    CHECK(ref.held[0] == pages(0));
    REQUIRE(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 200}) == 0);
    const std::int32_t held = ref.held[0];
    bound.cache.fork(ctx, 0, 1);
    CHECK(ref.held[1] == pages(1));
    while (token(ctx, bound, 1, generator) == 0) {
    }
    CHECK(ref.held[1] == pages(1));
    // The reservation goes with the rows.
    const std::int32_t sources[] = {1, 2, 0};
    bound.cache.reorder(ctx, sources, 3);
    CHECK(ref.held[2] == held);
    for (t = 0; t < 100; ++t) {
        token(ctx, bound, 2, generator);
    }
    CHECK(ref.held[2] >= (ref.used(2, 0) + 100 + 15) / 16);
    while (token(ctx, bound, 0, generator) == 0) {
    }
    CHECK(ref.held[0] == pages(0));
}

TEST_CASE("in the middle of a token a reservation is for those after it") {
    const host ctx(1);
    using P = Policy<Sink<1>, Window<4>, ThresholdGate<at_least>>;
    CacheShape two = shape;
    two.layers = 2;
    two.page_size = 1;  // every token shows
    for (const std::int32_t ahead : {1, 3}) {
        // No page more than what is reserved.
        test::BoundDual<P, float> bound(ctx, two,
                                        {.slab_pages = 2 * (13 + ahead), .max_slabs = 1, .max_seq_len = 100},
                                        P{{}, {}, ThresholdGate<at_least>{-100.0f}});
        bound.add_slab(ctx);
        std::mt19937 generator(3);
        const std::int32_t seq = 0;
        const Batch one{.count = 1, .seq_ids = &seq};
        const test::Plane<float> scores(1, 1, 1, 0.0f);
        const auto take = [&](std::int32_t layer) {
            test::Tensor<float> q(1, 1, 1, 8), k(1, 1, 1, 8), v(1, 1, 1, 8), out(1, 1, 1, 8);
            q.fill_normal(generator);
            k.fill_normal(generator);
            v.fill_normal(generator);
            test::call_ref<P, float>(ctx, bound.cache.layer(layer), one, q.view(), k.view(), v.view(),
                                     out.view(), {.scores = scores.view()}, true);
        };
        const auto token = [&] {
            take(0);
            take(1);
            bound.cache.advance(ctx, one);
        };
        for (std::int32_t t = 0; t < 12; ++t) {
            token();
        }
        take(1);  // layers in any order
        REQUIRE(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = ahead}) == 0);
        CHECK(bound.cache.layer(0).held[0] == 13 + ahead);
        CHECK(bound.cache.layer(1).held[0] == 13 + ahead);
        take(0);
        bound.cache.advance(ctx, one);
        for (std::int32_t t = 0; t < ahead; ++t) {
            token();
        }
        CHECK(bound.cache.free_pages() == 0);
        CHECK(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 87 - ahead}) > 0);
        CHECK_REFUSED(
            static_cast<void>(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 88 - ahead})),
            "length of sequence 0 after the call: 101 is not allowed");
    }
}

TEST_CASE("a token that any layer has taken counts against the longest sequence in all of them") {
    const host ctx(1);
    using P = Policy<Sink<1>, Window<4>, TopKBudget<>>;
    CacheShape two = shape;
    two.layers = 2;
    constexpr std::int32_t budgets[] = {unlimited,
                                        6};  // so that only layer 0 is bounded by the longest sequence
    test::BoundDual<P, float> bound(ctx, two, {.slab_pages = 60, .max_slabs = 1, .max_seq_len = 30},
                                    P{{}, {}, TopKBudget<>{per_head(budgets, 2, 1)}});
    bound.add_slab(ctx);
    const std::int32_t seq = 0;
    const Batch one{.count = 1, .seq_ids = &seq};
    const test::Plane<float> scores(1, 1, 1, 0.0f);
    const test::Tensor<float> in(1, 1, 1, 8);
    test::Tensor<float> out(1, 1, 1, 8);
    test::call_ref<P, float>(ctx, bound.cache.layer(1), one, in.view(), in.view(), in.view(), out.view(),
                             {.scores = scores.view()}, true);
    const auto before = bound.everything();
    CHECK_REFUSED(static_cast<void>(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 30})),
                  "length of sequence 0 after the call: 31 is not allowed; it must be at most the cache's "
                  "max_seq_len, 30");
    CHECK(bound.everything() == before);
    CHECK(bound.cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 29}) == 0);
}

TEST_CASE("an eviction is between two tokens") {
    const host ctx(1);
    test::BoundDual<Evicting, float> bound(
        ctx, shape, {.slab_pages = 12, .max_slabs = 1, .max_seq_len = 2000}, evicting(0.3f));
    bound.add_slab(ctx);
    std::mt19937 generator(3);
    for (std::int32_t t = 0; t < 30; ++t) {
        token(ctx, bound, 0, generator);
    }
    test::Tensor<float> q(1, 1, 1, 8), k(1, 1, 1, 8), v(1, 1, 1, 8), out(1, 1, 1, 8);
    const test::Plane<float> scores(1, 1, 1, 0.0f);
    const std::int32_t seq = 0, none = 0;
    const Batch one{.count = 1, .seq_ids = &seq};
    test::call_ref<Evicting, float>(ctx, bound.cache.layer(0), one, q.view(), k.view(), v.view(), out.view(),
                                    {.scores = scores.view()}, true);
    test::Workspace workspace(bound.cache.evict_workspace_bytes(ctx));
    const std::vector<unsigned char> before = bound.everything();
    CHECK_REFUSED(
        bound.cache.evict(ctx, one, workspace),
        "sequence of entry 0: 0 is not allowed; it must be a sequence between two tokens: layer 0 has taken "
        "some that advance() has not counted");
    std::uint32_t status = 0;
    bound.cache.evict(ctx, one, workspace, {.status = &status});
    CHECK(status == status_layer_skipped);
    CHECK(bound.everything() == before);
    bound.cache.evict(ctx, {.count = 1, .seq_ids = &seq, .q_len = &none}, workspace);  // which names nobody
    bound.cache.advance(ctx, one);
    bound.cache.evict(ctx, one, workspace);
}

TEST_CASE("spared pages are never handed out, nor written") {
    const host ctx(1);
    using P = Policy<Window<4>, ThresholdGate<at_least>>;
    const P policy{{}, ThresholdGate<at_least>{-1.0f}};
    test::BoundDual<P, float> bound(
        ctx, shape, {.slab_pages = 6, .max_slabs = 2, .max_seq_len = 2000, .spared_pages = 2}, policy);
    const std::int32_t seq = 0;
    const Batch ahead{.count = 1, .seq_ids = &seq, .length = 16 * 5};
    CHECK(bound.cache.attached_pages() == 0);
    CHECK(bound.cache.reserve(ctx, ahead) == 2);  // 5 pages and the two of the first slab
    bound.add_slab(ctx);
    CHECK(bound.cache.attached_pages() == 4);
    CHECK(bound.cache.free_pages() == 4);
    CHECK(bound.cache.reserve(ctx, ahead) == 1);
    bound.add_slab(ctx);
    CHECK(bound.cache.free_pages() == 10);
    CHECK(bound.cache.reserve(ctx, ahead) == 0);
    const auto ref = bound.cache.layer(0);
    for (std::int32_t page = 0; page < ref.held[0]; ++page) {
        CHECK(ref.pages(0, 0)[page] >= 2);
    }
    const PoolShape wrong{.slab_pages = 6, .max_slabs = 2, .max_seq_len = 2000, .spared_pages = 6};
    CHECK_REFUSED((DualCache<P, float>(shape, wrong, policy)),
                  "spared_pages: 6 is not allowed; it must be 0 to 5, less than a slab");
}

namespace {

/// FlashInfer's pages [P, 2, page_size, H, D] (NHD) or [P, 2, H, page_size, D] (HND).
struct EnginePages {
    static constexpr std::int32_t pages = 60, heads = 2, rows = 16, dim = 8;
    bool nhd;
    std::vector<float> numbers = std::vector<float>(std::size_t{pages} * 2 * rows * heads * dim, -7.0f);

    [[nodiscard]] PageStrides strides() const {
        constexpr std::int64_t page = 2 * rows * heads * dim;
        const std::int32_t row = nhd ? heads * dim : dim;
        return {page, page, row, row};
    }
    [[nodiscard]] float* keys(std::int32_t h) { return numbers.data() + h * (nhd ? dim : rows * dim); }
    [[nodiscard]] float* values(std::int32_t h) { return keys(h) + rows * heads * dim; }
    [[nodiscard]] const float* row(std::int32_t page, bool value, std::int32_t r, std::int32_t h) const {
        const std::int32_t plane = (page * 2 + (value ? 1 : 0)) * rows * heads;
        return numbers.data() + (plane + (nhd ? r * heads + h : h * rows + r)) * dim;
    }
};

}  // namespace

TEST_CASE("pages that an engine keeps to itself: of every slab, also where its rows follow one another") {
    const host ctx(1);
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
    const P policy{{}, {}, ThresholdGate<at_least>{0.0f}};
    const CacheShape one{.layers = 2,
                         .max_sequences = 2,
                         .query_heads = 2,
                         .kv_heads = 1,
                         .head_dim_qk = 8,
                         .head_dim_vo = 8,
                         .page_size = 16};
    DualCache<P, float> cache(one,
                              {.slab_pages = 8,
                               .max_slabs = 2,
                               .max_seq_len = 100,
                               .spared_pages = 1,
                               .strides = {.k_page = 128, .v_page = 128, .k_row = 8, .v_row = 8}},
                              policy);
    std::vector<unsigned char> memory(cache.bytes().total(), test::poison_byte), notes[2];
    std::vector<float> keys[2], values[2];  // of each layer
    cache.bind(ctx, memory.data(), memory.size());
    for (int layer = 0; layer < 2; ++layer) {
        notes[layer].assign(cache.notes_bytes(), test::poison_byte);
        keys[layer].assign(8 * 128, -7.0f);
        values[layer].assign(8 * 128, -7.0f);
        cache.add_pages(ctx, keys[layer].data(), values[layer].data(), notes[layer].data(),
                        notes[layer].size());
        CHECK(cache.attached_pages() == 7 * (layer + 1));
        CHECK(cache.free_pages() == cache.attached_pages());
    }
    // 12 of the 14 pages come into use, of both slabs.
    constexpr std::int32_t tokens = 48;
    test::Tensor<float> q(2, 2, tokens, 8), k(2, 1, tokens, 8), v(2, 1, tokens, 8), out(2, 2, tokens, 8);
    test::Plane<float> scores(2, 1, tokens);
    std::fill(scores.data.begin(), scores.data.end(), 1.0f);
    const Batch batch{.count = 2, .length = tokens};
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        test::call_ref<P, float>(ctx, cache.layer(layer), batch, q.view(), k.view(), v.view(), out.view(),
                                 {.scores = scores.view()}, false);
    }
    cache.advance(ctx, batch);
    CHECK(cache.free_pages() == 2);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        const auto ref = cache.layer(layer);
        for (std::int32_t seq = 0; seq < 2; ++seq) {
            REQUIRE(ref.used(seq, 0) == tokens);
            for (std::int32_t page = 0; page < tokens / 16; ++page) {
                CHECK(ref.pages(seq, 0)[page] % 8 != 0);
            }
        }
        const auto kept = [](const std::vector<float>& slab) {
            return std::all_of(slab.begin(), slab.begin() + 128, [](float x) { return x == -7.0f; });
        };
        CHECK(kept(keys[layer]));
        CHECK(kept(values[layer]));
    }
}

TEST_CASE("an engine's pool: FlashInfer's pages, NHD and HND, with a page that is left alone") {
    const host ctx(1);
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
    const P policy{{}, {}, ThresholdGate<at_least>{0.0f}};
    const CacheShape two{.max_sequences = 3,
                         .query_heads = 4,
                         .kv_heads = 2,
                         .head_dim_qk = 8,
                         .head_dim_vo = 8,
                         .page_size = 16,
                         .max_draft_tokens = 3};
    for (const bool nhd : {true, false}) {
        CAPTURE(nhd);
        EnginePages engine{nhd};
        test::BoundDual<P, float> own(ctx, two, {.slab_pages = 60, .max_slabs = 2, .max_seq_len = 400},
                                      policy);
        own.add_slab(ctx);
        own.add_slab(ctx);
        DualCache<P, float> theirs(two,
                                   {.slab_pages = 60,
                                    .max_slabs = 2,
                                    .max_seq_len = 400,
                                    .spared_pages = 1,
                                    .strides = engine.strides()},
                                   policy);
        std::vector<unsigned char> memory(theirs.bytes().total(), test::poison_byte), notes[2];
        theirs.bind(ctx, memory.data(), memory.size());
        const std::int32_t ahead[] = {320, 320, 320};  // 120 pages, of slabs that have 59 for them
        CHECK(theirs.reserve(ctx, {.count = 3, .q_len = ahead}) == 3);
        const std::int32_t less[] = {320, 320, 304};
        CHECK(theirs.reserve(ctx, {.count = 3, .q_len = less}) == 2);
        for (std::int32_t h = 0; h < 2; ++h) {
            notes[h].assign(theirs.notes_bytes(), test::poison_byte);
            theirs.add_pages(ctx, engine.keys(h), engine.values(h), notes[h].data(), notes[h].size());
            CHECK(theirs.attached_pages() == 59 * (h + 1));
            CHECK(theirs.free_pages() == theirs.attached_pages());
        }
        std::mt19937 generator(5);
        for (std::int32_t turn = 0; turn < 40; ++turn) {
            const std::int32_t n = turn % 3 == 0 ? 9 : 1;
            test::Tensor<float> q(3, 4, n, 8), k(3, 2, n, 8), v(3, 2, n, 8), a(3, 4, n, 8), b(3, 4, n, 8);
            q.fill_normal(generator);
            k.fill_normal(generator);
            v.fill_normal(generator);
            test::Plane<float> scores(3, 2, n);
            test::fill_scores(scores, test::Scores::random, generator);
            const std::int32_t q_len[] = {n, turn % 2, n};
            const Batch batch{.count = 3, .q_len = q_len, .length = n};
            test::call_ref<P, float>(ctx, own.cache.layer(0), batch, q.view(), k.view(), v.view(), a.view(),
                                     {.scores = scores.view()}, n == 1);
            test::call_ref<P, float>(ctx, theirs.layer(0), batch, q.view(), k.view(), v.view(), b.view(),
                                     {.scores = scores.view()}, n == 1);
            own.cache.advance(ctx, batch);
            theirs.advance(ctx, batch);
            bool near = true;
            for (std::size_t i = 0; i < a.data.size(); ++i) {
                near = near && (i / static_cast<std::size_t>(4 * n * 8) == 1 ||
                                std::abs(a.data[i] - b.data[i]) < 1e-5f);
            }
            CHECK(near);
            if (turn % 10 == 9) {
                own.cache.fork(ctx, 0, 1);
                theirs.fork(ctx, 0, 1);
            }
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                const bool same =
                    test::content_of(own.cache.layer(0), seq) == test::content_of(theirs.layer(0), seq);
                CHECK(same);
            }
        }
        // Rows are where the engine's own kernels look for them, and page 0 is as it was.
        const auto ref = theirs.layer(0);
        for (std::int32_t h = 0; h < 2; ++h) {
            const auto rows = ref.head_rows(0, h);
            for (std::int32_t r = 0; r < ref.used(0, h); ++r) {
                const std::int32_t id = ref.pages(0, h)[r / 16];
                CHECK(id % 60 != 0);
                CHECK(rows.k(r) == engine.row(id % 60, false, r % 16, id / 60));
                CHECK(rows.v(r) == engine.row(id % 60, true, r % 16, id / 60));
            }
            for (std::int32_t r = 0; r < 16; ++r) {
                CHECK(engine.row(0, false, r, h)[3] == -7.0f);
                CHECK(engine.row(0, true, r, h)[3] == -7.0f);
            }
        }
        CHECK_REFUSED(own.cache.add_pages(ctx, nullptr, engine.values(0), notes[0].data(), notes[0].size()),
                      "k: null");
        CHECK_REFUSED(
            theirs.add_slab(ctx, notes[0].data(), notes[0].size()),
            "slab: memory without strides is not allowed; it must be pages by add_pages(), since the pool's "
            "strides are an engine's");
        const PoolShape some{
            .slab_pages = 60, .max_slabs = 2, .max_seq_len = 400, .strides = {256, 256, 4, 8}};
        CHECK_REFUSED((DualCache<P, float>(two, some, policy)), "strides.k_row: 4");
    }
}
