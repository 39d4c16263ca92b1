// A step hides no work: neither step nor prefill, attend, advance, an export, a mask or attention through it
// allocates. (The workspace and the buffer are the caller's.) The global operator new of this program counts.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> allocations{0};
std::atomic<std::size_t> allocated_bytes{0};
void* counted(std::size_t bytes) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    allocated_bytes.fetch_add(bytes, std::memory_order_relaxed);
    void* memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) {
        std::abort();
    }
    return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace kvpolicy;

TEST_CASE("no call of a cache allocates") {
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>, TopKBudget<4>, Decay<3>>;
    const P policy{{}, {}, ThresholdGate<at_least>{-1.0f}, {}, Decay<3>{-0.1f}};
    constexpr std::int32_t count = 12;  // two digits: names in messages outgrow a small string
    std::mt19937 generator(1);
    test::Tensor<float> q(count, 2, 4, 8), k(count, 2, 4, 8), v(count, 2, 4, 8), out(count, 2, 4, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> scores(count, 2, 4), lse(count, 2, 4);
    test::fill_scores(scores, test::Scores::random, generator);
    test::Plane<expiry_t> expiry(count, 2, 4);
    constexpr std::size_t heads = std::size_t{count} * 2;
    std::vector<std::int32_t> indptr(heads + 1), pages(heads * 12), last(heads);
    const HeadPages exported{indptr.data(), pages.data(), last.data(),
                             static_cast<std::int64_t>(pages.size())};
    for (const int threads : {1, 2}) {
        const host ctx(threads);
        test::BoundCache<P, float> under_test(
            ctx,
            {.max_sequences = count, .query_heads = 2, .kv_heads = 2, .head_dim_qk = 8, .head_dim_vo = 8},
            policy);
        const auto ref = under_test.cache.layer(0);
        test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = count, .tokens = 4}));
        const Sequences sequences{.batch = count, .length = 4};
        test::Workspace mask_workspace(build_mask_workspace_bytes(ctx, policy, sequences, 2));
        const kv_view<float> masked{.k = k.view(), .v = v.view(), .mask = {.expiry = expiry.view()}};
        const std::int32_t lengths[count] = {4, 3, 2, 1, 0, 4, 4, 4, 4, 4, 4, 4};
        const Sequences ragged{.batch = count, .length = 4, .lengths = lengths, .starts = lengths};
        test::Workspace attention_workspace(
            attend_workspace_bytes(ctx, AttentionParams{}, q.view(), masked, ragged));
        const Batch chunk{.count = count, .length = 4}, token{.count = count, .length = 1};
        const test::Extras extras{.scores = scores.view(), .lse = lse.view()};
        const long before = allocations.load();
        for (int round = 0; round < 5; ++round) {
            prefill(ctx, under_test.cache.layer(0),
                    test::step_io(chunk, q.view(), k.view(), v.view(), out.view(), extras), workspace);
            under_test.cache.advance(ctx, chunk);
            step(ctx, under_test.cache.layer(0),
                 test::step_io(token, q.view(), k.view(), v.view(), out.view(), extras), workspace);
            under_test.cache.advance(ctx, token);
            attend(ctx, ref, {.q = q.view(), .out = out.view(), .batch = token, .lse = lse.view()},
                   workspace);
            export_heads(ctx, ref, token, exported);
            build_mask(ctx, policy, scores.view(), sequences, expiry.view(), mask_workspace);
            attend(ctx, AttentionParams{}, q.view(), masked, ragged, out.view(), lse.view(),
                   attention_workspace);
        }
        const long after = allocations.load();
        CHECK(after - before == 0);
        CHECK(under_test.cache.length(0) == 25);
    }
}

template <class P>
static void check_pool(const P& policy) {
    constexpr std::int32_t count = 12;
    std::mt19937 generator(1);
    test::Tensor<float> q(count, 2, 4, 8), k(count, 2, 4, 8), v(count, 2, 4, 8), out(count, 2, 4, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> scores(count, 2, 4), lse(count, 2, 4);
    test::fill_scores(scores, test::Scores::random, generator);
    const host ctx(2);
    test::BoundDual<P, float> under_test(ctx,
                                         {.max_sequences = count,
                                          .query_heads = 2,
                                          .kv_heads = 2,
                                          .head_dim_qk = 8,
                                          .head_dim_vo = 8,
                                          .page_size = 3},
                                         {.slab_pages = 20, .max_slabs = 20, .max_seq_len = 100}, policy);
    std::vector<std::vector<unsigned char>> slabs(20,
                                                  std::vector<unsigned char>(under_test.cache.slab_bytes()));
    const auto ref = under_test.cache.layer(0);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = count, .tokens = 4}));
    constexpr std::size_t heads = std::size_t{count} * 2;
    std::vector<std::int32_t> indptr(heads + 1), pages(heads * 12), last(heads);
    std::vector<std::uint32_t> status(count), found(count);
    const HeadPages exported{indptr.data(), pages.data(), last.data(),
                             static_cast<std::int64_t>(pages.size())};
    const Batch chunk{.count = count, .length = 4}, token{.count = count, .length = 1};
    const test::Extras extras{.scores = scores.view(), .lse = lse.view()};
    std::size_t provided = 0;
    const long before = allocations.load();
    prefill(ctx, ref, test::step_io(chunk, q.view(), k.view(), v.view(), out.view(), extras), workspace,
            {.status = status.data()});
    for (int round = 0; round < 5; ++round) {
        while (under_test.cache.reserve(ctx, chunk) > 0) {
            under_test.cache.add_slab(ctx, slabs[provided].data(), slabs[provided].size());
            ++provided;
        }
        prefill(ctx, ref, test::step_io(chunk, q.view(), k.view(), v.view(), out.view(), extras), workspace);
        under_test.cache.advance(ctx, chunk);
        std::fill(found.begin(), found.end(), 0u);
        step(ctx, ref, test::step_io(token, q.view(), k.view(), v.view(), out.view(), extras), workspace,
             {.status = found.data()});
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t one = 1;
            if (found[static_cast<std::size_t>(i)] == status_ok) {
                under_test.cache.advance(ctx, {.count = 1, .seq_ids = &i, .q_len = &one});
            }
        }
        attend(ctx, ref, {.q = q.view(), .out = out.view(), .batch = token, .lse = lse.view()}, workspace);
        export_heads(ctx, ref, token, exported);
    }
    under_test.cache.clear(ctx, 3);
    CHECK(allocations.load() - before == 0);
    CHECK(std::all_of(status.begin(), status.end(),
                      [](std::uint32_t s) { return s == status_pool_exhausted; }));
}

TEST_CASE("no call of a cache with a pool allocates, growing included") {
    const ThresholdGate<at_least> gate{-1.0f};
    check_pool(Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>{{}, {}, gate});
    check_pool(Policy<Sink<2>, Window<5>, ThresholdGate<at_least>, SharedBudget<3>>{{}, {}, gate, {}});
    check_pool(Policy<Sink<2>, Window<5>, ThresholdGate<at_least>, SharedBudget<3>, Decay<3>>{
        {}, {}, gate, {}, Decay<3>{-0.1f}});
}

TEST_CASE("no call of an observed policy allocates") {
    constexpr std::int32_t count = 12;
    std::mt19937 generator(1);
    test::Tensor<float> q(count, 4, 16, 8), k(count, 2, 16, 8), v(count, 2, 16, 8), out(count, 4, 16, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<expiry_t> expiry(count, 2, 16);
    test::Plane<float> mass(count, 2, 16);
    const Sequences sequences{.batch = count, .length = 16};
    const auto check = [&](const auto& policy) {
        using P = std::remove_cvref_t<decltype(policy)>;
        for (const int threads : {1, 2}) {
            const host ctx(threads);
            test::BoundDual<P, float> under_test(ctx,
                                                 {.max_sequences = count,
                                                  .query_heads = 4,
                                                  .kv_heads = 2,
                                                  .head_dim_qk = 8,
                                                  .head_dim_vo = 8,
                                                  .page_size = 3},
                                                 {.slab_pages = 600, .max_slabs = 2, .max_seq_len = 100},
                                                 policy);
            under_test.add_slab(ctx);
            under_test.add_slab(ctx);
            const auto ref = under_test.cache.layer(0);
            test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = count, .tokens = 16}));
            test::Workspace mask_workspace(build_observed_mask_workspace_bytes(
                ctx, policy, std::as_const(q).view(), std::as_const(k).view()));
            test::Workspace mass_workspace(
                received_mass_workspace_bytes<float>(ctx, std::as_const(q).view(), std::as_const(k).view()));
            const Batch chunk{.count = count, .length = 16}, token{.count = count, .length = 1};
            const long before = allocations.load();
            for (int round = 0; round < 3; ++round) {
                prefill(ctx, ref,
                        {.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .batch = chunk},
                        workspace);
                under_test.cache.advance(ctx, chunk);
                step(ctx, ref,
                     {.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .batch = token},
                     workspace);
                under_test.cache.advance(ctx, token);
                build_observed_mask(ctx, policy, {}, std::as_const(q).view(), std::as_const(k).view(),
                                    sequences, expiry.view(), mask_workspace, {.prompt = 8});
                received_mass<float>(ctx, {}, std::as_const(q).view(), std::as_const(k).view(), {}, sequences,
                                     mass.view(), mass_workspace);
            }
            CHECK(allocations.load() - before == 0);
        }
    };
    check(h2o_for_total(8, {ObservedPrefill::in_chunks(5)}));
    check(tova_for_total(8));
    check(snapkv_for_total(8, 4));
}

// The tables of slabs are in memory that a caller brings to bind(), and nowhere before.
TEST_CASE("a pool of the most slabs that page ids reach costs an object nothing") {
    using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
    const std::size_t before = allocated_bytes;
    const DualCache<P, float> cache({.query_heads = 2, .kv_heads = 2, .head_dim_qk = 8, .head_dim_vo = 8},
                                    {.slab_pages = 1, .max_slabs = 0x7ffffffe, .max_seq_len = 9},
                                    P{{}, {}, ThresholdGate<at_least>{0.0f}});
    CHECK(allocated_bytes - before < 16384);
    CHECK(cache.bytes().total() > std::size_t{0x7ffffffe} * sizeof(Slab<float>));
}
