// Caches of observed policies: they hold what their lifetimes say, step by step and in every way to take a
// prompt, and their outputs are attention through these lifetimes.
#include "../../support/observed_harness.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace kvpolicy;
using test::BaselineCase;
using test::pool;
using test::shape_of;
using test::Tensor;
using test::tensor;

namespace {

std::vector<position_t> expected_at(const BaselineCase& one, std::int32_t h, std::int32_t q) {
    std::vector<position_t> held;
    for (std::int32_t t = 0; t <= std::min(q, one.length - 1); ++t) {
        const std::int32_t end = one.expiry[static_cast<std::size_t>(std::int64_t{h} * one.length + t)];
        if (q < end || end == one.length) {
            held.push_back(t);
        }
    }
    return held;
}

/// The prompt in one call, the rest in steps; what is held after each, and all outputs.
template <class T, class Cache>
void follow(const host& ctx, const BaselineCase& one, Cache& bound, const Tensor<T>& q, const Tensor<T>& k,
            const Tensor<T>& v, Tensor<T>& out) {
    constexpr bool pooled = requires { bound.reserve(ctx, Batch{}); };
    for (std::int32_t at = 0; at < one.length;) {
        const bool prompt = at < one.prompt;
        const std::int32_t count = prompt ? std::min(one.prompt, one.length) - at : 1;
        const Batch batch{.count = 1, .length = count};
        if constexpr (pooled) {
            bound.reserve(ctx, batch);
        }
        using P = std::remove_cvref_t<decltype(bound.cache.policy())>;
        test::call_ref<P, T>(ctx, bound.cache.layer(0), batch, q.tokens(at, count), k.tokens(at, count),
                             v.tokens(at, count), out.tokens(at, count), {}, !prompt);
        bound.cache.advance(ctx, batch);
        at += count;
        for (std::int32_t h = 0; h < one.kv_heads; ++h) {
            const std::vector<position_t> held = bound.sorted(0, 0, h);
            if (!prompt) {
                CHECK(held == expected_at(one, h, at - 1));
                continue;
            }
            if (at == one.length) {
                continue;  // what the prompt's end evicts is beyond the sequence
            }
            // One key may still wait for the next query, where the policy makes space for what is decoded.
            const std::vector<position_t> left = expected_at(one, h, at);
            std::int32_t more = 0;
            for (const position_t t : held) {
                const bool stays = std::binary_search(left.begin(), left.end(), t);
                more += stays ? 0 : 1;
                CHECK((stays ||
                       one.expiry[static_cast<std::size_t>(h * one.length) + static_cast<std::size_t>(t)] ==
                           at));
            }
            CHECK(more <= (one.kind == BaselineCase::snapkv ? 0 : 1));
            CHECK(held.size() - static_cast<std::size_t>(more) ==
                  static_cast<std::size_t>(
                      std::count_if(left.begin(), left.end(), [&](position_t t) { return t < at; })));
        }
    }
}

template <class T>
void check_caches() {
    for (const BaselineCase& one : test::baseline_cases()) {
        CAPTURE(one.seed);
        const Tensor<T> q = tensor<T>(one, 0), k = tensor<T>(one, 1), v = tensor<T>(one, 2);
        one.with_policy([&](const auto& policy) {
            using P = std::remove_cvref_t<decltype(policy)>;
            const host ctx(2);
            // Attention through the lifetimes.
            Tensor<T> expected(1, one.heads(), one.length, one.dim);
            std::vector<expiry_t> expiry(one.expiry.begin(), one.expiry.end());
            for (expiry_t& end : expiry) {
                end = end == one.length ? never : end;
            }
            const mask_view mask{view_bhs<const expiry_t>(expiry.data(), 1, one.kv_heads, one.length)};
            const kv_view<T> all{k.view(), v.view(), mask};
            const Sequences sequences{.batch = 1, .length = one.length};
            test::Workspace workspace(
                attend_workspace_bytes<T>(ctx, one.attention, q.view(), all, sequences));
            attend<T>(ctx, one.attention, q.view(), all, sequences, expected.view(), {}, workspace);
            for (const bool dual : {false, true}) {
                CAPTURE(dual);
                Tensor<T> out(1, one.heads(), one.length, one.dim);
                out.fill(-77.0f);
                const auto run = [&](auto& bound) { follow<T>(ctx, one, bound, q, k, v, out); };
                if constexpr (!P::grows) {
                    if (!dual) {
                        test::BoundCache<P, T> bound(ctx, shape_of(one), policy, nullptr, one.attention);
                        run(bound);
                    }
                }
                if (dual || P::grows) {
                    test::BoundDual<P, T> bound(ctx, shape_of(one), pool, policy, nullptr, rebase_limit,
                                                one.attention);
                    run(bound);
                }
                double worst = 0.0;
                for (std::size_t i = 0; i < out.data.size(); ++i) {
                    const double off =
                        std::fabs(static_cast<double>(host_backend::to_compute(out.data[i])) -
                                  static_cast<double>(host_backend::to_compute(expected.data[i])));
                    worst = std::max(worst, off == off ? off : std::numeric_limits<double>::infinity());
                }
                CHECK(worst <= (std::is_same_v<T, float> ? 2e-5 : std::is_same_v<T, bf16> ? 0x1p-7 : 1e-12));
            }
        });
    }
}

}  // namespace

TEST_CASE("a cache holds what its lifetimes say, fp32") { check_caches<float>(); }
TEST_CASE("a cache holds what its lifetimes say, bf16") { check_caches<bf16>(); }
TEST_CASE("a cache holds what its lifetimes say, double") { check_caches<double>(); }
