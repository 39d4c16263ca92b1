// Sequences as a whole, in both kinds of caches: fork, reorder, snapshot and restore.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_dual.hpp"
#include "support/loops.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <utility>

using namespace kvpolicy;

namespace {

constexpr std::int32_t max_sequences = 5, one = 1;
constexpr CacheShape shape{.layers = 2,
                           .max_sequences = max_sequences,
                           .query_heads = 2,
                           .kv_heads = 2,
                           .head_dim_qk = 8,
                           .head_dim_vo = 16,
                           .page_size = 3,
                           .max_draft_tokens = 2};
constexpr PoolShape pool{.slab_pages = 4, .max_slabs = 900, .max_seq_len = 300};

template <class P, bool Pooled>
struct Bound : std::conditional_t<Pooled, test::BoundDual<P, float>, test::BoundCache<P, float>> {
    explicit Bound(const host& ctx, const P& policy, const CacheShape& size = shape) requires Pooled
        : test::BoundDual<P, float>(ctx, size, pool, policy) {}
    explicit Bound(const host& ctx, const P& policy, const CacheShape& size = shape) requires(!Pooled)
        : test::BoundCache<P, float>(ctx, size, policy) {}
    void scratch(const host& ctx, const Batch& batch) {
        if constexpr (Pooled) {
            this->reserve(ctx, batch);
        }
    }
    /// All layers of a sequence.
    std::vector<unsigned char> content(std::int32_t seq) const {
        std::vector<unsigned char> bytes = test::content_of(this->cache.layer(0), seq);
        const std::vector<unsigned char> more = test::content_of(this->cache.layer(1), seq);
        bytes.insert(bytes.end(), more.begin(), more.end());
        return bytes;
    }
    /// Gives one layer n tokens of a sequence, drawn from `seed`; returns the outputs. Does not advance.
    std::vector<float> take(const host& ctx, std::int32_t layer, std::int32_t seq, std::int32_t n,
                            std::uint32_t seed) {
        std::mt19937 generator(2 * seed + static_cast<std::uint32_t>(layer));
        test::Tensor<float> q(1, 2, n, 8), k(1, 2, n, 8), v(1, 2, n, 16), out(1, 2, n, 16);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Plane<float> scores(1, 2, n);
        test::fill_scores(scores, test::Scores::random, generator);
        test::call_ref<P, float>(ctx, this->cache.layer(layer), {.count = 1, .seq_ids = &seq, .length = n},
                                 q.view(), k.view(), v.view(), out.view(), {.scores = scores.view()}, n == 1);
        return out.data;
    }
    /// Feeds n tokens drawn from `seed` to one sequence, in all layers; returns the outputs.
    std::vector<float> feed(const host& ctx, std::int32_t seq, std::int32_t n, std::uint32_t seed) {
        const Batch batch{.count = 1, .seq_ids = &seq, .length = n};
        scratch(ctx, batch);
        std::vector<float> all = take(ctx, 0, seq, n, seed);
        const std::vector<float> more = take(ctx, 1, seq, n, seed);
        all.insert(all.end(), more.begin(), more.end());
        this->cache.advance(ctx, batch);
        return all;
    }
    /// The rows of all heads of a layer of a sequence, as export_heads names them.
    std::vector<position_t> exported(const host& ctx, std::int32_t layer, std::int32_t seq) const {
        const auto ref = this->cache.layer(layer);
        std::int32_t indptr[3], last[2], indices[400];
        export_heads(ctx, ref, {.count = 1, .seq_ids = &seq}, {indptr, indices, last, 400});
        std::vector<position_t> rows;
        for (std::int32_t h = 0; h < 2; ++h) {
            const std::int32_t pages = indptr[h + 1] - indptr[h];
            const std::int32_t used = pages == 0 ? 0 : (pages - 1) * ref.page_size + last[h];
            rows.push_back(used);
            for (std::int32_t r = 0; r < used; ++r) {
                rows.push_back(ref.head_rows(seq, h).position(r));
                CHECK(indices[indptr[h] + r / ref.page_size] == ref.page_id(seq, h, r / ref.page_size));
            }
        }
        return rows;
    }
    std::vector<unsigned char> saved(const host& ctx, std::int32_t seq) const {
        std::vector<unsigned char> blob(this->cache.snapshot_bytes(seq));
        CHECK(this->cache.snapshot(ctx, seq, blob.data(), blob.size()) == blob.size());
        return blob;
    }
};

struct RunningSum {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    std::size_t state_size() const { return 1; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { *state = 0.0f; }
    void absorb(std::int32_t, float* state, const float* key, const float*, float*) const {
        *state += key[0];
    }
    float read(std::int32_t, const float* state, const float* key, const float*, float*) const {
        return *state - key[1];
    }
};
struct EveryFifth {
    static constexpr part_kind kind = part_kind::keep;
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return t % 5 == 0; }
};

using Capped = Policy<Sink<1>, Window<4>, ThresholdGate<above>, TopKBudget<5>, Decay<1>>;
using Stateful = Policy<Sink<2>, Window<3>, TopKBudget<4>, RunningSum>;
using Gated = Policy<Sink<2>, Window<4>, ThresholdGate<at_least>>;
using Kept = Policy<Sink<1>, Window<4>, TopKBudget<3>, EveryFifth>;
using Shared = Policy<Sink<1>, Window<4>, SharedBudget<7>, RunningSum>;

Capped capped(float slope = -0.1f) {
    return Capped{{}, {}, ThresholdGate<above>{-0.5f}, {}, Decay<1>{slope}};
}

template <bool Pooled, class P>
void check_forks(const P& policy, std::uint32_t seed) {
    const host ctx(1);
    Bound<P, Pooled> beams(ctx, policy), alone(ctx, policy);
    std::mt19937 generator(seed);
    bool same = true;
    // Sequence i of `alone` is told everything that beam i has ever seen.
    std::vector<std::vector<std::pair<std::int32_t, std::uint32_t>>> told(max_sequences);
    for (int round = 0; round < 40; ++round) {
        const auto seq = static_cast<std::int32_t>(generator() % max_sequences);
        if (generator() % 3 == 0) {
            const auto to = static_cast<std::int32_t>(generator() % max_sequences);
            if constexpr (Pooled) {
                std::uint32_t status = 0;
                beams.cache.fork(ctx, seq, to, {.status = &status});
                while (status != 0) {
                    beams.add_slab(ctx);
                    status = 0;
                    beams.cache.fork(ctx, seq, to, {.status = &status});
                }
            } else {
                beams.cache.fork(ctx, seq, to);
            }
            told[static_cast<std::size_t>(to)] = told[static_cast<std::size_t>(seq)];
        } else {
            const auto n = static_cast<std::int32_t>(1 + generator() % 9);
            const auto draw = static_cast<std::uint32_t>(generator());
            beams.feed(ctx, seq, n, draw);
            told[static_cast<std::size_t>(seq)].emplace_back(n, draw);
        }
    }
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        for (const auto& [n, draw] : told[static_cast<std::size_t>(seq)]) {
            alone.feed(ctx, seq, n, draw);
        }
        same = same && beams.content(seq) == alone.content(seq) &&
               beams.feed(ctx, seq, 1, 7) == alone.feed(ctx, seq, 1, 7);
    }
    CHECK(same);
    if constexpr (Pooled) {
        CHECK(beams.cache.attached_pages() - beams.cache.free_pages() <
              alone.cache.attached_pages() - alone.cache.free_pages() + 40);
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            beams.cache.clear(ctx, seq);
        }
        CHECK(beams.cache.free_pages() == beams.cache.attached_pages());
    }
}

template <bool Pooled, class P>
void check_reorders(const P& policy, std::uint32_t seed) {
    const host ctx(1);
    Bound<P, Pooled> beams(ctx, policy);
    std::mt19937 generator(seed);
    bool same = true, same_lengths = true;
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        beams.feed(ctx, seq, 3 + 11 * seq, static_cast<std::uint32_t>(seq));
    }
    for (int round = 0; round < 60; ++round) {
        std::vector<std::vector<unsigned char>> before;
        std::vector<position_t> lengths;
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            before.push_back(beams.content(seq));
            lengths.push_back(beams.cache.length(seq));
        }
        std::int32_t sources[max_sequences];
        const auto count = static_cast<std::int32_t>(generator() % (max_sequences + 1));
        for (std::int32_t& source : sources) {
            source = static_cast<std::int32_t>(generator() % max_sequences);
        }
        if (round % 3 == 0) {  // a permutation
            for (std::int32_t i = 0; i < max_sequences; ++i) {
                sources[i] = i;
            }
            std::shuffle(sources, sources + count, generator);
        }
        std::uint32_t status = 0;
        beams.cache.reorder(ctx, sources, count, {.status = &status});
        while (status != 0) {
            for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
                same = same && beams.content(seq) == before[static_cast<std::size_t>(seq)];
            }
            if constexpr (Pooled) {
                beams.add_slab(ctx);
            }
            status = 0;
            beams.cache.reorder(ctx, sources, count, {.status = &status});
        }
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            const auto source = static_cast<std::size_t>(seq < count ? sources[seq] : seq);
            same = same && beams.content(seq) == before[source];
            same_lengths = same_lengths && beams.cache.length(seq) == lengths[source];
        }
        beams.feed(ctx, static_cast<std::int32_t>(generator() % max_sequences), 2,
                   static_cast<std::uint32_t>(round));
        if (round % 10 == 9) {  // variety is lost by copying
            for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
                beams.cache.clear(ctx, seq);
                beams.feed(ctx, seq, 1 + 13 * seq, static_cast<std::uint32_t>(round + seq));
            }
        }
    }
    CHECK(same);
    CHECK(same_lengths);
    if constexpr (Pooled) {
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            beams.cache.clear(ctx, seq);
        }
        CHECK(beams.cache.free_pages() == beams.cache.attached_pages());
    }
}

template <bool From, bool To, class P>
void check_snapshots(const P& policy) {
    const host ctx(1);
    CacheShape other = shape;
    other.max_sequences = 2;
    other.page_size = 7;
    Bound<P, From> source(ctx, policy);
    Bound<P, To> target(ctx, policy, other);
    for (const std::int32_t n : {0, 1, 4, 9, 40}) {
        source.cache.clear(ctx, 3);
        if (n > 0) {
            source.feed(ctx, 3, n, 5);
        }
        const std::vector<unsigned char> blob = source.saved(ctx, 3);
        target.feed(ctx, 1, 6, 9);  // something to be replaced
        std::uint32_t status = 0;
        target.cache.restore(ctx, 1, blob.data(), blob.size(), {.status = &status});
        while (status != 0) {
            if constexpr (To) {
                target.add_slab(ctx);
            }
            status = 0;
            target.cache.restore(ctx, 1, blob.data(), blob.size(), {.status = &status});
        }
        CHECK(target.cache.length(1) == n);
        CHECK(target.content(1) == source.content(3));
        CHECK(target.saved(ctx, 1) == blob);
        for (const std::int32_t more : {1, 1, 8}) {
            CHECK(target.feed(ctx, 1, more, 77) == source.feed(ctx, 3, more, 77));
            CHECK(target.content(1) == source.content(3));
        }
    }
}

}  // namespace

TEST_CASE("a fork goes on by itself") {
    for (const std::uint32_t seed : {1u, 2u, 3u}) {
        check_forks<false>(capped(), seed);
        check_forks<true>(capped(), seed);
        check_forks<true>(Gated{}, seed);
        check_forks<false>(Stateful{}, seed);
        check_forks<true>(Stateful{}, seed);
        check_forks<true>(Kept{}, seed);
        check_forks<true>(Shared{}, seed);
    }
}

TEST_CASE("a fork of a gated cache shares full pages, and pages are free when the last lets go") {
    const host ctx(1);
    Bound<Gated, true> beams(ctx, Gated{});
    beams.feed(ctx, 0, 200, 1);
    const std::int64_t one = beams.cache.attached_pages() - beams.cache.free_pages();
    for (int i = 0; i < 20; ++i) {
        beams.add_slab(ctx);
    }
    const std::int64_t before = beams.cache.free_pages();
    beams.cache.fork(ctx, 0, 1);
    const std::int64_t appended = before - beams.cache.free_pages();
    CHECK(appended <=
          4 * 4);  // 4 heads: the two pages of sinks and ring, one that holds both kinds, one that is partial
    CHECK(one > 4 * appended);
    const std::vector<unsigned char> content = beams.content(1);
    beams.cache.clear(ctx, 0);
    CHECK(beams.content(1) == content);
    beams.feed(ctx, 2, 60, 2);
    CHECK(beams.content(1) == content);
    beams.cache.fork(ctx, 1, 1);
    CHECK(beams.content(1) == content);
}

TEST_CASE("reorder is a gather of all sequences at once") {
    for (std::uint32_t seed = 1; seed <= std::uint32_t{test::rounds(2, 1)}; ++seed) {
        check_reorders<false>(capped(), seed);
        check_reorders<true>(capped(), seed);
        check_reorders<true>(Gated{}, seed);
        check_reorders<false>(Stateful{}, seed);
        check_reorders<true>(Kept{}, seed);
        check_reorders<true>(Shared{}, seed);
    }
}

/// Between a layer's call and advance() a sequence is copied, exchanged, exported and attended to with the
/// rows that the layer has taken, in both kinds of caches; what was copied goes on with the other layer.
template <bool Pooled, class P>
void check_middle_of_a_token(const P& policy) {
    const host ctx(1);
    constexpr std::int32_t before = 20;  // sinks and rings are full from 6 on
    for (std::int32_t n = 0; n <= before; n += n < 8 ? 1 : test::rounds(1, 6)) {
        for (const std::int32_t tokens : {1, 4}) {
            CAPTURE(n);
            CAPTURE(tokens);
            Bound<P, Pooled> beams(ctx, policy), alone(ctx, policy);
            const auto seed = static_cast<std::uint32_t>(100 + n);
            if (n != 0) {
                beams.feed(ctx, 0, n, 1);
                alone.feed(ctx, 0, n, 1);
            }
            beams.feed(ctx, 1, 2, 9);  // dropped by the fork
            beams.feed(ctx, 2, 30, 3);
            const std::vector<unsigned char> other = beams.content(2);
            const std::int32_t seq = 0, named[] = {1, 2, 3};
            const Batch one{.count = 1, .seq_ids = &seq, .length = tokens},
                three{.count = 3, .seq_ids = named, .length = tokens};
            if constexpr (Pooled) {
                while (beams.cache.free_pages() < 400) {
                    beams.add_slab(ctx);
                }
                while (alone.cache.free_pages() < 200) {
                    alone.add_slab(ctx);
                }
            }
            const std::vector<float> out = beams.take(ctx, 0, 0, tokens, seed);
            CHECK(out == alone.take(ctx, 0, 0, tokens, seed));
            const std::vector<position_t> appended = beams.exported(ctx, 0, 0);
            if (tokens == 1) {  // the same query over the same rows
                std::mt19937 generator(2 * seed);
                test::Tensor<float> q(1, 2, 1, 8), again(1, 2, 1, 16);
                q.fill_normal(generator);
                test::Workspace workspace(
                    workspace_bytes(ctx, beams.cache.layer(0), {.batch = 1, .tokens = 1}));
                attend(ctx, beams.cache.layer(0), {.q = q.view(), .out = again.view(), .batch = one},
                       workspace);
                CHECK(again.data == out);
            }
            beams.cache.fork(ctx, 0, 1);
            const std::int32_t sources[] = {2, 1, 0, 1};  // an exchange, one that stays, and a copy
            beams.cache.reorder(ctx, sources, 4);
            CHECK(beams.content(0) == other);
            const std::vector<unsigned char> middle = alone.content(0);
            const std::vector<float> rest = alone.take(ctx, 1, 0, tokens, seed);
            for (const std::int32_t beam : named) {
                CHECK(beams.content(beam) == middle);
                CHECK(beams.exported(ctx, 0, beam) == appended);
                CHECK(beams.take(ctx, 1, beam, tokens, seed) == rest);
            }
            beams.cache.advance(ctx, three);
            alone.cache.advance(ctx, one);
            CHECK(alone.exported(ctx, 0, 0) == appended);
            for (const std::int32_t beam : named) {
                CHECK(beams.content(beam) == alone.content(0));
            }
            for (const std::int32_t more : {1, 1, 3}) {
                const std::vector<float> wanted = alone.feed(ctx, 0, more, seed + 1);
                for (const std::int32_t beam : named) {
                    CHECK(beams.feed(ctx, beam, more, seed + 1) == wanted);
                    CHECK(beams.content(beam) == alone.content(0));
                }
            }
            if constexpr (Pooled) {
                for (std::int32_t each = 0; each < max_sequences; ++each) {
                    beams.cache.clear(ctx, each);
                }
                CHECK(beams.cache.free_pages() == beams.cache.attached_pages());
            }
        }
    }
}

TEST_CASE("in the middle of a token a layer's rows are those that it has taken") {
    check_middle_of_a_token<false>(capped());
    check_middle_of_a_token<true>(capped());
    check_middle_of_a_token<true>(Gated{});
    check_middle_of_a_token<false>(Stateful{});
    check_middle_of_a_token<true>(Stateful{});
    check_middle_of_a_token<true>(Kept{});
    check_middle_of_a_token<true>(Shared{});
}

TEST_CASE("a snapshot is of a whole token, or refused") {
    const host ctx(1);
    const auto check = [&](auto& bound) {
        bound.feed(ctx, 0, 20, 1);
        const std::vector<unsigned char> good = bound.saved(ctx, 0);
        if constexpr (requires { bound.cache.free_pages(); }) {
            while (bound.cache.free_pages() < 40) {
                bound.add_slab(ctx);
            }
        }
        bound.take(ctx, 1, 0, 1, 7);
        std::vector<unsigned char> blob(2 * good.size());
        const std::string sentence =
            "seq: 0 is not allowed; it must be a sequence between two tokens: layer 1 has taken some that "
            "advance() has not counted";
        CHECK_REFUSED(bound.cache.snapshot_bytes(0), sentence);
        CHECK_REFUSED(bound.cache.snapshot(ctx, 0, blob.data(), blob.size()), sentence);
        bound.take(ctx, 0, 0, 1, 7);
        bound.cache.advance(ctx, {.count = 1});
        const std::vector<unsigned char> later = bound.saved(ctx, 0);
        bound.cache.restore(ctx, 1, later.data(), later.size());
        CHECK(bound.content(1) == bound.content(0));
    };
    Bound<Capped, false> fixed(ctx, capped());
    check(fixed);
    Bound<Gated, true> dual(ctx, Gated{});
    check(dual);
}

TEST_CASE("a snapshot brings back scores that are no numbers, which a device stores") {
    const host ctx(1);
    const auto check = [&](auto& bound) {
        bound.feed(ctx, 0, 20, 1);
        const auto rows = bound.cache.layer(1).head_rows(0, 0);
        rows.score(0) = rows.score(5) = std::numeric_limits<float>::quiet_NaN();
        const std::vector<unsigned char> blob = bound.saved(ctx, 0);
        bound.scratch(ctx, {.count = 1, .seq_ids = &one, .length = 20});
        bound.cache.restore(ctx, 1, blob.data(), blob.size());
        CHECK(bound.content(1) == bound.content(0));
        bound.feed(ctx, 0, 30, 2);
        bound.feed(ctx, 1, 30, 2);
        CHECK(bound.content(1) == bound.content(0));
    };
    Bound<Capped, false> fixed(ctx, capped());
    check(fixed);
    Bound<Capped, true> dual(ctx, capped());
    check(dual);
}

TEST_CASE("a fork or reorder without pages changes nothing") {
    const host ctx(1);
    Bound<Gated, true> beams(ctx, Gated{});
    beams.feed(ctx, 0, 30, 1);
    beams.feed(ctx, 1, 3, 2);
    while (beams.cache.free_pages() > 0) {
        beams.feed(ctx, 2, 1, 3);
    }
    const std::vector<unsigned char> before = beams.everything();
    const std::int32_t sources[] = {0, 0};
    std::uint32_t status = 0;
    beams.cache.fork(ctx, 0, 1, {.status = &status});
    CHECK(status == status_pool_exhausted);
    status = 4;
    beams.cache.reorder(ctx, sources, 2, {.status = &status});
    CHECK(status == (status_pool_exhausted | 4u));
    CHECK_REFUSED(beams.cache.fork(ctx, 0, 1), "free pages of the pool: ");
    CHECK_REFUSED(beams.cache.reorder(ctx, sources, 2), "(add_slab adds more)");
    const std::vector<unsigned char> blob = beams.saved(ctx, 0);
    CHECK_REFUSED(beams.cache.restore(ctx, 1, blob.data(), blob.size()), "free pages of the pool: ");
    // What was freed and taken back for a moment lies above the stack's top, which means nothing.
    CHECK(beams.cache.free_pages() == 0);
    CHECK(beams.cache.length(1) == 3);
    const std::vector<unsigned char> content = beams.content(1);
    beams.feed(ctx, 2, 9, 4);
    CHECK(beams.content(1) == content);
    beams.cache.fork(ctx, 2, 1, {.status = &status});
    CHECK(before.size() < beams.everything().size());
}

TEST_CASE("snapshots go on where they were taken, in caches of either kind and of other sizes") {
    check_snapshots<false, false>(capped());
    check_snapshots<true, true>(capped());
    check_snapshots<false, true>(capped());
    check_snapshots<true, false>(capped());
    check_snapshots<true, true>(Gated{});
    check_snapshots<false, true>(Stateful{});
    check_snapshots<true, false>(Stateful{});
    check_snapshots<true, true>(Kept{});
    check_snapshots<true, true>(Shared{});
    check_snapshots<false, false>(Policy<Sink<1>, Window<3>>{});
}

TEST_CASE("what fork, reorder and snapshots refuse") {
    const host ctx(1);
    Bound<Capped, false> bound(ctx, capped());
    auto& cache = bound.cache;
    bound.feed(ctx, 0, 20, 1);
    bound.feed(ctx, 1, 20, 2);
    const std::vector<unsigned char> before = bound.memory;
    CHECK_REFUSED(cache.fork(ctx, 5, 0), "from: 5 is not allowed; it must be 0 to 4");
    CHECK_REFUSED(cache.fork(ctx, 0, -1), "to: -1 is not allowed; it must be 0 to 4");
    const std::int32_t sources[] = {0, 1, 5, 0, 0, 0};
    CHECK_REFUSED(cache.reorder(ctx, sources, 3), "sources[2]: 5 is not allowed; it must be 0 to 4");
    CHECK_REFUSED(cache.reorder(ctx, sources, 6),
                  "count: 6 is not allowed; it must be 0 to the cache's max_sequences, 5");
    CHECK_REFUSED(cache.reorder(ctx, sources, -1), "count: -1");
    CHECK_REFUSED(cache.reorder(ctx, nullptr, 1), "sources: null");
    cache.reorder(ctx, nullptr, 0);
    CHECK_REFUSED(cache.snapshot_bytes(5), "seq: 5");

    std::vector<unsigned char> blob = bound.saved(ctx, 0);
    CHECK_REFUSED(cache.snapshot(ctx, 0, nullptr, blob.size()), "buffer: null");
    CHECK_REFUSED(cache.snapshot(ctx, 0, blob.data(), blob.size() - 1), "buffer_bytes: ");
    CHECK_REFUSED(cache.restore(ctx, 1, nullptr, blob.size()), "blob: null");
    CHECK_REFUSED(cache.restore(ctx, 5, blob.data(), blob.size()), "seq: 5");
    CHECK_REFUSED(cache.restore(ctx, 1, blob.data(), 7), "blob_bytes: 7");
    // Every byte counts, and so does the length.
    std::size_t accepted = 0;
    for (std::size_t i = 0; i < blob.size(); ++i) {
        blob[i] ^= 0x10u;
        accepted +=
            test::refusal_of([&] { cache.restore(ctx, 1, blob.data(), blob.size()); }).empty() ? 1u : 0u;
        blob[i] ^= 0x10u;
    }
    for (std::size_t size = 0; size < blob.size(); ++size) {
        accepted += test::refusal_of([&] { cache.restore(ctx, 1, blob.data(), size); }).empty() ? 1u : 0u;
    }
    CHECK(accepted == 0);
    const std::vector<unsigned char> longer = [&] {
        std::vector<unsigned char> bytes = blob;
        bytes.push_back(0);
        return bytes;
    }();
    CHECK_REFUSED(cache.restore(ctx, 1, longer.data(), longer.size()), "blob_bytes: ");
    blob[0] = 'K';
    CHECK_REFUSED(cache.restore(ctx, 1, blob.data(), blob.size()),
                  "blob: another format is not allowed; it must be a snapshot of a kvpolicy cache");
    blob[0] = 'k';
    blob[8] = 9;
    CHECK_REFUSED(cache.restore(ctx, 1, blob.data(), blob.size()),
                  "version of the snapshot: 9 is not allowed; it must be 1");
    blob[8] = 1;
    blob[100] ^= 1u;
    CHECK_REFUSED(cache.restore(ctx, 1, blob.data(), blob.size()), "blob: damaged (its checksum differs)");
    blob[100] ^= 1u;
    CHECK(bound.memory == before);

    const std::string foreign =
        "snapshot: of another policy, shape or storage type is not allowed; it must be of a cache like this "
        "one";
    Bound<Capped, false> slope(ctx, capped(-0.2f));
    CHECK_REFUSED(slope.cache.restore(ctx, 1, blob.data(), blob.size()), foreign);
    using Other = Policy<Sink<1>, Window<4>, ThresholdGate<at_least>, TopKBudget<5>, Decay<1>>;
    Bound<Other, false> comparison(ctx, Other{{}, {}, ThresholdGate<at_least>{-0.5f}, {}, Decay<1>{-0.1f}});
    CHECK_REFUSED(comparison.cache.restore(ctx, 1, blob.data(), blob.size()), foreign);
    using Larger = Policy<Sink<1>, Window<4>, ThresholdGate<above>, TopKBudget<6>, Decay<1>>;
    Bound<Larger, false> larger(ctx, Larger{{}, {}, ThresholdGate<above>{-0.5f}, {}, Decay<1>{-0.1f}});
    CHECK_REFUSED(larger.cache.restore(ctx, 1, blob.data(), blob.size()), foreign);
    test::BoundCache<Capped, bf16> storage(ctx, shape, capped());
    CHECK_REFUSED(storage.cache.restore(ctx, 1, blob.data(), blob.size()), foreign);
    CacheShape heads = shape;
    heads.head_dim_vo = 8;
    Bound<Capped, false> narrow(ctx, capped(), heads);
    CHECK_REFUSED(narrow.cache.restore(ctx, 1, blob.data(), blob.size()), foreign);
    test::BoundDual<Gated, float> brief(ctx, shape, {.slab_pages = 50, .max_slabs = 1, .max_seq_len = 10},
                                        Gated{});
    Bound<Gated, true> gated(ctx, Gated{});
    gated.feed(ctx, 0, 20, 1);
    const std::vector<unsigned char> long_one = gated.saved(ctx, 0);
    CHECK_REFUSED(
        brief.cache.restore(ctx, 1, long_one.data(), long_one.size()),
        "length of the snapshot: 20 is not allowed; it must be at most the cache's max_seq_len, 10");
}

TEST_CASE("forged snapshots, checksum and all, never write where they must not") {
    const host ctx(1);
    const auto forge = [&](auto& bound, std::uint32_t seed) {
        std::mt19937 generator(seed);
        const std::vector<unsigned char> good = bound.saved(ctx, 0);
        std::size_t refused = 0;
        const int rounds = test::rounds(3000, 500);
        for (int round = 0; round < rounds; ++round) {
            std::vector<unsigned char> blob = good;
            const std::uint32_t changes = 1 + static_cast<std::uint32_t>(generator() % 3);
            for (std::uint32_t i = 0; i < changes; ++i) {
                const std::size_t at =
                    generator() % 2 == 0 ? 40 + generator() % 80 : generator() % blob.size();
                blob[at] = static_cast<unsigned char>(generator() % 3 == 0 ? 0xff : generator());
            }
            if (generator() % 4 == 0) {
                blob.resize(std::max<std::size_t>(48, blob.size() - generator() % 50));
            }
            host_backend::snapshot_header header;
            const host_backend::snapshot_header ours;
            std::memcpy(&header, blob.data(), sizeof header);
            header.version = ours.version;
            std::memcpy(header.magic, ours.magic, sizeof ours.magic);
            header.bytes = blob.size();
            header.fingerprint = bound.cache.fingerprint();
            header.checksum = host_backend::checksum_of(
                header, reinterpret_cast<const std::byte*>(blob.data()), blob.size());
            std::memcpy(blob.data(), &header, sizeof header);
            std::uint32_t status = 0;
            refused += test::refusal_of([&] {
                           bound.cache.restore(ctx, 1, blob.data(), blob.size(), {.status = &status});
                       }).empty()
                           ? 0u
                           : 1u;
            if (round % 10 == 0) {
                bound.feed(ctx, 1, 1, static_cast<std::uint32_t>(round));
            }
            if (round % 50 == 0) {
                bound.cache.clear(ctx, 1);
            }
        }
        CHECK(refused > static_cast<std::size_t>(rounds / 10));
        CHECK(bound.saved(ctx, 0) == good);
    };
    Bound<Capped, false> fixed(ctx, capped());
    fixed.feed(ctx, 0, 20, 1);
    forge(fixed, 1);
    Bound<Stateful, true> dual(ctx, Stateful{});
    dual.feed(ctx, 0, 20, 1);
    forge(dual, 2);
    Bound<Kept, true> kept(ctx, Kept{});
    kept.feed(ctx, 0, 40, 1);
    forge(kept, 3);
    Bound<Shared, true> shared(ctx, Shared{});
    shared.feed(ctx, 0, 40, 1);
    forge(shared, 4);
}
