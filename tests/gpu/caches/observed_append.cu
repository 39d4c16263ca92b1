// append and observe of policies that rank keys by attention, in both caches: the host's rows and scores, bit
// for bit, for the same masses; a step's, for those of an engine's attention to the exported pages. attend
// over such caches, graphs of their steps, masses that are no numbers, refusals.
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "../../support/refusal.hpp"
#include "../support/captured.hpp"
#include "observed_append_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

constexpr std::int32_t unbounded[] = {20, unlimited, 70};

PoolShape pool_of(std::int32_t slabs = 200) {
    return {.slab_pages = 7, .max_slabs = slabs, .max_seq_len = 400};
}

/// append and observe with masses at random, which are not always given.
template <class T, class Both>
void given_life(Both& both, Keys kind, std::int32_t turns) {
    std::mt19937 generator(static_cast<unsigned>(both.shape.query_heads + 100 * static_cast<int>(kind)));
    CAPTURE(both.shape.query_heads);
    ObservedAppending<T, Both> calls(both, generator);
    std::int32_t turn = 0;
    observed_turns(
        both, turns, generator, [] {},
        [&](const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len) {
            calls.append(seq_ids, q_len);
            const bool late = generator() % 3 == 0;  // observe() may come after advance()
            if (late) {
                calls.advance();
            }
            using P = typename std::remove_cvref_t<decltype(both.cache.layer(0))>::policy_type;
            if constexpr (P::scorer_type::evicts_at_steps) {
                if (generator() % 8 != 0) {
                    calls.observe(kind);
                }
            }
            if (!late) {
                calls.advance();
            }
        },
        [&](const std::string& done) {
            if (++turn % 8 == 0 || turn > turns - 8) {
                both.same_rows(done + " " + std::to_string(turn));
            }
        });
}
template <class T, class P>
void given(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns) {
    BothCaches<P, T, Dims, false> both(shape, policy);
    given_life<T>(both, kind, turns);
}
template <class T, class P>
void given_paged(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns,
                 std::int32_t slabs = 200) {
    BothDuals<P, T, Dims> both(shape, pool_of(slabs), policy);
    while (both.add_slab()) {
    }
    given_life<T>(both, kind, turns);
}

/// Steps of an engine, each from the device's state; then attention alone.
template <class T, class Both>
void engine_life(Both& both, Keys kind, std::int32_t turns) {
    std::mt19937 generator(static_cast<unsigned>(both.shape.query_heads + 100 * static_cast<int>(kind)));
    CAPTURE(both.shape.query_heads);
    ObservedAppending<T, Both> calls(both, generator);
    NearMasses near;
    std::int32_t turn = 0;
    observed_turns(
        both, turns, generator, [&] { take_over(both); },
        [&](const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len) {
            if (++turn % 5 == 0) {  // the library's step between those of the engine
                const auto in = observed_tokens<T>(both.shape, static_cast<std::int32_t>(seq_ids.size()),
                                                   kind, generator);
                near.take(in, {});
                both.call(Mode::step, seq_ids, q_len, in);
            } else {
                calls.engine_step(seq_ids, q_len, kind, near);
            }
        },
        [&](const std::string& done) {
            CAPTURE(done);
            both.near_rows(near);
            near.check();
            if (turn % 16 == 7) {
                calls.template attend<Dims>({2, 0});
                both.near_rows(near);  // attend leaves scores as they are
                near.check();
            }
        });
}
template <class T, class P>
void engine(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns) {
    BothCaches<P, T, Dims, false> both(shape, policy);
    engine_life<T>(both, kind, turns);
}
template <class T, class P>
void engine_paged(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns) {
    BothDuals<P, T, Dims> both(shape, pool_of(), policy);
    while (both.add_slab()) {
    }
    engine_life<T>(both, kind, turns);
}

}  // namespace

TEST_CASE("masses that are given, in a FixedBudgetCache") {
    given<bf16>(shape_of(3, 1), ragged(accumulated), Keys::random, 250);
    given<bf16>(shape_of(3, 4), ragged({.aggregate = group_aggregate::max}), Keys::equal, 250);
    given<float>(shape_of(3, 2, 24), ragged(last_of_head), Keys::equal, 200);
}
TEST_CASE("masses that are given, of a layer") {
    given<bf16>(shape_of(2, 4), even(last_of_layer), Keys::random, 150);
    given<bf16>(shape_of(3, 2), even({.accumulate = true, .whole_layer = true}), Keys::equal, 150);
    given<bf16>(shape_of(10, 1), even(last_of_layer), Keys::equal, 100);
    given_paged<bf16>(shape_of(3, 2), even(last_of_layer), Keys::random, 150);
}
TEST_CASE("masses that are given, in a DualCache") {
    given_paged<bf16>(shape_of(3, 1), ragged(accumulated, unbounded), Keys::random, 200);
    given_paged<bf16>(shape_of(3, 4), ragged(accumulated), Keys::equal, 200);
    given_paged<float>(shape_of(3, 2, 24), ragged(last_of_head, unbounded), Keys::equal, 150);
    constexpr std::int32_t few_slabs = 4;  // the pool runs out
    given_paged<bf16>(shape_of(3, 1), ragged(accumulated, unbounded), Keys::random, 120, few_slabs);
}
TEST_CASE("decoded tokens stay under SnapKV") {
    given_paged<bf16>(shape_of(3, 4), SnapKV<>{Window<>{4}, TopKBudget<>{9}, WindowMass{}}, Keys::random, 60);
}

TEST_CASE("an engine's steps, in a FixedBudgetCache") {
    engine<bf16>(shape_of(3, 1), ragged(accumulated), Keys::random, 150);
    engine<bf16>(shape_of(3, 4), ragged({.aggregate = group_aggregate::max}), Keys::equal, 150);
    engine<bf16>(shape_of(3, 3), even(last_of_layer), Keys::random, 120);
    engine<bf16>(shape_of(3, 2), h2o_for_total(40), Keys::far, 100);
    engine<float>(shape_of(3, 2, 24), ragged(last_of_head), Keys::random, 100);
}
TEST_CASE("an engine's steps, in a DualCache") {
    engine_paged<bf16>(shape_of(3, 7), ragged(accumulated, unbounded), Keys::random, 150);
    engine_paged<bf16>(shape_of(2, 4), tova_for_total(70), Keys::equal, 120);
    engine_paged<float>(shape_of(3, 2, 24), ragged(last_of_head), Keys::random, 100);
}

namespace {

/// A cache of H2O with its tensors in device memory, for calls by hand.
template <bool Paged>
struct Hand {
    using P = H2O<>;
    using Cache = std::conditional_t<Paged, DualCache<P, bf16>, FixedBudgetCache<P, bf16>>;
    static constexpr std::int32_t heads = 2, group = 2, dim = 64, total = 200, rows = 256;

    Cache cache = [] {
        CacheShape shape = shape_of(heads, group);
        shape.max_sequences = 2;
        if constexpr (Paged) {
            return Cache{
                shape, {.slab_pages = 100, .max_slabs = 1, .max_seq_len = total}, h2o_for_total(100)};
        } else {
            return Cache{shape, h2o_for_total(total)};
        }
    }();
    kvpolicy::cuda ctx{};
    Device<unsigned char> memory{cache.bytes().total()}, slab;
    Device<bf16> q{std::size_t{2} * heads * group * dim}, k{std::size_t{2} * heads * dim},
        v{std::size_t{2} * heads * dim}, out{std::size_t{2} * heads * group * dim};
    Device<float> masses{std::size_t{2} * heads * rows};
    Device<std::uint32_t> status{std::vector<std::uint32_t>(2, 0)};
    Device<unsigned char> workspace;

    Hand() : slab(slab_bytes()), workspace((bind(), needed())) {}
    std::size_t slab_bytes() const {
        if constexpr (Paged) {
            return cache.slab_bytes();
        } else {
            return 0;
        }
    }
    void bind() {
        cache.bind(ctx, memory.data(), memory.size());
        if constexpr (Paged) {
            cache.add_slab(ctx, slab.data(), slab.size());
        }
    }
    std::size_t needed() const {
        return std::max(step_workspace_bytes<Dims>(ctx, cache.layer(0), 2),
                        append_workspace_bytes(ctx, cache.layer(0), {.batch = 2}));
    }
    [[nodiscard]] StepIO<bf16> io() const {
        StepIO<bf16> io = cache.hnd(q.data(), k.data(), v.data(), out.data(), {2, 1});
        io.batch = {.count = 2, .length = 1};
        return io;
    }
    [[nodiscard]] plane_view<const float> plane() const {
        return view_bhs<const float>(masses.data(), 2, heads, rows);
    }
    /// A step of the library's, one of an engine's, and a token of both layers' lengths: two tokens.
    void two_tokens(const kvpolicy::cuda& on) {
        kvpolicy::step<Dims>(on, cache.layer(0), io(), workspace, {.status = status.data()});
        cache.advance(on, {2});
        kvpolicy::append(on, cache.layer(0), io(), workspace, {.status = status.data()});
        kvpolicy::observe(on, cache.layer(0), {2}, plane(), {}, {.status = status.data()});
        cache.advance(on, {2});
    }
    void fill(std::mt19937& generator) const {
        CallTensors<bf16> in(cache.shape(), 2, 1, Scores::random, generator);
        write(q, in.q.data);
        write(k, in.k.data);
        write(v, in.v.data);
        std::vector<float> numbers(masses.size());
        std::uniform_real_distribution<float> uniform;
        for (float& x : numbers) {
            x = uniform(generator);
        }
        write(masses, numbers);
    }
    [[nodiscard]] std::vector<unsigned char> content(std::int32_t seq) const {
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, seq));
        cache.snapshot(ctx, seq, blob.data(), blob.size());
        return blob;
    }
    [[nodiscard]] std::vector<float> scores() const {
        const auto ref = cache.layer(0);
        return fetch_from(ref.score, 2 * ref.rows);
    }
};

template <bool Paged>
void check_graph() {
    Hand<Paged> captured, direct;
    std::mt19937 generator(3), again(3);
    captured.fill(generator);
    direct.fill(again);
    const Captured graph([&](const kvpolicy::cuda& on) { captured.two_tokens(on); });
    direct.two_tokens(direct.ctx);  // a capture begins with the call itself
    for (int t = 0; t < 90; ++t) {
        captured.fill(generator);
        direct.fill(again);
        graph.replay();
        direct.two_tokens(direct.ctx);
    }
    CHECK(captured.status.read() == std::vector<std::uint32_t>{0, 0});
    for (std::int32_t seq = 0; seq < 2; ++seq) {
        const bool same = captured.content(seq) == direct.content(seq);
        CHECK(same);
        CHECK(captured.cache.length(captured.ctx, seq) == 182);
    }
}

}  // namespace

TEST_CASE("steps, append and observe in a graph") {
    check_graph<false>();
    check_graph<true>();
}

TEST_CASE("what is no mass counts as 0, and is reported") {
    Hand<false> hand;
    std::mt19937 generator(4);
    hand.fill(generator);
    append(hand.ctx, hand.cache.layer(0), hand.io(), hand.workspace, {.status = hand.status.data()});
    std::vector<float> numbers(hand.masses.size(), 0.5f);
    for (const float bad : {NAN, INFINITY, -0.25f}) {
        write(hand.status, {0, 0});
        numbers[std::size_t{3} * Hand<false>::rows] = bad;  // entry 1, head 1
        numbers[Hand<false>::rows + 1] = NAN;               // not in use
        write(hand.masses, numbers);
        const std::vector<float> before = hand.scores();
        observe(hand.ctx, hand.cache.layer(0), {2}, hand.plane(), {}, {.status = hand.status.data()});
        CHECK(hand.status.read() == std::vector<std::uint32_t>{0, status_nan_score});
        const auto ref = hand.cache.layer(0);
        const std::vector<float> after = hand.scores();
        for (std::int32_t pair = 0; pair < 4; ++pair) {
            const auto row = static_cast<std::size_t>(pair / 2 * ref.rows + pair % 2 * (ref.rows / 2));
            CHECK(after[row] == before[row] + (pair == 3 ? 0.0f : 0.5f));
        }
    }
    write(hand.status, {0, 0});
    const Device<std::int32_t> seq_ids(std::vector<std::int32_t>{5, -1});
    const std::vector<float> before = hand.scores();
    observe(hand.ctx, hand.cache.layer(0), {.count = 2, .seq_ids = seq_ids.data()}, hand.plane(), {},
            {.status = hand.status.data()});
    CHECK(hand.status.read() == std::vector<std::uint32_t>{status_bad_length, 0});
    CHECK(hand.scores() == before);
    observe(hand.ctx, hand.cache.layer(0), {2}, hand.plane());  // a status is no must
}

TEST_CASE("what is refused") {
    Hand<false> hand;
    auto masses = hand.plane();
    masses.length = Hand<false>::total - 1;
    CHECK_REFUSED(observe(hand.ctx, hand.cache.layer(0), {2}, masses), "masses: 2 x 2 x 199");
    masses = hand.plane();
    masses.data = nullptr;
    CHECK_REFUSED(observe(hand.ctx, hand.cache.layer(0), {2}, masses), "masses: null");
    CHECK_REFUSED(observe(hand.ctx, hand.cache.layer(0), {3}, hand.plane()), "batch.count");
    CHECK_REFUSED(observe(hand.ctx, hand.cache.layer(0), {.count = 2, .length = 2}, hand.plane()),
                  "batch.length");
    auto io = hand.io();
    io.cu_seqlens = reinterpret_cast<const std::int32_t*>(hand.masses.data());
    CHECK_REFUSED(append(hand.ctx, hand.cache.layer(0), io, hand.workspace),
                  "io.cu_seqlens: given is not allowed; it must be null in append");

    FixedBudgetCache<Observed, bf16> pooled(shape_of(3, 1), even({.pool = 3}));
    const Device<unsigned char> more(pooled.bytes().total());
    pooled.bind(hand.ctx, more.data(), more.size());
    const Device<float> plane(std::size_t{3} * 3 * 70);
    CHECK_REFUSED(observe(hand.ctx, pooled.layer(0), {3}, view_bhs<const float>(plane.data(), 3, 3, 70)),
                  "decode steps do not pool");
}
