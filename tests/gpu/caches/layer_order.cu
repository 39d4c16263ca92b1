// Every layer takes a token once: on a device a second call of a layer before advance() leaves the sequence
// alone, and advance() does not move a sequence that some layer has not taken. Both say so in the status
// word, and nothing is lost. In the middle of a token the rows of a layer are those that it has taken.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"
#include "two_scorers.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t max_sequences = 3, layers = 2, heads = 2, head_dim_qk = 16, head_dim_vo = 24, most = 5;
constexpr CacheShape shape{.layers = layers,
                           .max_sequences = max_sequences,
                           .query_heads = 4,
                           .kv_heads = heads,
                           .head_dim_qk = head_dim_qk,
                           .head_dim_vo = head_dim_vo,
                           .page_size = 16,
                           .max_draft_tokens = most};
using Words = std::vector<std::uint32_t>;

/// A cache on a device with tensors for calls of up to `most` tokens.
template <class Cache>
struct Side {
    using P = std::decay_t<decltype(std::declval<Cache>().policy())>;
    static constexpr bool pooled = Cache::ref_type::pooled;
    kvpolicy::cuda ctx{};
    Cache cache;
    Device<unsigned char> memory;
    std::unique_ptr<Device<unsigned char>> slab, workspace;
    Device<float> q{std::size_t{max_sequences} * 4 * most * head_dim_qk},
        k{std::size_t{max_sequences} * heads * most * head_dim_qk},
        v{std::size_t{max_sequences} * heads * most * head_dim_vo},
        scores{std::size_t{max_sequences} * heads * most},
        out{std::size_t{max_sequences} * 4 * most * head_dim_vo};
    Device<std::uint32_t> status{Words(max_sequences, 0)};

    static Cache make(const P& policy, const typename P::scorer_type* scorers) {
        if constexpr (pooled) {
            return Cache(shape, {.slab_pages = 200, .max_slabs = 1, .max_seq_len = 400}, policy, scorers);
        } else {
            return Cache(shape, policy, scorers);
        }
    }
    explicit Side(const P& policy, const typename P::scorer_type* scorers = nullptr)
        : cache(make(policy, scorers)), memory(cache.bytes().total()) {
        cache.bind(ctx, memory.data(), memory.size());
        if constexpr (pooled) {
            slab = std::make_unique<Device<unsigned char>>(cache.slab_bytes());
            cache.add_slab(ctx, slab->data(), slab->size());
        }
        workspace = std::make_unique<Device<unsigned char>>(
            workspace_bytes<head_dims<64>>(ctx, cache.layer(0), {.batch = max_sequences, .tokens = most}));
    }
    bool alike = false;  // whether all sequences get the same tokens
    void give(std::uint32_t seed) {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal;
        for (const Device<float>* array : {&q, &k, &v, &scores}) {
            std::vector<float> numbers(array->size());
            const std::size_t each = numbers.size() / max_sequences;
            for (std::size_t i = 0; i < numbers.size(); ++i) {
                numbers[i] = alike && i >= each ? numbers[i - each] : normal(generator);
            }
            ok(cudaMemcpy(array->data(), numbers.data(), array->bytes(), cudaMemcpyHostToDevice));
        }
    }
    /// One call of a layer with the tensors of `seed`: n tokens of each sequence, or of the first `count`;
    /// its status words. An entry's tensors are `most` tokens long, so that they do not depend on n.
    Words call(Mode mode, std::int32_t layer, std::int32_t n, std::uint32_t seed,
               std::int32_t count = max_sequences) {
        give(seed * 2 + static_cast<std::uint32_t>(layer));
        ok(cudaMemset(status.data(), 0, status.bytes()));
        const Batch batch{.count = count, .length = n};
        const auto rows = [&](const Device<float>& of, std::int32_t of_heads, std::int32_t dim) {
            return view_bhsd<const float>(of.data(), count, of_heads, most, dim);
        };
        const auto to = view_bhsd(out.data(), count, 4, most, head_dim_vo);
        test::Extras extras;
        if constexpr (P::scorer_type::when == score_time::given) {
            extras.scores = view_bhs<const float>(scores.data(), count, heads, most);
        }
        const auto ref = cache.layer(layer);
        if (mode == Mode::step) {
            step<head_dims<64>>(ctx, ref,
                                test::step_io(batch, rows(q, 4, head_dim_qk), rows(k, heads, head_dim_qk),
                                              rows(v, heads, head_dim_vo), to, extras),
                                *workspace, {.status = status.data()});
        } else if (mode == Mode::prefill) {
            prefill<head_dims<64>>(ctx, ref,
                                   test::step_io(batch, rows(q, 4, head_dim_qk), rows(k, heads, head_dim_qk),
                                                 rows(v, heads, head_dim_vo), to, extras),
                                   *workspace, {.status = status.data()});
        } else {
            append_draft<head_dims<64>>(
                ctx, ref,
                test::step_io(batch, rows(q, 4, head_dim_qk), rows(k, heads, head_dim_qk),
                              rows(v, heads, head_dim_vo), to, extras),
                *workspace, {.status = status.data()});
        }
        return status.read();
    }
    Words accept(std::int32_t layer, std::int32_t n) {
        ok(cudaMemset(status.data(), 0, status.bytes()));
        kvpolicy::accept<head_dims<64>>(ctx, cache.layer(layer), {.count = max_sequences, .length = n},
                                        *workspace, {.status = status.data()});
        return status.read();
    }
    Words advance(std::int32_t n) {
        ok(cudaMemset(status.data(), 0, status.bytes()));
        cache.advance(ctx, {.count = max_sequences, .length = n}, {.status = status.data()});
        return status.read();
    }
    [[nodiscard]] std::vector<position_t> lengths() const {
        return fetch_from(cache.layer(0).length, max_sequences);
    }
    /// All sequences, with scorer states.
    [[nodiscard]] std::vector<std::vector<unsigned char>> content() const {
        std::vector<std::vector<unsigned char>> blobs;
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            blobs.emplace_back(cache.snapshot_bytes(ctx, seq));
            cache.snapshot(ctx, seq, blobs.back().data(), blobs.back().size());
        }
        return blobs;
    }
    /// The same in the middle of a token, when there are no snapshots: what the sequences' memory holds.
    [[nodiscard]] std::vector<unsigned char> raw() const {
        std::vector<unsigned char> bytes = pooled ? slab->read() : std::vector<unsigned char>{};
        const auto add = [&](const auto* from, std::int64_t count) {
            const auto values = fetch_from(from, count);
            const auto* const begin = reinterpret_cast<const unsigned char*>(values.data());
            bytes.insert(bytes.end(), begin, begin + values.size() * sizeof values[0]);
        };
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = cache.layer(layer);
            if constexpr (!pooled) {
                add(ref.k, max_sequences * ref.rows * head_dim_qk);
                add(ref.v, max_sequences * ref.rows * head_dim_vo);
                add(ref.position, max_sequences * ref.rows);
                add(ref.score, max_sequences * ref.rows);
            }
            add(ref.num_long_range, max_sequences * heads);
            add(ref.state, max_sequences * heads * ref.state_size);
        }
        return bytes;
    }
    /// The pages of a layer of the first sequence, with the rows in the last of each head.
    [[nodiscard]] std::vector<std::int32_t> exported(std::int32_t layer) const {
        const Device<std::int32_t> indptr(heads + 1), last(heads), indices(200);
        ok(cudaMemset(indices.data(), 0, indices.bytes()));
        export_heads(ctx, cache.layer(layer), {.count = 1},
                     {indptr.data(), indices.data(), last.data(), 200});
        std::vector<std::int32_t> all = indptr.read();
        const auto pages = static_cast<std::size_t>(all.back());
        const auto more = last.read(), named = indices.read();
        all.insert(all.end(), more.begin(), more.end());
        all.insert(all.end(), named.begin(), named.begin() + static_cast<std::ptrdiff_t>(pages));
        return all;
    }
    /// As it should be.
    void token(Mode mode, std::int32_t n, std::uint32_t seed) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            CHECK(call(mode, layer, n, seed) == Words(max_sequences, 0));
            if (mode == Mode::append_draft) {
                CHECK(accept(layer, n) == Words(max_sequences, 0));
            }
        }
        CHECK(advance(n) == Words(max_sequences, 0));
    }
};

const std::string in_the_middle =
    "seq: 2 is not allowed; it must be a sequence between two tokens: layer 0 has taken some that advance() "
    "has "
    "not counted";

/// A sequence is copied, exchanged, exported and attended to between the calls of its two layers.
template <class Cache>
void check_middle(const typename Side<Cache>::P& policy,
                  const typename Side<Cache>::P::scorer_type* scorers = nullptr) {
    const Words fine(max_sequences, 0);
    for (const std::int32_t n : {0, 1, 6, 7, 16, 24}) {
        for (const Mode mode : {Mode::step, Mode::prefill}) {
            const std::int32_t tokens = mode == Mode::step ? 1 : 3;
            CAPTURE(n);
            CAPTURE(tokens);
            Side<Cache> beams(policy, scorers), alone(policy, scorers);
            beams.alike = alone.alike = true;
            for (std::int32_t t = 0; t < n; ++t) {
                beams.token(Mode::step, 1, 50 + static_cast<std::uint32_t>(t));
                alone.token(Mode::step, 1, 50 + static_cast<std::uint32_t>(t));
            }
            beams.cache.clear(beams.ctx, 1);
            beams.cache.clear(beams.ctx, 2);
            CHECK(alone.call(mode, 0, tokens, 7) == fine);
            const std::vector<std::int32_t> pages = alone.exported(0);
            const HeadUsage held = alone.cache.usage(alone.ctx, 0, 0, 1);
            CHECK(held.length == n);
            CHECK(held.sinks + held.window == std::min(n + tokens, 7));
            if (mode == Mode::step) {  // the same query over the same rows
                const std::vector<float> wanted = alone.out.read();
                ok(cudaMemset(alone.out.data(), 0xff, alone.out.bytes()));
                attend<head_dims<64>>(
                    alone.ctx, alone.cache.layer(0),
                    {.q = view_bhsd<const float>(alone.q.data(), max_sequences, 4, most, head_dim_qk),
                     .out = view_bhsd(alone.out.data(), max_sequences, 4, most, head_dim_vo),
                     .batch = {.count = max_sequences, .length = 1}},
                    *alone.workspace);
                const std::vector<float> got = alone.out.read();
                double off = 0.0;
                for (std::size_t row = 0; row < got.size() / head_dim_vo; row += most) {
                    for (std::size_t d = 0; d < head_dim_vo; ++d) {
                        const double gap =
                            std::abs(got[row * head_dim_vo + d] - wanted[row * head_dim_vo + d]);
                        off = gap <= off ? off : gap == gap ? gap : 1e30;
                    }
                }
                CHECK(off < 1e-5);
            }
            CHECK(beams.call(mode, 0, tokens, 7, 1) == fine);
            CHECK(beams.exported(0).size() == pages.size());
            for (const Side<Cache>* side : {&beams, &alone}) {  // rows beyond the tokens stay as they are
                ok(cudaMemset(side->out.data(), 0x11, side->out.bytes()));
            }
            beams.cache.fork(beams.ctx, 0, 1);
            const Device<std::int32_t> swap(std::vector<std::int32_t>{1, 0, 2}),
                copy(std::vector<std::int32_t>{0, 1, 0});
            beams.cache.reorder(beams.ctx, swap.data(), 3);
            beams.cache.reorder(beams.ctx, copy.data(), 3);
            CHECK(beams.call(mode, 1, tokens, 7) == fine);
            CHECK(alone.call(mode, 1, tokens, 7) == fine);
            CHECK(beams.out.read() == alone.out.read());
            CHECK(beams.advance(tokens) == fine);
            CHECK(alone.advance(tokens) == fine);
            CHECK(alone.exported(0) == pages);
            CHECK(beams.content() == alone.content());
            for (const std::uint32_t seed : {8u, 9u}) {
                beams.token(Mode::step, 1, seed);
                alone.token(Mode::step, 1, seed);
                CHECK(beams.out.read() == alone.out.read());
                CHECK(beams.content() == alone.content());
            }
            if constexpr (Side<Cache>::pooled) {  // further tokens than the one that layer 1 has taken
                CHECK(beams.call(Mode::step, 1, 1, 10) == fine);
                const auto ref = beams.cache.layer(0), other = beams.cache.layer(1);
                REQUIRE(beams.cache.reserve(beams.ctx, {.count = 1, .length = 2}) == 0);
                const std::vector<position_t> length = beams.lengths();
                for (const auto& [layer, ahead] : {std::pair{ref, 3}, std::pair{other, 2}}) {
                    const auto kept = fetch_from(layer.num_long_range, heads),
                               held = fetch_from(layer.held, heads);
                    for (std::size_t h = 0; h < heads; ++h) {
                        const std::int32_t rows = HeadRows{2, 5}.used(length[0] + 3 - ahead, kept[h]) + ahead;
                        CHECK(held[h] >= (rows + 15) / 16);
                    }
                }
                CHECK(beams.call(Mode::step, 0, 1, 10) == fine);
                CHECK(beams.advance(1) == fine);
            }
        }
    }
}

/// Calls too many and calls too few, beside a cache that has neither.
template <class Cache>
void check(const typename Side<Cache>::P& policy,
           const typename Side<Cache>::P::scorer_type* scorers = nullptr) {
    const Words fine(max_sequences, 0), twice(max_sequences, status_layer_repeated),
        missing(max_sequences, status_layer_skipped);
    Side<Cache> wrong(policy, scorers), right(policy, scorers);
    std::uint32_t seed = 1;
    for (std::int32_t t = 0; t < 30; ++t, ++seed) {
        right.token(Mode::step, 1, seed);
        wrong.token(Mode::step, 1, seed);
    }
    for (const Mode mode : {Mode::step, Mode::prefill, Mode::append_draft}) {
        for (std::int32_t turn = 0; turn < 3; ++turn, ++seed) {
            const std::int32_t n = mode == Mode::step ? 1 : most - turn;
            CAPTURE(static_cast<int>(mode));
            CAPTURE(n);
            right.token(mode, n, seed);
            CHECK(wrong.advance(n) == missing);  // too early
            CHECK(wrong.call(mode, 0, n, seed) == fine);
            if (mode == Mode::append_draft) {
                CHECK(wrong.advance(n) == missing);  // draft tokens do not count as appended
                CHECK(wrong.accept(0, n) == fine);
            }
            CHECK_REFUSED(static_cast<void>(wrong.cache.snapshot_bytes(wrong.ctx, 2)), in_the_middle);
            std::vector<unsigned char> nothing(100);
            CHECK_REFUSED(wrong.cache.snapshot(wrong.ctx, 2, nothing.data(), nothing.size()), in_the_middle);
            const auto before = wrong.raw();
            const std::vector<position_t> length = wrong.lengths();
            // The layer again, by every kind of call, with other tokens: nothing changes, no
            // output is written.
            ok(cudaMemset(wrong.out.data(), 0x11, wrong.out.bytes()));
            const std::vector<float> untouched = wrong.out.read();
            for (const Mode again : {Mode::step, Mode::prefill, Mode::append_draft}) {
                CHECK(wrong.call(again, 0, again == Mode::step ? 1 : 3, 1000 + seed) == twice);
            }
            CHECK(wrong.accept(0, n) == twice);
            CHECK(wrong.out.read() == untouched);
            // Layer 1 is left out: advance moves nobody, how often it may be called, nor by another
            // number of tokens.
            CHECK(wrong.advance(n) == missing);
            CHECK(wrong.advance(n + 1) == missing);
            CHECK(wrong.lengths() == length);
            CHECK(wrong.raw() == before);
            CHECK(wrong.call(mode, 1, n, seed) == fine);
            if (mode == Mode::append_draft) {
                CHECK(wrong.accept(1, n) == fine);
            }
            CHECK(wrong.advance(n + 1) == missing);
            CHECK(wrong.advance(n) == fine);
            CHECK(wrong.content() == right.content());
        }
    }
    // A copy of a sequence has taken what the sequence has; an emptied or restored one nothing.
    std::vector<unsigned char> blob(wrong.cache.snapshot_bytes(wrong.ctx, 0));
    wrong.cache.snapshot(wrong.ctx, 0, blob.data(), blob.size());
    CHECK(wrong.call(Mode::step, 0, 1, seed) == fine);
    wrong.cache.clear(wrong.ctx, 1);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == Words{status_layer_repeated, 0, status_layer_repeated});
    wrong.cache.clear(wrong.ctx, 1);
    wrong.cache.fork(wrong.ctx, 0, 1);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == twice);
    const Device<std::int32_t> sources(std::vector<std::int32_t>{1, 0});
    wrong.cache.reorder(wrong.ctx, sources.data(), 2);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == twice);
    CHECK(wrong.call(Mode::step, 1, 1, seed) == fine);
    CHECK(wrong.advance(1) == fine);
    CHECK(wrong.call(Mode::step, 0, 1, seed) == fine);
    wrong.cache.restore(wrong.ctx, 2, blob.data(), blob.size());
    CHECK(wrong.call(Mode::step, 0, 1, seed) == Words{status_layer_repeated, status_layer_repeated, 0});
    CHECK(wrong.call(Mode::step, 1, 1, seed) == fine);
    CHECK(wrong.advance(1) == fine);
}

}  // namespace

TEST_CASE("a FixedBudgetCache") {
    check<FixedBudgetCache<Policy<Sink<2>, Window<5>, TopKBudget<9>>, float>>({});
    check_middle<FixedBudgetCache<Policy<Sink<2>, Window<5>, TopKBudget<9>>, float>>({});
}

TEST_CASE("a DualCache") {
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
    check<DualCache<P, float>>(P{{}, {}, ThresholdGate<at_least>{0.0f}});
    check_middle<DualCache<P, float>>(P{{}, {}, ThresholdGate<at_least>{-1.0f}});
}

TEST_CASE("a state is not advanced twice") {
    using S = mLSTMScorer<>;
    using P = Policy<Sink<2>, Window<5>, TopKBudget<9>, S>;
    std::mt19937 generator(5);
    const TwoScorers<S> scorers(sized<S>(), true, generator);
    const S by_layer[layers] = {scorers.of_device, scorers.of_device};
    check<FixedBudgetCache<P, float>>(P{{}, {}, {}, scorers.of_host}, by_layer);
    check_middle<FixedBudgetCache<P, float>>(P{{}, {}, {}, scorers.of_host}, by_layer);
}
