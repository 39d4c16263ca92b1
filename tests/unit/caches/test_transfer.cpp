// One layer of a sequence as bytes, and back: between caches of both kinds, of any page size, with keep parts
// and selections; what is refused, with nothing changed.
#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

constexpr std::int32_t layers = 2, heads = 2, group = 2, dim = 8;

CacheShape shape_of(std::int32_t page_size) {
    return {.layers = layers,
            .max_sequences = 3,
            .query_heads = heads * group,
            .kv_heads = heads,
            .head_dim_qk = dim,
            .head_dim_vo = 2 * dim,
            .page_size = page_size,
            .max_draft_tokens = 2};
}
constexpr PoolShape pool{.slab_pages = 800, .max_slabs = 2, .max_seq_len = 300};

/// Bytes at a multiple of 16.
struct Bytes {
    std::vector<std::uint64_t> memory;
    std::size_t size;
    explicit Bytes(std::size_t count) : memory(count / 8 + 4, 0x5a5a5a5a5a5a5a5au), size(count) {}
    [[nodiscard]] unsigned char* data() {
        auto* const at = reinterpret_cast<unsigned char*>(memory.data());
        return at + (16 - reinterpret_cast<std::uintptr_t>(at) % 16) % 16;
    }
};

template <class Cache>
std::int64_t entries_of(const Cache& cache, std::int32_t layer, std::int32_t seq) {
    std::int64_t entries = 0;
    for (std::int32_t head = 0; head < heads; ++head) {
        entries += cache.usage(layer, seq, head).size();
    }
    return entries;
}

/// `length` tokens into sequence `seq` of a cache, in chunks.
template <class P, class T, class Cache>
void feed(const host& ctx, Cache& cache, std::int32_t seq, std::int32_t length, unsigned seed) {
    std::mt19937 generator(seed);
    for (std::int32_t t = 0; t < length;) {
        const std::int32_t n = std::min(length - t, 1 + static_cast<std::int32_t>(generator() % 9));
        const Batch batch{.count = 1, .seq_ids = &seq, .length = n};
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            test::Tensor<T> q(1, heads * group, n, dim), k(1, heads, n, dim), v(1, heads, n, 2 * dim),
                out(1, heads * group, n, 2 * dim);
            test::Plane<float> scores(1, heads, n);
            q.fill_normal(generator);
            k.fill_normal(generator);
            v.fill_normal(generator);
            test::fill_scores(scores, test::Scores::random, generator);
            test::call_ref<P, T>(ctx, cache.layer(layer), batch, std::as_const(q).view(),
                                 std::as_const(k).view(), std::as_const(v).view(), out.view(),
                                 {.scores = scores.view()}, false);
        }
        cache.advance(ctx, batch);
        t += n;
    }
}

template <class Cache>
std::vector<unsigned char> snapshot_of(const host& ctx, const Cache& cache, std::int32_t seq) {
    std::vector<unsigned char> blob(cache.snapshot_bytes(seq));
    cache.snapshot(ctx, seq, blob.data(), blob.size());
    return blob;
}

/// All layers of a sequence, through bytes of exactly their size.
template <class From, class To>
void move(const host& ctx, const From& from, std::int32_t seq, To& to, std::int32_t other) {
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        Bytes bytes(layer_bytes(from.layer(layer), entries_of(from, layer, seq)));
        save_layer(ctx, from.layer(layer), seq, bytes.data(), bytes.size);
        load_layer(ctx, to.layer(layer), other, bytes.data(), bytes.size);
    }
}

template <class P, class T>
void check(const P& policy, bool fixed) {
    const host ctx{2};
    test::BoundDual<P, T> a(ctx, shape_of(4), pool, policy), b(ctx, shape_of(16), pool, policy);
    a.add_slab(ctx);
    b.add_slab(ctx);
    for (const std::int32_t length : {0, 1, 5, 12, 90}) {
        a.cache.clear(ctx, 1);
        feed<P, T>(ctx, a.cache, 1, length, 3u + static_cast<unsigned>(length));
        feed<P, T>(ctx, b.cache, 2, 20, 5);  // which the other replaces
        const auto wanted = snapshot_of(ctx, a.cache, 1);
        move(ctx, a.cache, 1, b.cache, 2);
        CHECK(snapshot_of(ctx, b.cache, 2) == wanted);
        move(ctx, b.cache, 2, a.cache, 0);
        CHECK(snapshot_of(ctx, a.cache, 0) == wanted);
        if constexpr (!P::has_keep && !P::has_eviction && !P::shares_budget) {
            if (fixed) {
                test::BoundCache<P, T> c(ctx, shape_of(1), policy);
                move(ctx, a.cache, 1, c.cache, 0);
                CHECK(snapshot_of(ctx, c.cache, 0) == wanted);
                move(ctx, c.cache, 0, b.cache, 1);
                CHECK(snapshot_of(ctx, b.cache, 1) == wanted);
            }
        }
        // The sequence goes on as the other does.
        feed<P, T>(ctx, a.cache, 1, 7, 11);
        feed<P, T>(ctx, b.cache, 2, 7, 11);
        CHECK(snapshot_of(ctx, b.cache, 2) == snapshot_of(ctx, a.cache, 1));
        b.cache.clear(ctx, 2);
    }
}

using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;
Budget budget(std::int32_t k) { return Budget{Sink<>{2}, Window<>{7}, TopKBudget<>{k}}; }

}  // namespace

TEST_CASE("layers of budgets, and of none") {
    check<Budget, float>(budget(10), true);
    check<Budget, bf16>(budget(0), true);
    check<Budget, fp16>(budget(unlimited), false);
}

TEST_CASE("with a selection and with a keep part") {
    using Quest = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<4>>;
    check<Quest, float>(Quest{Sink<>{2}, Window<>{7}, TopKBudget<>{30}, QuestPages<4>{3}}, false);
    using Strided = Policy<Sink<>, Window<>, Stride<>, TopKBudget<>>;
    check<Strided, float>(Strided{Sink<>{1}, Window<>{5}, Stride<>{6}, TopKBudget<>{4}}, false);
}

TEST_CASE("with a budget that heads share") {
    using Shared = Policy<Sink<>, Window<>, SharedBudget<>>;
    const auto shared = [](std::int32_t k) { return Shared{Sink<>{2}, Window<>{7}, SharedBudget<>{k}}; };
    check<Shared, float>(shared(10), false);
    // Slots of a layer are those of all heads: keys that each head alone could hold.
    const host ctx{1};
    test::BoundDual<Shared, float> many(ctx, shape_of(4), pool, shared(12)),
        few(ctx, shape_of(4), pool, shared(10));
    many.add_slab(ctx);
    few.add_slab(ctx);
    feed<Shared, float>(ctx, many.cache, 0, 90, 1);
    feed<Shared, float>(ctx, few.cache, 0, 20, 2);
    const auto before = snapshot_of(ctx, few.cache, 0);
    Bytes bytes(layer_bytes(many.cache.layer(0), entries_of(many.cache, 0, 0)));
    save_layer(ctx, many.cache.layer(0), 0, bytes.data(), bytes.size);
    CHECK_REFUSED(load_layer(ctx, few.cache.layer(0), 0, bytes.data(), bytes.size), "buffer: of another");
    CHECK(snapshot_of(ctx, few.cache, 0) == before);
}

TEST_CASE("layers of a shared budget fit a pool of pages_per_sequence()") {
    using Shared = Policy<Sink<>, Window<>, SharedBudget<>>;
    const Shared policy{Sink<>{0}, Window<>{1}, SharedBudget<>{4}};
    const DualCache<Shared, float> plan(shape_of(2), pool, policy);
    const auto pages = static_cast<std::int32_t>(layers * plan.pages_per_sequence(0));
    const host ctx{1};
    test::BoundDual<Shared, float> cache(ctx, shape_of(2),
                                         {.slab_pages = pages, .max_slabs = 1, .max_seq_len = 300}, policy);
    cache.add_slab(ctx);
    feed<Shared, float>(ctx, cache.cache, 1, 40, 1);
    // A division of layer 0's slots that takes most pages, into a sequence that has some in its stash.
    std::vector<Bytes> saved;
    std::int32_t loaded = 0, without_free = 0;
    for (unsigned t = 0; t < 200; ++t) {
        feed<Shared, float>(ctx, cache.cache, 1, 1, 100 + t);
        if (saved.empty() && cache.cache.layer(0).stashed[1] == 0) {
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                const auto ref = cache.cache.layer(layer);
                Bytes& bytes = saved.emplace_back(layer_bytes(ref, entries_of(cache.cache, layer, 1)));
                save_layer(ctx, ref, 1, bytes.data(), bytes.size);
            }
        } else if (!saved.empty() && cache.cache.layer(0).stashed[1] != 0) {
            without_free += cache.cache.free_pages(ctx) == 0 ? 1 : 0;
            ++loaded;
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                Bytes& bytes = saved[static_cast<std::size_t>(layer)];
                load_layer(ctx, cache.cache.layer(layer), 1, bytes.data(), bytes.size);
            }
        }
    }
    CHECK(loaded > 0);
    CHECK(without_free > 0);
    cache.cache.clear(ctx, 1);
    CHECK(cache.cache.free_pages(ctx) == pages);
}

TEST_CASE("what is refused") {
    const host ctx{1};
    test::BoundCache<Budget, float> cache(ctx, shape_of(1), budget(10)), other(ctx, shape_of(1), budget(9));
    feed<Budget, float>(ctx, cache.cache, 0, 40, 1);
    const auto ref = cache.cache.layer(0);
    Bytes bytes(layer_bytes(ref, entries_of(cache.cache, 0, 0)));
    CHECK_REFUSED(static_cast<void>(layer_bytes(ref, -1)), "entries: -1");
    CHECK_REFUSED(save_layer(ctx, ref, 3, bytes.data(), bytes.size), "seq: 3");
    CHECK_REFUSED(save_layer(ctx, ref, 0, nullptr, bytes.size), "buffer: null");
    CHECK_REFUSED(save_layer(ctx, ref, 0, bytes.data() + 8, bytes.size), "buffer: unaligned");
    CHECK_REFUSED(save_layer(ctx, ref, 0, bytes.data(), bytes.size - 1), "at least layer_bytes()");
    CHECK_REFUSED(load_layer(ctx, ref, 1, bytes.data(), bytes.size), "buffer: of another policy");
    save_layer(ctx, ref, 0, bytes.data(), bytes.size);
    const auto before = other.content(0, 1);
    CHECK_REFUSED(load_layer(ctx, cache.cache.layer(1), 1, bytes.data(), bytes.size), "buffer: of another");
    CHECK_REFUSED(load_layer(ctx, ref, 1, bytes.data(), bytes.size - 16), "buffer: of another");
    CHECK_REFUSED(load_layer(ctx, other.cache.layer(0), 1, bytes.data(), bytes.size), "buffer: of another");
    CHECK(other.content(0, 1) == before);
    bytes.data()[0] ^= 1;
    CHECK_REFUSED(load_layer(ctx, ref, 1, bytes.data(), bytes.size), "buffer: of another");
}

TEST_CASE("a pool that lacks pages keeps the layer as it was") {
    const host ctx{1};
    test::BoundDual<Budget, float> from(ctx, shape_of(4), pool, budget(unlimited)),
        to(ctx, shape_of(4), {.slab_pages = 30, .max_slabs = 2, .max_seq_len = 300}, budget(unlimited));
    from.add_slab(ctx);
    from.add_slab(ctx);
    to.add_slab(ctx);
    feed<Budget, float>(ctx, from.cache, 0, 80, 1);  // 40 pages a layer
    feed<Budget, float>(ctx, to.cache, 1, 10, 2);
    const auto before = snapshot_of(ctx, to.cache, 1);
    Bytes bytes(layer_bytes(from.cache.layer(0), 160));
    save_layer(ctx, from.cache.layer(0), 0, bytes.data(), bytes.size);
    CHECK_REFUSED(load_layer(ctx, to.cache.layer(0), 1, bytes.data(), bytes.size),
                  "pages that the pool lacks");
    std::uint32_t status = 0;
    load_layer(ctx, to.cache.layer(0), 1, bytes.data(), bytes.size, {.status = &status});
    CHECK(status == status_pool_exhausted);
    CHECK(snapshot_of(ctx, to.cache, 1) == before);
    to.add_slab(ctx);
    load_layer(ctx, to.cache.layer(0), 1, bytes.data(), bytes.size);
    CHECK(to.cache.length(1) == 80);
}

namespace {

using Strided = Policy<Sink<>, Window<>, Stride<>, TopKBudget<>>;
using Shared = Policy<Sink<>, Window<>, SharedBudget<>>;
Shared shared(std::int32_t k) { return Shared{Sink<>{1}, Window<>{3}, SharedBudget<>{k}}; }

/// Bytes of layer 0 of sequence 0.
template <class Cache>
Bytes saved_layer(const host& ctx, const Cache& cache) {
    Bytes bytes(layer_bytes(cache.layer(0), entries_of(cache, 0, 0)));
    save_layer(ctx, cache.layer(0), 0, bytes.data(), bytes.size);
    return bytes;
}

}  // namespace

TEST_CASE("bytes with more keys than a budget allows, beside a keep part or of heads that share it") {
    const host ctx{1};
    const auto strided = [](std::int32_t k) {
        return Strided{Sink<>{1}, Window<>{5}, Stride<>{6}, TopKBudget<>{k}};
    };
    test::BoundDual<Strided, float> from(ctx, shape_of(4), pool, strided(9)),
        to(ctx, shape_of(4), pool, strided(4));
    from.add_slab(ctx);
    to.add_slab(ctx);
    feed<Strided, float>(ctx, from.cache, 0, 90, 1);
    Bytes bytes = saved_layer(ctx, from.cache);
    CHECK_REFUSED(load_layer(ctx, to.cache.layer(0), 0, bytes.data(), bytes.size), "buffer: of another");
    test::BoundDual<Shared, float> more(ctx, shape_of(4), pool, shared(8)),
        fewer(ctx, shape_of(4), pool, shared(6));
    more.add_slab(ctx);
    fewer.add_slab(ctx);
    feed<Shared, float>(ctx, more.cache, 0, 90, 1);  // 16 keys; each head of the other may have 12
    bytes = saved_layer(ctx, more.cache);
    CHECK_REFUSED(load_layer(ctx, fewer.cache.layer(0), 0, bytes.data(), bytes.size), "buffer: of another");
    CHECK(fewer.cache.length(0) == 0);
}

TEST_CASE("bytes with positions that a row cannot have, and of a longer sequence than the cache takes") {
    const host ctx{1};
    test::BoundCache<Budget, float> fixed(ctx, shape_of(1), budget(10));
    feed<Budget, float>(ctx, fixed.cache, 0, 40, 1);
    Bytes bytes = saved_layer(ctx, fixed.cache);
    const auto ref = fixed.cache.layer(0);
    const std::int64_t first = detail::layer_layout(ref, entries_of(fixed.cache, 0, 0)).position;
    for (const position_t wrong : {position_t{-5}, position_t{40}, position_t{1} << 60}) {
        for (const std::int32_t row : {0, 2, 8, 9, 18}) {
            position_t right = 0;
            unsigned char* const at = bytes.data() + first + row * std::int64_t{sizeof right};
            std::memcpy(&right, at, sizeof right);
            std::memcpy(at, &wrong, sizeof wrong);
            CHECK_REFUSED(load_layer(ctx, ref, 1, bytes.data(), bytes.size), "buffer: of another");
            std::memcpy(at, &right, sizeof right);
        }
    }
    load_layer(ctx, ref, 1, bytes.data(), bytes.size);
    test::BoundDual<Budget, float> longer(ctx, shape_of(4), pool, budget(unlimited)),
        shorter(ctx, shape_of(4), {.slab_pages = 200, .max_slabs = 1, .max_seq_len = 39}, budget(unlimited));
    longer.add_slab(ctx);
    shorter.add_slab(ctx);
    feed<Budget, float>(ctx, longer.cache, 0, 40, 1);
    bytes = saved_layer(ctx, longer.cache);
    CHECK_REFUSED(load_layer(ctx, shorter.cache.layer(0), 0, bytes.data(), bytes.size), "buffer: of another");
}

TEST_CASE("a layer takes the place of pages that its sequence had in its stash") {
    const host ctx{1};
    const DualCache<Shared, float> plan(shape_of(4), pool, shared(6));
    const auto pages = static_cast<std::int32_t>(plan.pages_per_sequence(0));
    test::BoundDual<Shared, float> cache(
        ctx, shape_of(4), {.slab_pages = 2 * layers * pages, .max_slabs = 1, .max_seq_len = 300}, shared(6));
    cache.add_slab(ctx);
    feed<Shared, float>(ctx, cache.cache, 0, 90, 1);
    const Batch both{.count = 2, .length = 200};
    REQUIRE(cache.cache.reserve(ctx, both) == 0);
    REQUIRE(cache.cache.free_pages() == 0);
    const auto wanted = snapshot_of(ctx, cache.cache, 0);
    move(ctx, cache.cache, 0, cache.cache, 1);
    CHECK(snapshot_of(ctx, cache.cache, 1) == wanted);
    feed<Shared, float>(ctx, cache.cache, 0, 7, 2);
    feed<Shared, float>(ctx, cache.cache, 1, 7, 2);
    CHECK(snapshot_of(ctx, cache.cache, 1) == snapshot_of(ctx, cache.cache, 0));
    cache.cache.clear(ctx, 0);
    cache.cache.clear(ctx, 1);
    CHECK(cache.cache.free_pages() == cache.cache.attached_pages());
}
