// Attention over one key is its value: so a window of 1 sends every bit pattern of a storage type through the
// conversions of each instruction set, in decode and in prefill, and must give it back.
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"

#include <doctest/doctest.h>

using namespace kvpolicy;

namespace {

template <class T>
void check_values(const host& ctx, bool steps) {
    constexpr std::int32_t dim = 256, length = 256;
    test::Tensor<T> q(1, 1, length, dim), k(1, 1, length, dim), v(1, 1, length, dim), out(1, 1, length, dim);
    q.fill(0.5f);
    k.fill(0.25f);
    for (std::size_t i = 0; i < v.data.size(); ++i) {
        v.data[i].bits = static_cast<std::uint16_t>(i);
    }
    using P = Policy<Window<1>>;
    test::BoundCache<P, T> under_test(
        ctx, {.query_heads = 1, .kv_heads = 1, .head_dim_qk = dim, .head_dim_vo = dim});
    std::int32_t at = 0;
    for (const std::int32_t chunk : test::chunks_of(length, {steps ? 1 : 0})) {
        const Batch batch{.count = 1, .length = chunk};
        test::call<P, T>(ctx, under_test, 0, batch, q.tokens(at, chunk), k.tokens(at, chunk),
                         v.tokens(at, chunk), out.tokens(at, chunk), {}, steps);
        under_test.cache.advance(ctx, batch);
        at += chunk;
    }
    int wrong = 0;
    for (std::size_t i = 0; i < v.data.size(); ++i) {
        const float x = static_cast<float>(v.data[i]), y = static_cast<float>(out.data[i]);
        wrong += x == y || (x != x && y != y) ? 0 : 1;
    }
    CAPTURE(steps);
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE_TEMPLATE("every bit pattern of a value survives attention over one key", T, bf16, fp16) {
    check_values<T>(host(1, isa::portable), true);
    check_values<T>(host(1, isa::portable), false);
    check_values<T>(host(1), true);
    check_values<T>(host(1), false);
}
