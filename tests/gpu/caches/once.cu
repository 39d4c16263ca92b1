// Every layer takes a token once: on a device a second call of a layer before advance() leaves the sequence alone, and advance() does
// not move a sequence that some layer has not taken. Both say so in the status word, and nothing is lost.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"
#include "two_scorers.hpp"

#include <memory>
#include <random>
#include <type_traits>

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t slots = 3, layers = 2, heads = 2, dim_k = 16, dim_v = 24, most = 5;
constexpr CacheShape shape{.layers = layers,
                           .slots = slots,
                           .query_heads = 4,
                           .kv_heads = heads,
                           .dim_k = dim_k,
                           .dim_v = dim_v,
                           .page_rows = 16,
                           .proposals = most};
using Words = std::vector<std::uint32_t>;

/// A cache on a device with tensors for calls of up to `most` tokens.
template <class Cache>
struct Side {
    using P = std::decay_t<decltype(std::declval<Cache>().policy())>;
    static constexpr bool pooled = Cache::ref_type::pooled;
    kvpolicy::cuda on{};
    Cache cache;
    Device<unsigned char> memory;
    std::unique_ptr<Device<unsigned char>> slab, workspace;
    Device<float> q{std::size_t{slots} * 4 * most * dim_k}, k{std::size_t{slots} * heads * most * dim_k},
        v{std::size_t{slots} * heads * most * dim_v}, scores{std::size_t{slots} * heads * most},
        out{std::size_t{slots} * 4 * most * dim_v};
    Device<std::uint32_t> status{Words(slots, 0)};

    static Cache make(const P& policy, const typename P::scorer_type* scorers) {
        if constexpr (pooled) {
            return Cache(shape, {.slab_pages = 200, .most_slabs = 1, .longest = 400}, policy, scorers);
        } else {
            return Cache(shape, policy, scorers);
        }
    }
    explicit Side(const P& policy, const typename P::scorer_type* scorers = nullptr)
        : cache(make(policy, scorers)), memory(cache.bytes().total()) {
        cache.bind(on, memory.data(), memory.size());
        if constexpr (pooled) {
            slab = std::make_unique<Device<unsigned char>>(cache.slab_bytes());
            cache.add_slab(on, slab->data(), slab->size());
        }
        workspace = std::make_unique<Device<unsigned char>>(
            cache_workspace_bytes<head_dims<64>>(on, cache.ref(0), slots, most));
    }
    void give(std::uint32_t seed) {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal;
        for (const Device<float>* array : {&q, &k, &v, &scores}) {
            std::vector<float> numbers(array->size());
            for (float& x : numbers) {
                x = normal(generator);
            }
            ok(cudaMemcpy(array->data(), numbers.data(), array->bytes(), cudaMemcpyHostToDevice));
        }
    }
    /// One call of a layer with the tensors of `seed`: n tokens of each slot; its status words.
    Words call(Mode mode, std::int32_t layer, std::int32_t n, std::uint32_t seed) {
        give(seed * 2 + static_cast<std::uint32_t>(layer));
        ok(cudaMemset(status.data(), 0, status.bytes()));
        const Batch batch{.count = slots, .length = n};
        const auto rows = [&](const Device<float>& of, std::int32_t count, std::int32_t dim) {
            return view_bhsd<const float>(of.data(), slots, count, n, dim);
        };
        const auto to = view_bhsd(out.data(), slots, 4, n, dim_v);
        CacheExtras extras;
        if constexpr (P::scorer_type::when == score_time::given) {
            extras.scores = view_bhs<const float>(scores.data(), slots, heads, n);
        }
        const auto ref = cache.ref(layer);
        if (mode == Mode::step) {
            step<head_dims<64>>(on, ref, batch, rows(q, 4, dim_k), rows(k, heads, dim_k),
                                rows(v, heads, dim_v), to, *workspace, status.data(), extras);
        } else if (mode == Mode::prefill) {
            prefill<head_dims<64>>(on, ref, batch, rows(q, 4, dim_k), rows(k, heads, dim_k),
                                   rows(v, heads, dim_v), to, *workspace, status.data(), extras);
        } else {
            propose<head_dims<64>>(on, ref, batch, rows(q, 4, dim_k), rows(k, heads, dim_k),
                                   rows(v, heads, dim_v), to, *workspace, status.data(), extras);
        }
        return status.read();
    }
    Words commit(std::int32_t layer, std::int32_t n) {
        ok(cudaMemset(status.data(), 0, status.bytes()));
        kvpolicy::commit<head_dims<64>>(on, cache.ref(layer), {.count = slots, .length = n}, *workspace,
                                        status.data());
        return status.read();
    }
    Words advance(std::int32_t n) {
        ok(cudaMemset(status.data(), 0, status.bytes()));
        cache.advance(on, {.count = slots, .length = n}, status.data());
        return status.read();
    }
    [[nodiscard]] std::vector<position_t> lengths() const { return fetch_from(cache.ref(0).length, slots); }
    /// All slots, with scorer states.
    [[nodiscard]] std::vector<std::vector<unsigned char>> content() const {
        std::vector<std::vector<unsigned char>> blobs;
        for (std::int32_t slot = 0; slot < slots; ++slot) {
            blobs.emplace_back(cache.snapshot_bytes(on, slot));
            cache.snapshot(on, slot, blobs.back().data(), blobs.back().size());
        }
        return blobs;
    }
    /// As it should be.
    void token(Mode mode, std::int32_t n, std::uint32_t seed) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            CHECK(call(mode, layer, n, seed) == Words(slots, 0));
            if (mode == Mode::propose) {
                CHECK(commit(layer, n) == Words(slots, 0));
            }
        }
        CHECK(advance(n) == Words(slots, 0));
    }
};

/// Calls too many and calls too few, beside a cache that has neither.
template <class Cache>
void check(const typename Side<Cache>::P& policy,
           const typename Side<Cache>::P::scorer_type* scorers = nullptr) {
    const Words fine(slots, 0), twice(slots, status_taken_twice), missing(slots, status_not_taken);
    Side<Cache> wrong(policy, scorers), right(policy, scorers);
    std::uint32_t seed = 1;
    for (std::int32_t t = 0; t < 30; ++t, ++seed) {
        right.token(Mode::step, 1, seed);
        wrong.token(Mode::step, 1, seed);
    }
    for (const Mode mode : {Mode::step, Mode::prefill, Mode::propose}) {
        for (std::int32_t turn = 0; turn < 3; ++turn, ++seed) {
            const std::int32_t n = mode == Mode::step ? 1 : most - turn;
            CAPTURE(static_cast<int>(mode));
            CAPTURE(n);
            right.token(mode, n, seed);
            CHECK(wrong.advance(n) == missing);  // too early
            CHECK(wrong.call(mode, 0, n, seed) == fine);
            if (mode == Mode::propose) {
                CHECK(wrong.advance(n) == missing);  // what is proposed is not taken
                CHECK(wrong.commit(0, n) == fine);
            }
            const auto before = wrong.content();
            const std::vector<position_t> length = wrong.lengths();
            // The layer again, by every kind of call, with other tokens: nothing changes, no output is written.
            ok(cudaMemset(wrong.out.data(), 0x11, wrong.out.bytes()));
            const std::vector<float> untouched = wrong.out.read();
            for (const Mode again : {Mode::step, Mode::prefill, Mode::propose}) {
                CHECK(wrong.call(again, 0, again == Mode::step ? 1 : 3, 1000 + seed) == twice);
            }
            CHECK(wrong.commit(0, n) == twice);
            CHECK(wrong.out.read() == untouched);
            // Layer 1 is left out: advance moves nobody, how often it may be called, nor by another number of tokens.
            CHECK(wrong.advance(n) == missing);
            CHECK(wrong.advance(n + 1) == missing);
            CHECK(wrong.lengths() == length);
            CHECK(wrong.content() == before);
            CHECK(wrong.call(mode, 1, n, seed) == fine);
            if (mode == Mode::propose) {
                CHECK(wrong.commit(1, n) == fine);
            }
            CHECK(wrong.advance(n + 1) == missing);
            CHECK(wrong.advance(n) == fine);
            CHECK(wrong.content() == right.content());
        }
    }
    // A copy of a slot has taken what the slot has; an emptied or restored one nothing.
    std::vector<unsigned char> blob(wrong.cache.snapshot_bytes(wrong.on, 0));
    wrong.cache.snapshot(wrong.on, 0, blob.data(), blob.size());
    CHECK(wrong.call(Mode::step, 0, 1, seed) == fine);
    wrong.cache.clear(wrong.on, 1);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == Words{status_taken_twice, 0, status_taken_twice});
    wrong.cache.clear(wrong.on, 1);
    wrong.cache.fork(wrong.on, 0, 1);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == twice);
    const Device<std::int32_t> sources(std::vector<std::int32_t>{1, 0});
    wrong.cache.reorder(wrong.on, sources.data(), 2);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == twice);
    CHECK(wrong.call(Mode::step, 1, 1, seed) == fine);
    CHECK(wrong.advance(1) == fine);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == fine);
    wrong.cache.restore(wrong.on, 2, blob.data(), blob.size());
    CHECK(wrong.call(Mode::step, 0, 1, seed) == Words{status_taken_twice, status_taken_twice, 0});
    CHECK(wrong.call(Mode::step, 1, 1, seed) == fine);
    CHECK(wrong.advance(1) == fine);
}

}  // namespace

TEST_CASE("a FixedBudgetCache") {
    check<FixedBudgetCache<Policy<Sink<2>, Window<5>, TopKBudget<9>>, float>>({});
}

TEST_CASE("a DualCache") {
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
    check<DualCache<P, float>>(P{{}, {}, ThresholdGate<at_least>{0.0f}});
}

TEST_CASE("a state is not advanced twice") {
    using S = mLSTMScorer<>;
    using P = Policy<Sink<2>, Window<5>, TopKBudget<9>, S>;
    std::mt19937 generator(5);
    const TwoScorers<S> scorers(sized<S>(), true, generator);
    const S by_layer[layers] = {scorers.of_device, scorers.of_device};
    check<FixedBudgetCache<P, float>>(P{{}, {}, {}, scorers.of_host}, by_layer);
}
