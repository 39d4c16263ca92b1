// A million steps: bounded memory and exact ranking, against a selection from all scores;
// positions beyond 32 bits.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/loops.hpp"

#include <doctest/doctest.h>

#include <numeric>
#include <utility>

using namespace kvpolicy;

namespace {

using P = Policy<Sink<2>, Window<3>, TopKBudget<>, Decay<1>>;
constexpr std::int32_t heads = 3, dim = 8;
constexpr std::int32_t budgets[heads] = {12, 9, 7};

/// A score that anybody can compute again: multiples of 1/1024 in [0, 64).
float score_of(std::int32_t head, position_t t) {
    auto x = static_cast<std::uint64_t>(t) * 0x9e3779b97f4a7c15u +
             static_cast<std::uint64_t>(head) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebu;
    x ^= x >> 29;
    // Head 1 has few values, and so many ties.
    return head == 1 ? static_cast<float>(x % 50) : static_cast<float>(x % 65536) / 1024.0f;
}

/// The positions that a head must hold at query q: sinks, window, and the best of all keys between,
/// ties to the older.
std::vector<position_t> selection(std::int32_t head, float log_gamma, position_t q,
                                  std::vector<position_t>& scratch) {
    scratch.resize(static_cast<std::size_t>(q - 3 - 2 + 1));
    std::iota(scratch.begin(), scratch.end(), position_t{2});
    const auto better = [&](position_t a, position_t b) {
        const double of_a = double(score_of(head, a)) - double(a) * double(log_gamma);
        const double of_b = double(score_of(head, b)) - double(b) * double(log_gamma);
        return of_a != of_b ? of_a > of_b : a < b;
    };
    const auto kept = scratch.begin() + std::min<std::ptrdiff_t>(budgets[head], std::ssize(scratch));
    std::nth_element(scratch.begin(), kept, scratch.end(), better);
    std::vector<position_t> held(scratch.begin(), kept);
    for (const position_t t : {position_t{0}, position_t{1}, q - 2, q - 1, q}) {
        held.push_back(t);
    }
    std::sort(held.begin(), held.end());
    return held;
}

/// `slopes`: with a lowered rebase limit, multiples of a power of two only, so that priorities are
/// exact under any base.
void decode(const float (&slopes)[heads], position_t limit, std::int32_t steps, std::int32_t checkpoint) {
    const host ctx(1);
    const P policy{{}, {}, TopKBudget<>{per_head(budgets, 1, heads)}, Decay<1>{per_head(slopes, 1, heads)}};
    test::BoundCache<P, float> under_test(
        ctx, {.query_heads = heads, .kv_heads = heads, .head_dim_qk = dim, .head_dim_vo = dim}, policy,
        nullptr, {}, limit);
    CHECK(under_test.memory.size() < 10000);
    const auto ref = under_test.cache.layer(0);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = 1}));
    test::Tensor<float> x(1, heads, 1, dim), out(1, heads, 1, dim);
    test::Plane<float> scores(1, heads, 1);
    std::vector<position_t> scratch;
    bool exact = true, finite = true;
    for (position_t q = 0; q < steps; ++q) {
        for (std::int32_t h = 0; h < heads; ++h) {
            x.view().row(0, h, 0)[0] = static_cast<float>(q % 7);
            scores.at(0, h, 0) = score_of(h, q);
        }
        step(ctx, ref,
             {.q = x.view(),
              .k = x.view(),
              .v = x.view(),
              .out = out.view(),
              .batch = {.count = 1},
              .scores = scores.view()},
             workspace);
        under_test.cache.advance(ctx, {.count = 1});
        finite = finite && std::isfinite(out.data[0]);
        // Around rebasing too, where the default limit is not reached.
        if (q % checkpoint == checkpoint - 1 || q == limit + 5 || q == 3 * limit - 1 || q == 3 * limit) {
            for (std::int32_t h = 0; h < heads && q > 100; ++h) {
                const bool same = under_test.sorted(0, 0, h) == selection(h, slopes[h], q, scratch);
                if (!same && exact) {
                    CAPTURE(q);
                    CAPTURE(h);
                    CHECK(same);
                }
                exact = exact && same;
            }
        }
    }
    CHECK(exact);
    CHECK(finite);
    CHECK(under_test.cache.length(0) == steps);
}

}  // namespace

TEST_CASE("a million steps keep the best of all keys") {
    const float slopes[] = {-0x1p-10f, 0.0f, -0.003f};
    decode(slopes, rebase_limit, 1000000, 125000);
}

TEST_CASE("rebasing changes nothing where priorities are exact") {
    const float slopes[] = {-0x1p-10f, 0.0f, -0x1.8p-8f};
    constexpr std::int32_t steps = test::rounds(100000, 20000);
    decode(slopes, 1000, steps, steps / 8);
}

namespace {

constexpr std::int32_t length = 90;

/// Feeds a sequence whose first token is at position `shift` as far as the cache can tell: after the first
/// 40 tokens, positions and length move up. Returns held positions, moved back, after every later call,
/// and the outputs.
std::pair<std::vector<position_t>, std::vector<float>> run_shifted(position_t shift,
                                                                   const std::vector<std::int32_t>& sizes,
                                                                   bool steps) {
    using Q = Policy<Sink<2>, Window<4>, TopKBudget<9>, Decay<1>>;
    const host ctx(1);
    const Q policy{{}, {}, {}, Decay<1>{-0x1p-10f}};
    test::BoundCache<Q, float> under_test(
        ctx, {.query_heads = 2, .kv_heads = 1, .head_dim_qk = dim, .head_dim_vo = dim}, policy);
    std::mt19937 generator(4);
    test::Tensor<float> q(1, 2, length, dim), k(1, 1, length, dim), v(1, 1, length, dim),
        out(1, 2, length, dim);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> scores(1, 1, length);
    for (std::int32_t t = 0; t < length; ++t) {
        scores.at(0, 0, t) = std::round(score_of(0, t)) / 1024.0f;
    }
    std::vector<position_t> held;
    const auto feed = [&](std::int32_t from, std::int32_t count, bool as_step) {
        const Batch batch{.count = 1, .length = count};
        test::call<Q, float>(ctx, under_test, 0, batch, std::as_const(q).tokens(from, count),
                             std::as_const(k).tokens(from, count), std::as_const(v).tokens(from, count),
                             out.tokens(from, count), {.scores = scores.tokens(from, count)}, as_step);
        under_test.cache.advance(ctx, batch);
    };
    feed(0, 40, false);
    const auto ref = under_test.cache.layer(0);
    ref.length[0] += shift;
    // Sinks are found by their rows, the ring by position mod w: a shift by a multiple of w keeps both.
    for (std::int32_t r = 0; r < ref.used(0, 0); ++r) {
        ref.position[r] += r < 2 ? 0 : shift;
    }
    std::int32_t at = 40;
    for (const std::int32_t chunk : test::chunks_of(length - 40, sizes)) {
        feed(at, chunk, steps);
        at += chunk;
        for (const position_t t : under_test.sorted(0, 0, 0)) {
            held.push_back(t < 2 ? t : t - shift);
        }
    }
    return {held, out.data};
}

}  // namespace

TEST_CASE("positions beyond 32 bits, and the first rebase at 2^29") {
    constexpr position_t near_rebase = rebase_limit - 60, near_31_bits = (position_t{1} << 31) - 60;
    static_assert(near_rebase % 4 == 0 && near_31_bits % 4 == 0);
    for (const std::vector<std::int32_t>& sizes : {std::vector<std::int32_t>{1}, {0}, {7, 1, 12}}) {
        const bool steps = sizes[0] == 1;
        const auto plain = run_shifted(0, sizes, steps);
        for (const position_t shift :
             {position_t{1} << 33, near_rebase, near_31_bits, (position_t{1} << 40) + 4}) {
            CAPTURE(shift);
            const auto shifted = run_shifted(shift, sizes, steps);
            CHECK(shifted.first == plain.first);
            CHECK(shifted.second == plain.second);
        }
    }
}
