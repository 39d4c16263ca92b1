// Bad input of a bounded cache: one sentence that names the argument, its value and what is allowed, and
// nothing written.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <utility>

using namespace kvpolicy;

namespace {

using P = Policy<Sink<>, Window<>, TopKBudget<>>;
P policy(std::int32_t s = 1, std::int32_t w = 3, std::int32_t k = 4) {
    return P{Sink<>{s}, Window<>{w}, TopKBudget<>{k}};
}

constexpr CacheShape good{.layers = 2,
                          .max_sequences = 3,
                          .query_heads = 4,
                          .kv_heads = 2,
                          .head_dim_qk = 16,
                          .head_dim_vo = 8,
                          .page_size = 1};

CacheShape with(std::int32_t CacheShape::*member, std::int32_t value) {
    CacheShape shape = good;
    shape.*member = value;
    return shape;
}

}  // namespace

TEST_CASE("a cache that was moved from is unbound, and the other goes on") {
    const host ctx{1};
    FixedBudgetCache<P, float> from(good, policy());
    std::vector<unsigned char> memory(from.bytes().total());
    from.bind(ctx, memory.data(), memory.size());
    FixedBudgetCache<P, float> to(std::move(from));
    CHECK(to.length(0) == 0);
    // What is left of it is what this test is about.
    CHECK_REFUSED(from.layer(0), "cache: unbound");                    // NOLINT(bugprone-use-after-move)
    CHECK_REFUSED(from.advance(ctx, {.count = 1}), "cache: unbound");  // NOLINT(bugprone-use-after-move)
    CHECK_REFUSED(from.length(0), "cache: unbound");                   // NOLINT(bugprone-use-after-move)
    CHECK_REFUSED(from.bind(ctx, memory.data(), memory.size()),        // NOLINT(bugprone-use-after-move)
                  "cache: moved from is not allowed");
    CHECK_REFUSED(static_cast<void>(from.rows(0)),  // NOLINT(bugprone-use-after-move)
                  "cache: moved from is not allowed; it must be one that still has its policy");
    CHECK(to.length(0) == 0);
    CHECK(to.rows(0) > 0);
    from = std::move(to);
    from.clear(ctx, 0);
    CHECK(from.length(0) == 0);
    CHECK_REFUSED(to.layer(0), "cache: unbound");  // NOLINT(bugprone-use-after-move)
}

TEST_CASE("a cache of a shape that cannot be") {
    using Cache = FixedBudgetCache<P, float>;
    const P p = policy();
    CHECK_REFUSED(Cache(with(&CacheShape::layers, 0), p), "layers: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(with(&CacheShape::max_sequences, 0), p),
                  "max_sequences: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(with(&CacheShape::kv_heads, 0), p),
                  "kv_heads: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(with(&CacheShape::query_heads, 5), p),
                  "query_heads: 5 is not allowed; it must be a multiple of kv_heads = 2");
    CHECK_REFUSED(Cache(with(&CacheShape::query_heads, 0), p), "query_heads: 0");
    CHECK_REFUSED(Cache(with(&CacheShape::query_heads, 1), p), "query_heads: 1");
    CHECK_REFUSED(Cache(with(&CacheShape::page_size, 0), p),
                  "page_size: 0 is not allowed; it must be 1 or more");
    for (const std::int32_t dim : {-8, 0, 1, 4, 65, 100, 1032, 2048}) {
        const std::string value =
            std::to_string(dim) + " is not allowed; it must be a multiple of 8 up to 1024";
        CHECK_REFUSED(Cache(with(&CacheShape::head_dim_qk, dim), p), "head_dim of keys: " + value);
        CHECK_REFUSED(Cache(with(&CacheShape::head_dim_vo, dim), p), "head_dim of values: " + value);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK_REFUSED(Cache(good, p, nullptr, AttentionParams{infinity, 0.0f}), "scale");
    CHECK_REFUSED(Cache(good, p, nullptr, AttentionParams{-infinity, 0.0f}), "scale");
    CHECK_REFUSED(Cache(good, p, nullptr, AttentionParams{std::nanf(""), 0.0f}), "scale");
    CHECK_REFUSED(Cache(good, p, nullptr, AttentionParams{0.0f, -1.0f}), "logits_soft_cap: -1");
    CHECK_REFUSED(Cache(good, p, nullptr, AttentionParams{0.0f, std::nanf("")}), "logits_soft_cap");
}

TEST_CASE("a cache for numbers that no policy can have, by layer and head") {
    using Cache = FixedBudgetCache<P, float>;
    CHECK_REFUSED(Cache(good, policy(-1)),
                  "sinks of layer 0, head 0: -1 is not allowed; it must be 0 or more");
    CHECK_REFUSED(Cache(good, policy(1, 0)),
                  "window of layer 0, head 0: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(good, policy(1, -4)), "window of layer 0, head 0: -4");
    CHECK_REFUSED(Cache(good, policy(1, 3, -1)),
                  "budget k of layer 0, head 0: -1 is not allowed; it must be 0 or more");
    CHECK_REFUSED(Cache(good, policy(1, 3, unlimited)),
                  "budget k of layer 0, head 0: unlimited is not allowed");
    CHECK_REFUSED(
        Cache(good, policy(2000000000, 3, 2000000000)),
        "sinks + window + draft tokens + budget k of layer 0, head 0: 4000000003 is not allowed; it must be "
        "2147483646 at most, 2^31 - 1 less a page");
    CHECK_REFUSED(Cache(good, policy(1, 3, std::numeric_limits<std::int32_t>::max() - 4)),
                  "2147483647 is not");
    CHECK_REFUSED(Cache(with(&CacheShape::page_size, std::numeric_limits<std::int32_t>::max()), policy()),
                  "head 0: 8 is not allowed; it must be 0 at most");
    CHECK_REFUSED(
        Cache(with(&CacheShape::max_draft_tokens, std::numeric_limits<std::int32_t>::max()), policy()),
        "head 0: 2147483655 is not allowed");

    const std::int32_t budgets[] = {4, 4, 4, -7};  // [2 layers, 2 heads]
    CHECK_REFUSED(Cache(good, P{Sink<>{1}, Window<>{3}, TopKBudget<>{per_head(budgets, 2, 2)}}),
                  "budget k of layer 1, head 1: -7");
    // Arrays that do not reach every head.
    CHECK_REFUSED(
        Cache(with(&CacheShape::layers, 3), P{Sink<>{1}, Window<>{3}, TopKBudget<>{per_head(budgets, 2, 2)}}),
        "array of budgets: 2 layers x 2 heads is not allowed; it must be 1 or at least 3 layers x 1 or at "
        "least 2");
    CHECK_REFUSED(Cache(CacheShape{.layers = 2,
                                   .max_sequences = 3,
                                   .query_heads = 4,
                                   .kv_heads = 4,
                                   .head_dim_qk = 16,
                                   .head_dim_vo = 8,
                                   .page_size = 1},
                        P{Sink<>{per_head(budgets, 1, 2)}, Window<>{3}, TopKBudget<>{1}}),
                  "array of sinks: 1 layers x 2 heads");
    CHECK_REFUSED(Cache(good, P{Sink<>{1}, Window<>{per_head(budgets, 0, 2)}, TopKBudget<>{1}}),
                  "array of windows: 0 layers");

    using D = Policy<Window<3>, TopKBudget<4>, Decay<dynamic>>;
    using Decayed = FixedBudgetCache<D, float>;
    CHECK_REFUSED(Decayed(good, D{{}, {}, Decay<dynamic>{0.5f, 1}}),
                  "log gamma of layer 0, head 0: 0.5 is not allowed");
    CHECK_REFUSED(Decayed(good, D{{}, {}, Decay<dynamic>{std::nanf(""), 1}}),
                  "log gamma of layer 0, head 0: ");
    CHECK_REFUSED(Decayed(good, D{{}, {}, Decay<dynamic>{-std::numeric_limits<float>::infinity(), 1}}),
                  "log gamma");
    CHECK_REFUSED(Decayed(good, D{{}, {}, Decay<dynamic>{-0.5f, 0}}), "decay step n of layer 0, head 0: 0");
    using G = Policy<Window<3>, ThresholdGate<above>, TopKBudget<4>>;
    using Gated = FixedBudgetCache<G, float>;
    CHECK_REFUSED(Gated(good, G{{}, ThresholdGate<above>{std::nanf("")}, {}}), "tau of layer 0, head 0: ");
}

TEST_CASE("sizes whose product no address space holds do not wrap to small ones") {
    const std::string text =
        " is not allowed; it must be less: layers, sequences, heads, rows and head_dim multiply";
    // 2^21 sequences x 2 heads x 2^31 rows x 16 numbers x 4 bytes = 2^59, and with 2^24 sequences 2^62.
    const P large = policy(0, 1, std::numeric_limits<std::int32_t>::max() - 3);
    using Cache = FixedBudgetCache<P, float>;
    const Cache fits(with(&CacheShape::max_sequences, 1 << 20), large);
    CHECK(fits.bytes().total() > std::size_t{1} << 58);
    // bytes() answers before anything is allocated that grows with the sequences.
    const Cache crowded(with(&CacheShape::max_sequences, std::numeric_limits<std::int32_t>::max()), policy());
    CHECK(crowded.bytes().total() > std::size_t{1} << 41);
    CHECK_REFUSED(Cache(with(&CacheShape::max_sequences, 1 << 24), large),
                  "bytes of the cache: 2^62 or more" + text);
    constexpr std::int32_t huge = 1 << 30;
    CHECK(detail::product_of(std::int64_t{huge}, huge, 4) == detail::max_bytes + 1);
    CHECK(detail::product_of(std::size_t{huge}, huge, 3) == (std::size_t{3} << 60));
    CHECK(detail::product_of(std::size_t{huge}, huge, huge, 0) == 0);
    CHECK(detail::product_of(7) == 7);
}

TEST_CASE("memory: unbound, null, too small by a byte") {
    const host ctx(1);
    FixedBudgetCache<P, float> cache(good, policy());
    CHECK_REFUSED(cache.layer(0),
                  "cache: unbound is not allowed; it must be bound to memory by bind() first");
    CHECK_REFUSED(cache.length(0), "cache: unbound");
    CHECK_REFUSED(cache.clear(ctx, 0), "cache: unbound");
    CHECK_REFUSED(cache.advance(ctx, {.count = 1}), "cache: unbound");
    CHECK_REFUSED(cache.usage(0, 0, 0), "cache: unbound");
    CHECK_REFUSED(cache.retained(0, 0, 0, nullptr), "cache: unbound");
    std::vector<unsigned char> memory(cache.bytes().total(), 0xab);
    CHECK_REFUSED(cache.bind(ctx, nullptr, memory.size()),
                  "buffer: null is not allowed; it must be memory of bytes().total()");
    CHECK_REFUSED(
        cache.bind(ctx, memory.data(), memory.size() - 1),
        "buffer_bytes: " + std::to_string(memory.size() - 1) +
            " is not allowed; it must be at least bytes().total() = " + std::to_string(memory.size()));
    CHECK_REFUSED(cache.layer(0), "cache: unbound");
    CHECK(std::count(memory.begin(), memory.end(), 0xab) == std::ssize(memory));
    CHECK_REFUSED(cache.rebase_limit(0), "rebase_limit: 0 is not allowed; it must be 1 to 2^29");
    CHECK_REFUSED(cache.rebase_limit(rebase_limit + 1), "rebase_limit: 536870913");
    CHECK_REFUSED(cache.rebase_limit(-5), "rebase_limit: -5");
}

TEST_CASE("layers, sequences and heads out of range") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, good, policy());
    const std::vector<unsigned char> before = under_test.memory;
    auto& cache = under_test.cache;
    CHECK_REFUSED(cache.layer(2), "layer: 2 is not allowed; it must be 0 to 1");
    CHECK_REFUSED(cache.layer(-1), "layer: -1");
    CHECK_REFUSED(cache.rows(2), "layer: 2 is not allowed; it must be 0 to 1");
    CHECK_REFUSED(cache.rows(-1), "layer: -1");
    CHECK_REFUSED(workspace_bytes(ctx, cache.layer(0), {.batch = -1, .tokens = 1}),
                  "size.batch: -1 is not allowed; it must be 0 or more");
    CHECK_REFUSED(workspace_bytes(ctx, cache.layer(0), {.batch = 1, .tokens = -2}), "size.tokens: -2");
    CHECK_REFUSED(cache.length(3), "seq: 3 is not allowed; it must be 0 to 2");
    CHECK_REFUSED(cache.clear(ctx, -1), "seq: -1");
    CHECK_REFUSED(cache.usage(0, 0, 2), "head: 2 is not allowed; it must be 0 to 1");
    CHECK_REFUSED(cache.usage(2, 0, 0), "layer: 2");
    CHECK_REFUSED(cache.usage(0, 3, 0), "seq: 3");
    CHECK_REFUSED(cache.retained(0, 0, -1, nullptr), "head: -1");
    const std::int32_t far[] = {0, 3}, twice[] = {1, 1}, negative[] = {1, -2};
    CHECK_REFUSED(cache.advance(ctx, {.count = 2, .seq_ids = far}),
                  "batch.seq_ids[1]: 3 is not allowed; it must be 0 to 2");
    CHECK_REFUSED(cache.advance(ctx, {.count = 2, .seq_ids = twice}),
                  "batch.seq_ids[1]: 1 is not allowed; it must be a sequence that no other entry names");
    CHECK_REFUSED(cache.advance(ctx, {.count = 2, .q_len = negative}), "batch tokens[1]: -2");
    CHECK_REFUSED(cache.advance(ctx, {.count = 4}),
                  "batch.count: 4 is not allowed; it must be 0 to the cache's max_sequences, 3");
    CHECK_REFUSED(cache.advance(ctx, {.count = -1}), "batch.count: -1");
    CHECK(under_test.memory == before);
}

TEST_CASE("max_sequences named twice are found among any number of them, the first entry first") {
    const host ctx(1);
    using One = Policy<Window<1>>;
    for (const std::int32_t max_sequences : {63, 64, 65, 4096, 4097, 9000}) {
        test::BoundCache<One, float> under_test(
            ctx, {.max_sequences = max_sequences, .query_heads = 1, .kv_heads = 1, .head_dim = 8});
        std::vector<std::int32_t> named(static_cast<std::size_t>(max_sequences));
        for (std::int32_t i = 0; i < max_sequences; ++i) {
            named[static_cast<std::size_t>(i)] = max_sequences - 1 - i;
        }
        const Batch batch{.count = max_sequences, .seq_ids = named.data(), .length = 0};
        under_test.cache.advance(ctx, batch);
        named[40] = named[17];
        named[30] = named[29];
        CHECK_REFUSED(under_test.cache.advance(ctx, batch),
                      "batch.seq_ids[30]: " + std::to_string(named[29]) +
                          " is not allowed; it must be a sequence that no other entry names");
        named[30] = max_sequences - 1;
        CHECK_REFUSED(under_test.cache.advance(ctx, batch),
                      "batch.seq_ids[30]: " + std::to_string(max_sequences - 1));
        named[30] = max_sequences - 1 - 30;
        named[40] = max_sequences - 1 - 40;
        named.back() = named[0];
        CHECK_REFUSED(
            under_test.cache.advance(ctx, batch),
            "batch.seq_ids[" + std::to_string(max_sequences - 1) + "]: " + std::to_string(max_sequences - 1));
        CHECK(under_test.cache.length(max_sequences - 1) == 0);
    }
}

namespace {

/// A call with good arguments; tests spoil one of them.
struct Arguments {
    static constexpr std::int32_t count = 3, length = 5;
    test::Tensor<float> q{count, 4, length, 16}, k{count, 2, length, 16}, v{count, 2, length, 8},
        out{count, 4, length, 8};
    test::Plane<float> scores{count, 2, length, 0.5f}, lse{count, 4, length, -55.0f};
    test::Workspace memory;
    Batch batch{.count = count, .length = 1};
    rows_view<const float> q_view = std::as_const(q).view(), k_view = std::as_const(k).view(),
                           v_view = std::as_const(v).view();
    rows_view<float> out_view = out.view();
    test::Extras extras{.scores = scores.view(), .lse = lse.view()};
    workspace_view workspace = memory;

    explicit Arguments(std::size_t bytes) : memory(bytes) {
        q.fill(0.5f);
        k.fill(0.5f);
        v.fill(0.5f);
        out.fill(-55.0f);
    }
    Arguments(const Arguments&) = delete;
};

/// Spoils the arguments by `spoil`, and sees step, prefill (and attend, where it takes the argument) refuse
/// them with the text, nothing written.
class Refusals {
  public:
    Refusals() : ctx_(1), cache_(ctx_, good, policy()) {
        Arguments start(bytes());
        const Batch batch{.count = 3, .length = 5};
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            prefill(
                ctx_, cache_.cache.layer(layer),
                test::step_io(batch, start.q_view, start.k_view, start.v_view, start.out_view, start.extras),
                start.workspace);
        }
        cache_.cache.advance(ctx_, batch);
    }
    [[nodiscard]] std::size_t bytes() const {
        return workspace_bytes(ctx_, cache_.cache.layer(1), {.batch = 3, .tokens = 5});
    }

    void check(const std::string& text, const std::function<void(Arguments&)>& spoil, bool for_step = true,
               bool for_prefill = true, bool for_attend = true) {
        const auto ref = cache_.cache.layer(1);
        const std::vector<unsigned char> before = cache_.memory;
        for (int which = 0; which < 3; ++which) {
            Arguments a(bytes());
            spoil(a);
            CAPTURE(which);
            if (which == 0 && for_step) {
                CHECK_REFUSED(
                    (step(ctx_, ref,
                          test::step_io(a.batch, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                          a.workspace)),
                    text);
            } else if (which == 1 && for_prefill) {
                CHECK_REFUSED(
                    (prefill(ctx_, ref,
                             test::step_io(a.batch, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                             a.workspace)),
                    text);
            } else if (which == 2 && for_attend) {
                CHECK_REFUSED(
                    (attend(ctx_, ref,
                            {.q = a.q_view, .out = a.out_view, .batch = a.batch, .lse = a.extras.lse},
                            a.workspace)),
                    text);
            }
            CHECK(cache_.memory == before);
            CHECK(std::all_of(a.out.data.begin(), a.out.data.end(), [](float x) { return x == -55.0f; }));
            CHECK(std::all_of(a.lse.data.begin(), a.lse.data.end(), [](float x) { return x == -55.0f; }));
        }
    }

  private:
    host ctx_;
    test::BoundCache<P, float> cache_;
};

constexpr std::int32_t two_and_far[] = {0, 2, 3}, twice[] = {0, 2, 0}, below[] = {0, -1, 2};
constexpr std::int32_t minus_one[] = {1, -1, 0}, six[] = {1, 6, 0};

}  // namespace

TEST_CASE("batches: counts, sequences and lengths") {
    Refusals refusals;
    refusals.check("batch.count: 4 is not allowed; it must be 0 to the cache's max_sequences, 3",
                   [](Arguments& a) { a.batch.count = 4; });
    refusals.check("batch.count: -1", [](Arguments& a) { a.batch.count = -1; });
    refusals.check("batch.seq_ids[2]: 3 is not allowed; it must be 0 to 2",
                   [](Arguments& a) { a.batch.seq_ids = two_and_far; });
    refusals.check("batch.seq_ids[1]: -1", [](Arguments& a) { a.batch.seq_ids = below; });
    refusals.check("batch.seq_ids[2]: 0 is not allowed; it must be a sequence that no other entry names",
                   [](Arguments& a) { a.batch.seq_ids = twice; });
    refusals.check("batch tokens[1]: -1 is not allowed; it must be 0 to",
                   [](Arguments& a) { a.batch.q_len = minus_one; });
    refusals.check("batch tokens[0]: -3", [](Arguments& a) { a.batch.length = -3; });
    // A step takes one token, a chunk as many as q has.
    refusals.check(
        "batch tokens[0]: 2 is not allowed; it must be 0 to 1", [](Arguments& a) { a.batch.length = 2; },
        true, false);
    refusals.check(
        "batch tokens[0]: 6 is not allowed; it must be 0 to 5 (the length of q)",
        [](Arguments& a) { a.batch.length = 6; }, false, true, false);
    refusals.check(
        "batch tokens[1]: 6", [](Arguments& a) { a.batch.q_len = six; }, false, true, false);
}

TEST_CASE("what a batch leaves out is what q has") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, with(&CacheShape::max_draft_tokens, 5), policy());
    const auto ref = under_test.cache.layer(0);
    Arguments a(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 5}));
    const auto io = [&](const Batch& batch) {
        return test::step_io(batch, a.q_view, a.k_view, a.v_view, a.out_view, a.extras);
    };
    append_draft(ctx, ref, io({.count = 3}), a.workspace);
    CHECK(ref.num_draft[2] == 5);
    // A step takes one token: a chunk is not cut silently.
    CHECK_REFUSED((step(ctx, ref, io({.count = 3}), a.workspace)),
                  "batch tokens[0]: 5 is not allowed; it must be 0 to 1 (a step takes one token; prefill "
                  "takes chunks)");
    CHECK_REFUSED((attend(ctx, ref, io({}), a.workspace)), "batch tokens[0]: 5");
    prefill(ctx, ref, io({}), a.workspace);
    for (const std::int32_t seq : {0, 1, 2}) {
        CHECK(ref.appended[seq] == 5);
    }
    CHECK_REFUSED((step(ctx, ref, StepIO<float>{}, a.workspace)),
                  "q.batch: 0 is not allowed; it must be 1 or more where io.batch.count is not set");
    const std::int32_t edges[] = {0, 5};
    StepIO<float> packed = io({});
    packed.cu_seqlens = edges;
    CHECK_REFUSED((prefill(ctx, ref, packed, a.workspace)),
                  "io.batch.count: not set is not allowed; it must be the entries that io.cu_seqlens packs");
    packed.batch.count = 1;
    CHECK_REFUSED((attend(ctx, ref, packed, a.workspace)), "io.cu_seqlens: given");
}

TEST_CASE("a head_dim and its parts that contradict each other") {
    using Cache = FixedBudgetCache<P, float>;
    CacheShape shape = good;
    shape.head_dim = 16;  // head_dim_vo is 8
    CHECK_REFUSED(Cache(shape, policy()),
                  "head_dim_vo: 8 is not allowed; it must be head_dim = 16, or not set");
    shape.head_dim = 8;
    CHECK_REFUSED(Cache(shape, policy()), "head_dim_qk: 16 is not allowed; it must be head_dim = 8");
    shape.head_dim_qk = shape.head_dim_vo = 0;
    const Cache both(shape, policy());
    CHECK(both.shape().head_dim_qk == 8);
    CHECK(both.shape().head_dim_vo == 8);
    shape.head_dim = 0;
    CHECK_REFUSED(Cache(shape, policy()), "head_dim of keys: 0");
}

TEST_CASE("sizes that a workspace is asked for") {
    const host ctx(1);
    const FixedBudgetCache<P, float> unbound(good, policy());
    CHECK_REFUSED(unbound.workspace_bytes(ctx, {.batch = -1}),
                  "size.batch: -1 is not allowed; it must be 0 or more");
    CHECK_REFUSED(unbound.workspace_bytes(ctx, {.tokens = -2}),
                  "size.tokens: -2 is not allowed; it must be 0 or more");
    CHECK_REFUSED(unbound.step_workspace_bytes(ctx, -3), "size.batch: -3");
    CHECK_REFUSED(unbound.nhd(nullptr, nullptr, nullptr, nullptr, {.batch = -1}), "size.batch: -1");
    CHECK_REFUSED(unbound.hnd(nullptr, nullptr, nullptr, nullptr, {.tokens = -1}), "size.tokens: -1");
    // Needs no memory, and says what the bound cache says.
    test::BoundCache<P, float> bound(ctx, good, policy());
    CHECK(unbound.workspace_bytes(ctx, {.batch = 3, .tokens = 5}) ==
          bound.cache.workspace_bytes(ctx, {.batch = 3, .tokens = 5}));
    CHECK(unbound.workspace_bytes(ctx, {.batch = 3, .tokens = 5}) >=
          workspace_bytes(ctx, bound.cache.layer(0), {.batch = 3, .tokens = 5}));
    CHECK(unbound.step_workspace_bytes(ctx, 3) == bound.cache.step_workspace_bytes(ctx, 3));
}

TEST_CASE("run-time parts that nobody set") {
    using Cache = FixedBudgetCache<P, float>;
    CHECK_REFUSED(
        Cache{good},
        "sinks: not set is not allowed; it must be a number or an array by layer and head: Sink<>{s}");
    CHECK_REFUSED(Cache(good, P{Sink<>{1}, {}, TopKBudget<>{4}}), "window: not set");
    CHECK_REFUSED(Cache(good, P{Sink<>{1}, Window<>{3}, {}}), "budget k: not set");
    using D = Policy<Window<3>, TopKBudget<4>, Decay<dynamic>>;
    CHECK_REFUSED((FixedBudgetCache<D, float>{good}), "decay step n: not set");
    const host ctx(1);
    expiry_t expiry[4] = {};
    using Kept = Policy<Window<2>, Stride<>>;
    CHECK_REFUSED(build_mask(ctx, Kept{}, {}, {.batch = 1, .length = 4}, view_bhs(expiry, 1, 1, 4), {}),
                  "stride n: not set is not allowed; it must be a number: Stride<>{n}");
}

TEST_CASE("a layer takes a token once, and every layer does") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, with(&CacheShape::max_draft_tokens, 5), policy());
    auto& cache = under_test.cache;
    Arguments a(workspace_bytes(ctx, cache.layer(0), {.batch = 3, .tokens = 5}));
    const Batch two{.count = 2, .length = 1}, three{.count = 3, .length = 1};
    const auto take = [&](std::int32_t layer, const Batch& batch) {
        a.q_view.batch = a.k_view.batch = a.v_view.batch = a.out_view.batch = batch.count;
        a.extras.scores.batch = a.extras.lse.batch = batch.count;
        step(ctx, cache.layer(layer),
             test::step_io(batch, a.q_view, a.k_view, a.v_view, a.out_view, a.extras), a.workspace);
    };
    take(0, two);
    const std::vector<unsigned char> before = under_test.memory;
    const std::string again =
        "tokens of entry 0: 1 is not allowed; it must be 0, since layer 0 has taken 1 of sequence 0 "
        "already: advance(batch) once, after the last layer";
    CHECK_REFUSED(take(0, two), again);
    CHECK_REFUSED(
        (prefill(ctx, cache.layer(0),
                 test::step_io({.count = 2, .length = 1}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                 a.workspace)),
        again);
    CHECK_REFUSED(cache.advance(ctx, two),
                  "tokens of entry 0: 1 is not allowed; it must be the 0 that layer 1 has taken: advance() "
                  "takes the same "
                  "Batch as the layers, and every layer takes a token once");
    CHECK(under_test.memory == before);
    CHECK(cache.length(0) == 0);
    take(1, two);
    CHECK_REFUSED(cache.advance(ctx, {.count = 2, .length = 2}),
                  "tokens of entry 0: 2 is not allowed; it must be the 1 that layer 0 has taken");
    cache.advance(ctx, two);
    CHECK_REFUSED(cache.advance(ctx, two),
                  "tokens of entry 0: 1 is not allowed; it must be the 0 that layer 0");
    // Sequences are apart, and a sequence that is cleared begins anew.
    take(0, three);
    cache.clear(ctx, 1);
    CHECK_REFUSED(take(0, three), "has taken 1 of sequence 0");
    const std::int32_t second[] = {1};
    take(0, {.count = 1, .seq_ids = second, .length = 1});
    take(1, three);
    cache.advance(ctx, three);
    CHECK(cache.length(0) == 2);
    CHECK(cache.length(1) == 1);
    // MaxDraftTokens are no tokens until they are committed.
    a.q_view.batch = a.k_view.batch = a.v_view.batch = a.out_view.batch = 3;
    a.extras.scores.batch = a.extras.lse.batch = 3;
    const Batch four{.count = 3, .length = 4};
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        for (int turn = 0; turn < 2; ++turn) {
            append_draft(ctx, cache.layer(layer),
                         test::step_io(four, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                         a.workspace);
        }
        accept(ctx, cache.layer(layer), three, a.workspace);
        CHECK_REFUSED((accept(ctx, cache.layer(layer), three, a.workspace)),
                      "0 to the 0 that sequence 0 has drafted");
    }
    cache.advance(ctx, three);
    CHECK(cache.length(0) == 3);
}

TEST_CASE("advance without a batch, or without tokens, moves by what the layers have appended") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, good, policy());
    auto& cache = under_test.cache;
    Arguments a(cache.workspace_bytes(ctx, {.batch = 3, .tokens = 5}));
    const std::int32_t tokens[] = {5, 0, 2};
    const auto take = [&](std::int32_t layer, const Batch& batch) {
        prefill(ctx, cache.layer(layer),
                test::step_io(batch, a.q_view, a.k_view, a.v_view, a.out_view, a.extras), a.workspace);
    };
    cache.advance(ctx);  // nothing was appended: nothing moves
    take(0, {.q_len = tokens});
    take(1, {.q_len = tokens});
    cache.advance(ctx);
    CHECK(cache.length(ctx, 0) == 5);
    CHECK(cache.length(ctx, 1) == 0);
    CHECK(cache.length(ctx, 2) == 2);
    take(0, {});
    CHECK_REFUSED(cache.advance(ctx),
                  "tokens of entry 0: 5 is not allowed; it must be the 0 that layer 1 has taken");
    CHECK_REFUSED(cache.advance(ctx, {.count = 1}), "tokens of entry 0: 5 is not allowed");
    // With a status word per entry the sequences whose layers agree move, and the others say why they do not.
    take(1, {.count = 3, .q_len = tokens});
    std::uint32_t status[3] = {};
    cache.advance(ctx, {}, {.status = status});
    CHECK(status[0] == status_ok);
    CHECK(status[1] == status_layer_skipped);
    CHECK(status[2] == status_layer_skipped);
    CHECK(cache.length(ctx, 0) == 10);
    CHECK(cache.length(ctx, 1) == 0);
    CHECK(cache.length(ctx, 2) == 2);
    // A sequence that a batch names must have a token.
    CHECK_REFUSED(cache.advance(ctx, {.count = 1}),
                  "tokens of entry 0: 1 is not allowed; it must be the 0 that layer 0");
    cache.advance(ctx, {.count = 1}, {.status = status});
    CHECK(status[0] == status_layer_skipped);
}

TEST_CASE("scores beside a policy's own scorer") {
    using Own = Policy<Window<3>, TopKBudget<4>, LinearScorer<>>;
    const std::vector<float> weight(2 * 24, 0.5f);
    const Own own{
        {}, {}, {.heads = 2, .head_dim_qk = 16, .head_dim_vo = 8, .weights = {.weight = weight.data()}}};
    const host ctx(1);
    test::BoundCache<Own, float> under_test(ctx, good, own);
    const auto ref = under_test.cache.layer(0);
    Arguments a(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 5}));
    const std::string text =
        "io.scores: given is not allowed; it must be nothing, since this policy has a scorer of its own";
    CHECK_REFUSED(
        (step(ctx, ref,
              test::step_io({.count = 3, .length = 1}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
              a.workspace)),
        text);
    CHECK_REFUSED(
        (prefill(ctx, ref,
                 test::step_io({.count = 3, .length = 5}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                 a.workspace)),
        text);
    a.extras.scores = {};
    step(ctx, ref,
         test::step_io({.count = 3, .length = 1}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
         a.workspace);
}

TEST_CASE("a NaN score of a key that its position keeps is never read, as in a mask") {
    using Kept = Policy<Window<3>, TopKBudget<2>, Stride<4>>;
    const host ctx(1);
    const Kept policy;
    constexpr std::int32_t tokens = 12;
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> scores(tokens, 0.5f), x(tokens * 8, 1.0f), out(x.size());
    scores[4] = scores[8] = nan;
    std::vector<expiry_t> expiry(tokens);
    const Sequences sequences{.batch = 1, .length = tokens};
    test::Workspace for_mask(build_mask_workspace_bytes(ctx, policy, sequences, 1));
    build_mask(ctx, policy, view_bhs(std::as_const(scores).data(), 1, 1, tokens), sequences,
               view_bhs(expiry.data(), 1, 1, tokens), for_mask);
    std::vector<position_t> visible;
    for (std::int32_t t = 0; t < tokens; ++t) {
        if (tokens - 1 < expiry[static_cast<std::size_t>(t)]) {
            visible.push_back(t);
        }
    }
    const CacheShape shape{.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8};
    for (const bool steps : {true, false}) {
        test::BoundDual<Kept, float> bound(ctx, shape, {.slab_pages = 20, .max_slabs = 1, .max_seq_len = 20},
                                           policy, nullptr);
        bound.add_slab(ctx);
        const auto ref = bound.cache.layer(0);
        test::Workspace scratch(workspace_bytes(ctx, ref, {.batch = 1, .tokens = tokens}));
        const auto take = [&](std::int32_t first, std::int32_t count) {
            const auto rows = view_bhsd(std::as_const(x).data(), 1, 1, count, 8);
            const auto to = view_bhsd(out.data(), 1, 1, count, 8);
            const Batch batch{.count = 1, .length = count};
            const test::Extras extras{.scores = view_bhs(std::as_const(scores).data() + first, 1, 1, count)};
            if (steps) {
                step(ctx, ref, test::step_io(batch, rows, rows, rows, to, extras), scratch);
            } else {
                prefill(ctx, ref, test::step_io(batch, rows, rows, rows, to, extras), scratch);
            }
            bound.cache.advance(ctx, batch);
        };
        for (std::int32_t t = 0; steps && t < tokens; ++t) {
            take(t, 1);
        }
        if (!steps) {
            take(0, tokens);
        }
        CHECK(bound.sorted(0, 0, 0) == visible);
    }
    // Others are read, and refused by their place.
    test::BoundDual<Kept, float> bound(ctx, shape, {.slab_pages = 20, .max_slabs = 1, .max_seq_len = 20},
                                       policy, nullptr);
    bound.add_slab(ctx);
    test::Workspace scratch(workspace_bytes(ctx, bound.cache.layer(0), {.batch = 1, .tokens = tokens}));
    scores[5] = nan;
    const auto rows = view_bhsd(std::as_const(x).data(), 1, 1, tokens, 8);
    CHECK_REFUSED((prefill(ctx, bound.cache.layer(0),
                           {.q = rows,
                            .k = rows,
                            .v = rows,
                            .out = view_bhsd(out.data(), 1, 1, tokens, 8),
                            .batch = {.count = 1, .length = tokens},
                            .scores = view_bhs(std::as_const(scores).data(), 1, 1, tokens)},
                           scratch)),
                  "io.scores[0][0][5]: NaN");
}

TEST_CASE("tensors: shapes and null pointers, each by name") {
    Refusals refusals;
    const auto of_q = [&](const std::string& text, const std::function<void(Arguments&)>& spoil) {
        refusals.check(text, spoil);
    };
    of_q("q: 2 x 4 x 5 x 16 is not allowed; it must be 3 x 4 x at least 1 x 16",
         [](Arguments& a) { a.q_view.batch = 2; });
    of_q("q: 3 x 2 x 5 x 16", [](Arguments& a) { a.q_view.heads = 2; });
    of_q("q: 3 x 4 x 5 x 8", [](Arguments& a) { a.q_view.dim = 8; });
    of_q("q: null", [](Arguments& a) { a.q_view.data = nullptr; });
    of_q("out: null", [](Arguments& a) { a.out_view.data = nullptr; });
    of_q("out: 3 x 4 x 5 x 16 is not allowed; it must be 3 x 4 x at least 1 x 8",
         [](Arguments& a) { a.out_view.dim = 16; });
    of_q("out: 3 x 4 x 0 x 8", [](Arguments& a) { a.out_view.length = 0; });
    of_q("lse: 3 x 4 x 0 is not allowed; it must be 3 x 4 x at least 1",
         [](Arguments& a) { a.extras.lse.length = 0; });
    of_q("lse: 3 x 2 x 5 is not allowed", [](Arguments& a) { a.extras.lse.heads = 2; });
    of_q("lse: 1 x 4 x 5 is not allowed", [](Arguments& a) { a.extras.lse.batch = 1; });
    of_q("workspace.data: null", [](Arguments& a) { a.workspace.data = nullptr; });
    const auto of_k = [&](const std::string& text, const std::function<void(Arguments&)>& spoil) {
        refusals.check(text, spoil, true, true, false);
    };
    of_k("k: null is not allowed; it must be a pointer to its elements",
         [](Arguments& a) { a.k_view.data = nullptr; });
    of_k("k: 3 x 4 x 5 x 16 is not allowed; it must be 3 x 2 x at least 1 x 16",
         [](Arguments& a) { a.k_view.heads = 4; });
    of_k("k: 3 x 2 x 0 x 16", [](Arguments& a) { a.k_view.length = 0; });
    of_k("v: null", [](Arguments& a) { a.v_view.data = nullptr; });
    of_k("v: 3 x 2 x 5 x 16", [](Arguments& a) { a.v_view.dim = 16; });
    of_k("io.scores: null is not allowed; it must be fp32 scores",
         [](Arguments& a) { a.extras.scores = {}; });
    of_k("io.scores: 3 x 1 x 5 is not allowed; it must be 3 x 2 x at least 1",
         [](Arguments& a) { a.extras.scores.heads = 1; });
    of_k("io.scores: 3 x 2 x 0", [](Arguments& a) { a.extras.scores.length = 0; });
}

TEST_CASE("a workspace that is too small by a byte") {
    const host ctx(2);
    test::BoundCache<P, float> under_test(ctx, good, policy());
    const auto ref = under_test.cache.layer(0);
    Arguments a(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 5}));
    const std::size_t for_step = workspace_bytes(ctx, ref, {.batch = 3, .tokens = 1}),
                      for_chunk = workspace_bytes(ctx, ref, {.batch = 3, .tokens = 5});
    const auto message = [](std::size_t bytes) {
        return "workspace.bytes: " + std::to_string(bytes - 1) + " is not allowed; it must be at least " +
               std::to_string(bytes);
    };
    const std::vector<unsigned char> before = under_test.memory;
    CHECK_REFUSED(
        (step(ctx, ref,
              test::step_io({.count = 3, .length = 1}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
              {a.workspace.data, for_step - 1})),
        message(for_step));
    CHECK_REFUSED((attend(ctx, ref, {.q = a.q_view, .out = a.out_view, .batch = {.count = 3, .length = 1}},
                          {a.workspace.data, for_step - 1})),
                  message(for_step));
    CHECK_REFUSED(
        (prefill(ctx, ref,
                 test::step_io({.count = 3, .length = 5}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
                 {a.workspace.data, for_chunk - 1})),
        message(for_chunk));
    CHECK(under_test.memory == before);
}

TEST_CASE("an export without arrays") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, good, policy());
    const auto ref = under_test.cache.layer(0);
    std::vector<std::int32_t> numbers(7, -9);
    CHECK_REFUSED(export_heads(ctx, ref, {.count = 3}, {nullptr, numbers.data(), numbers.data(), 7}),
                  "pages.indptr: null");
    CHECK_REFUSED(export_heads(ctx, ref, {.count = 3}, {numbers.data(), nullptr, nullptr, 0}),
                  "pages.last_page_len: null");
    CHECK_REFUSED(export_heads(ctx, ref, {.count = 3}, {numbers.data(), nullptr, numbers.data(), -1}),
                  "pages.indices_capacity: -1");
    CHECK_REFUSED(export_heads(ctx, ref, {.count = 4}, {numbers.data(), numbers.data(), numbers.data(), 7}),
                  "batch.count: 4");
    CHECK(std::count(numbers.begin(), numbers.end(), -9) == 7);
}

TEST_CASE("an empty batch and empty entries are no error") {
    const host ctx(1);
    test::BoundCache<P, float> under_test(ctx, good, policy());
    const auto ref = under_test.cache.layer(0);
    const std::vector<unsigned char> before = under_test.memory;
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 3, .tokens = 1}));
    const rows_view<const float> no_q{nullptr, 0, 4, 0, 16}, no_k{nullptr, 0, 2, 0, 16},
        no_v{nullptr, 0, 2, 0, 8};
    const rows_view<float> no_out{nullptr, 0, 4, 0, 8};
    step(ctx, ref, {.q = no_q, .k = no_k, .v = no_v, .out = no_out, .batch = {.count = 0}}, workspace);
    prefill(ctx, ref, {.q = no_q, .k = no_k, .v = no_v, .out = no_out, .batch = {.count = 0}}, workspace);
    attend(ctx, ref, {.q = no_q, .out = no_out, .batch = {.count = 0}}, workspace);
    under_test.cache.advance(ctx, {.count = 0});
    Arguments a(workspace.memory.size());
    const std::int32_t nothing[] = {0, 0, 0};
    step(ctx, ref,
         test::step_io({.count = 3, .q_len = nothing}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
         workspace);
    prefill(ctx, ref,
            test::step_io({.count = 3, .q_len = nothing}, a.q_view, a.k_view, a.v_view, a.out_view, a.extras),
            workspace);
    attend(ctx, ref, {.q = a.q_view, .out = a.out_view, .batch = {.count = 3, .q_len = nothing}}, workspace);
    CHECK(under_test.memory == before);
    CHECK(std::all_of(a.out.data.begin(), a.out.data.end(), [](float x) { return x == -55.0f; }));
}
