// What a call on a device refuses as the host does, with the host's sentence, and nothing enqueued.
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>

#include "../support/device.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

constexpr CacheShape shape{.max_sequences = 2,
                           .query_heads = 2,
                           .kv_heads = 2,
                           .head_dim_qk = 8,
                           .head_dim_vo = 8,
                           .max_draft_tokens = 5};
constexpr std::int32_t length = 5;

/// A cache on the device, and tensors of two sequences of up to five tokens.
template <class P>
struct Calls {
    kvpolicy::cuda ctx;
    FixedBudgetCache<P, float> cache;
    Device<unsigned char> memory;
    Device<float> rows{std::vector<float>(2 * 2 * length * 8, 0.5f)},
        scores{std::vector<float>(2 * 2 * length)};

    explicit Calls(const P& policy) : cache(shape, policy), memory(cache.bytes().total()) {
        cache.bind(ctx, memory.data(), memory.size());
    }
    [[nodiscard]] test::Extras given() const {
        return {.scores = view_bhs<const float>(scores.data(), 2, 2, length)};
    }
    /// 0: a step, 1: a prefill, 2: a draft.
    void call(int which, const Batch& batch, const test::Extras& extras) {
        const auto ref = cache.layer(0);
        const Device<unsigned char> provided(workspace_bytes(ctx, ref, {.batch = 2, .tokens = length}));
        const Device<float> result(rows.size());
        const auto in = view_bhsd<const float>(rows.data(), 2, 2, length, 8);
        const auto out = view_bhsd(result.data(), 2, 2, length, 8);
        if (which == 0) {
            step(ctx, ref, test::step_io(batch, in, in, in, out, extras), provided);
        } else if (which == 1) {
            prefill(ctx, ref, test::step_io(batch, in, in, in, out, extras), provided);
        } else {
            append_draft(ctx, ref, test::step_io(batch, in, in, in, out, extras), provided);
        }
        ok(cudaDeviceSynchronize());
    }
};

}  // namespace

TEST_CASE("a step of several tokens, a chunk longer than its tensors, and scores that are missing") {
    using P = Policy<Sink<1>, Window<2>, TopKBudget<3>>;
    Calls<P> calls(P{});
    for (const int which : {0, 1, 2}) {
        CHECK_REFUSED(calls.call(which, {.count = 2, .length = 1}, {}),
                      "io.scores: null is not allowed; it must be fp32 scores, since this policy's "
                      "scores are given");
        CHECK_REFUSED(calls.call(which, {.count = 2, .length = 6}, calls.given()), "batch.length: 6");
        calls.call(which, {.count = 2, .length = 1}, calls.given());
    }
    CHECK_REFUSED(calls.call(0, {.count = 2}, calls.given()),
                  "batch.length: 5 is not allowed; it must be 0 to 1");
}

TEST_CASE("another device than the cache's, and memory that is not a device's") {
    using P = Policy<Sink<1>, Window<2>, TopKBudget<3>>;
    Calls<P> calls(P{});
    const kvpolicy::cuda mine = calls.ctx;
    const auto other = [&](int which) {
        int here = 0;
        ok(cudaGetDevice(&here));
        calls.ctx = {mine.stream, here + 1};  // whether there is one or not: it is not asked for anything
        CHECK_REFUSED(calls.call(which, {.count = 2, .length = 1}, calls.given()),
                      "the one whose memory the cache is bound to");
        CHECK_REFUSED(calls.cache.advance(calls.ctx, {.count = 2}),
                      "the one whose memory the cache is bound to");
        CHECK_REFUSED(calls.cache.fork(calls.ctx, 0, 1), "the one whose memory the cache is bound to");
        CHECK_REFUSED(calls.cache.clear(calls.ctx, 0), "the one whose memory the cache is bound to");
        int now = -1;
        ok(cudaGetDevice(&now));
        CHECK(now == here);
        calls.ctx = mine;
    };
    for (const int which : {0, 1, 2}) {
        other(which);
    }
    int pageable = 0, here = 0;
    ok(cudaGetDevice(&here));
    ok(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, here));
    std::vector<unsigned char> of_host(calls.cache.bytes().total());
    FixedBudgetCache<P, float> unbound(shape, P{});
    if (pageable == 0) {
        CHECK_REFUSED(unbound.bind(mine, of_host.data(), of_host.size()),
                      "buffer: host memory is not allowed; it must be device memory");
    }
    calls.call(0, {.count = 2, .length = 1}, calls.given());  // and all still works
    CHECK(calls.cache.length(mine, 1) == 0);
    calls.cache.advance(mine, {.count = 2});
    CHECK(calls.cache.length(mine, 1) == 1);
    const HeadUsage full = calls.cache.usage(mine, 0, 1, 1);
    CHECK(full.sinks == 1);
    CHECK(full.size() == 1);
    CHECK(full.capacity == 6);
    CHECK_REFUSED(static_cast<void>(calls.cache.usage(mine, 0, 1, 2)), "head: 2");
    CHECK_REFUSED(static_cast<void>(calls.cache.length(mine, 2)), "seq: 2");
    CHECK_REFUSED(static_cast<void>(calls.cache.length(1)), "a call with a cuda context");
    CHECK_REFUSED(calls.cache.retained(0, 0, 0, nullptr), "export_heads");
}

TEST_CASE("scores beside a policy's own scorer") {
    using P = Policy<Sink<1>, Window<2>, TopKBudget<3>, LinearScorer<8>>;
    const Device<float> weight(std::vector<float>(2 * 16, 0.25f));
    Calls<P> calls(P{{}, {}, {}, {.heads = 2, .weights = {.weight = weight.data()}}});
    for (const int which : {0, 1, 2}) {
        CHECK_REFUSED(calls.call(which, {.count = 2, .length = 1}, calls.given()),
                      "io.scores: given is not allowed; it must be nothing, since this policy has a "
                      "scorer of its own");
        calls.call(which, {.count = 2, .length = 1}, {});
    }
}

TEST_CASE("a plane for sums that is longer than the chunk") {
    using P = Policy<Sink<1>, Window<2>, TopKBudget<3>>;
    for (const int which : {1, 2}) {
        const Device<float> lse(std::vector<float>(2 * 2 * length, 7.0f)), cut(lse.read());
        Calls<P> calls(P{}), other(P{});
        test::Extras extras = calls.given();
        extras.lse = view_bhs(lse.data(), 2, 2, length);
        calls.call(which, {.count = 2, .length = 2}, extras);
        test::Extras of_two = other.given();
        of_two.lse = {cut.data(), 2, 2, 2, 2 * length, length};
        other.call(which, {.count = 2, .length = 2}, of_two);
        CHECK(lse.read() == cut.read());
        CHECK(lse.read()[1] != 7.0f);
        CHECK(lse.read()[2] == 7.0f);
        CHECK_REFUSED(calls.call(which, {.count = 2, .length = 2},
                                 {.scores = extras.scores, .lse = view_bhs(lse.data(), 2, 2, 1)}),
                      "lse: 2 x 2 x 1 is not allowed; it must be 2 x 2 x at least 2");
    }
}

TEST_CASE("what attention refuses of a chunk's keys is refused before the cache has changed") {
    using P = Policy<Sink<1>, Window<2>, TopKBudget<3>>;
    using Dims = head_dims<64>;
    const kvpolicy::cuda ctx;
    FixedBudgetCache<P, bf16> cache(shape);
    const Device<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, memory.data(), memory.size());
    const Device<unsigned char> workspace(
        workspace_bytes<Dims>(ctx, cache.layer(0), {.batch = 2, .tokens = length}));
    const Device<bf16> rows(std::vector<bf16>(2 * 2 * length * 8, bf16{0.5f})), result(rows.size());
    const Device<float> scores(std::vector<float>(2 * 2 * length));
    const test::Extras extras{.scores = view_bhs<const float>(scores.data(), 2, 2, length)};
    const auto in = view_bhsd<const bf16>(rows.data(), 2, 2, length, 8);
    auto backwards = in;
    backwards.data += (length - 1) * 8;
    backwards.row_stride = -8;
    const auto out = view_bhsd(result.data(), 2, 2, length, 8);
    const std::vector<unsigned char> before = memory.read();
    const Batch batch{.count = 2, .length = 3}, one{.count = 2, .length = 1};
    for (const bool drafts : {false, true}) {
        const auto call = [&](const Batch& of, const auto& k, const auto& v) {
            if (drafts) {
                append_draft<Dims>(ctx, cache.layer(0), test::step_io(of, in, k, v, out, extras), workspace);
            } else {
                prefill<Dims>(ctx, cache.layer(0), test::step_io(of, in, k, v, out, extras), workspace);
            }
        };
        CHECK_REFUSED(call(batch, backwards, in), "k: a view with a row stride of -8 is not allowed");
        CHECK_REFUSED(call(batch, in, backwards), "v: a view with a row stride of -8 is not allowed");
        CHECK(memory.read() == before);
        if (drafts) {
            call(one, backwards, backwards);  // one row is a row
        }
    }
}

TEST_CASE("run-time parts that nobody set") {
    using P = Policy<Sink<>, Window<2>, TopKBudget<3>>;
    CHECK_REFUSED(Calls<P>(P{}),
                  "sinks: not set is not allowed; it must be a number or an array by layer and head");
}
