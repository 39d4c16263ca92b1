// Lifetimes and masses of observed policies against NumPy in float64 (tests/reference/baselines.py), for
// every storage type and instruction set; modes of prefill; refusals.
#include "../../support/baseline_cases.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <limits>

using namespace kvpolicy;
using test::BaselineCase;

namespace {

std::vector<isa> instruction_sets() {
    std::vector<isa> sets{isa::portable};
    if (detected_isa() != isa::portable) {
        sets.push_back(detected_isa());
    }
    return sets;
}

template <class P, class T>
std::vector<expiry_t> mask_of(const host& ctx, const P& policy, const BaselineCase& one,
                              const std::vector<T>& q, const std::vector<T>& k, std::int32_t prompt) {
    const auto queries = view_bhsd<const T>(q.data(), 1, one.heads(), one.length, one.dim);
    const auto keys = view_bhsd<const T>(k.data(), 1, one.kv_heads, one.length, one.dim);
    std::vector<expiry_t> expiry(static_cast<std::size_t>(one.kv_heads * one.length), -7);
    test::Workspace workspace(build_observed_mask_workspace_bytes(ctx, policy, queries, keys));
    build_observed_mask(ctx, policy, one.attention, queries, keys, {.batch = 1, .length = one.length},
                        view_bhs(expiry.data(), 1, one.kv_heads, one.length), workspace, {.prompt = prompt});
    for (expiry_t& end : expiry) {
        end = std::min(end, one.length);
    }
    return expiry;
}

template <class T>
void check_masks() {
    for (const BaselineCase& one : test::baseline_cases()) {
        CAPTURE(one.seed);
        const std::vector<T> q = one.drawn<T>(0), k = one.drawn<T>(1);
        one.with_policy([&](const auto& policy) {
            for (const isa set : instruction_sets()) {
                for (const int threads : {1, 3}) {
                    CHECK(mask_of(host(threads, set), policy, one, q, k, one.prompt) == one.expiry);
                }
            }
        });
    }
}

template <class T>
void check_masses() {
    for (const BaselineCase& one : test::baseline_cases()) {
        CAPTURE(one.seed);
        const std::vector<T> q = one.drawn<T>(0), k = one.drawn<T>(1);
        const auto queries = view_bhsd<const T>(q.data(), 1, one.heads(), one.length, one.dim);
        const auto keys = view_bhsd<const T>(k.data(), 1, one.kv_heads, one.length, one.dim);
        std::vector<expiry_t> expiry(one.expiry.begin(), one.expiry.end());
        for (expiry_t& end : expiry) {
            end = end == one.length ? never : end;
        }
        for (const isa set : instruction_sets()) {
            const host ctx(2, set);
            test::Workspace workspace(received_mass_workspace_bytes<T>(ctx, queries, keys));
            for (const bool sparse : {false, true}) {
                mask_view mask;
                if (sparse) {
                    mask.expiry = view_bhs<const expiry_t>(expiry.data(), 1, one.kv_heads, one.length);
                }
                ReceivedMassOptions options{.aggregate = one.aggregate()};
                if (!sparse) {
                    options.queries = one.kind == BaselineCase::h2o    ? unlimited
                                      : one.kind == BaselineCase::tova ? 1
                                                                       : one.window;
                }
                std::vector<float> mass(expiry.size(), -1.0f);
                received_mass<T>(ctx, one.attention, queries, keys, mask, {.batch = 1, .length = one.length},
                                 view_bhs(mass.data(), 1, one.kv_heads, one.length), workspace, options);
                std::int64_t wrong = 0;
                const std::vector<double>& expected = sparse ? one.sparse_mass : one.mass;
                for (std::size_t i = 0; i < mass.size(); ++i) {
                    wrong += !(std::fabs(static_cast<double>(mass[i]) - expected[i]) <=
                               test::mass_tolerance<T>(one, expected[i]));
                }
                CHECK(wrong == 0);
            }
        }
    }
}

}  // namespace

TEST_CASE("lifetimes of H2O, TOVA and SnapKV, fp32") { check_masks<float>(); }
TEST_CASE("lifetimes of H2O, TOVA and SnapKV, bf16") { check_masks<bf16>(); }
TEST_CASE("lifetimes of H2O, TOVA and SnapKV, fp16") { check_masks<fp16>(); }
TEST_CASE("lifetimes of H2O, TOVA and SnapKV, double") { check_masks<double>(); }
TEST_CASE("masses, fp32") { check_masses<float>(); }
TEST_CASE("masses, bf16") { check_masses<bf16>(); }
TEST_CASE("masses, double") { check_masses<double>(); }

TEST_CASE(
    "a batch with lengths is its sequences one by one; what is beyond a length is not read or written") {
    const host ctx{2};
    BaselineCase one{};
    one.kv_heads = 2, one.group = 2, one.length = 40, one.dim = 16, one.seed = 5;
    std::vector<float> q, k;
    for (const std::int32_t seed : {5, 6}) {
        one.seed = seed;
        const auto more_q = one.drawn<float>(0), more_k = one.drawn<float>(1);
        q.insert(q.end(), more_q.begin(), more_q.end());
        k.insert(k.end(), more_k.begin(), more_k.end());
    }
    const std::int32_t lengths[] = {40, 23};
    const auto poison = [&](std::vector<float>& rows, std::int32_t heads) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t t = 23; t < 40; ++t) {
                std::fill_n(rows.data() + ((heads + h) * 40 + t) * 16, 16,
                            std::numeric_limits<float>::quiet_NaN());
            }
        }
    };
    poison(q, 4);
    poison(k, 2);
    for (const bool whole_layer : {false, true}) {
        const auto policy = tova_for_total(7, {.whole_layer = whole_layer});
        const auto queries = view_bhsd<const float>(q.data(), 2, 4, 40, 16);
        const auto keys = view_bhsd<const float>(k.data(), 2, 2, 40, 16);
        std::vector<expiry_t> expiry(2 * 2 * 40, -7);
        test::Workspace workspace(build_observed_mask_workspace_bytes(ctx, policy, queries, keys));
        build_observed_mask(ctx, policy, {}, queries, keys, {.batch = 2, .length = 40, .lengths = lengths},
                            view_bhs(expiry.data(), 2, 2, 40), workspace, {.prompt = 10});
        for (std::int32_t b = 0; b < 2; ++b) {
            const auto part = [&](const rows_view<const float>& rows) {
                rows_view<const float> mine = rows;
                mine.data += b * rows.batch_stride;
                mine.batch = 1;
                mine.length = lengths[b];
                return mine;
            };
            std::vector<expiry_t> alone(2 * 40, -7);
            build_observed_mask(ctx, policy, {}, part(queries), part(keys),
                                {.batch = 1, .length = lengths[b]}, view_bhs(alone.data(), 1, 2, 40),
                                workspace, {.prompt = 10});
            CHECK(std::equal(alone.begin(), alone.end(), expiry.begin() + b * 80));
        }
    }
}

TEST_CASE("each way to take a prompt is its own, and the same every time") {
    const host one_thread{1}, ctx{3};
    const BaselineCase& one = test::baseline_cases()[1];
    const std::vector<float> q = one.drawn<float>(0), k = one.drawn<float>(1);
    std::vector<std::vector<expiry_t>> found;
    for (const ObservedPrefill prefill :
         {ObservedPrefill::dense_then_prune(), ObservedPrefill::in_chunks(16), ObservedPrefill::stepwise()}) {
        const auto policy = h2o_for_total(16, 8, {prefill});
        found.push_back(mask_of(ctx, policy, one, q, k, unlimited));
        CHECK(found.back() == mask_of(one_thread, policy, one, q, k, unlimited));
        CHECK(found.back() == mask_of(ctx, policy, one, q, k, unlimited));
    }
    CHECK(found[0] != found[1]);
    CHECK(found[1] != found[2]);
    // A prompt step by step, and no prompt.
    CHECK(found[2] == mask_of(ctx, h2o_for_total(16, 8), one, q, k, 0));
    // Chunks that are the prompt.
    CHECK(found[0] ==
          mask_of(ctx, h2o_for_total(16, 8, {ObservedPrefill::in_chunks(500)}), one, q, k, unlimited));
}

TEST_CASE("a query sees at most the budget and itself, or the block") {
    const host ctx{1};
    for (const BaselineCase& one : test::baseline_cases()) {
        CAPTURE(one.seed);
        for (std::int32_t h = 0; h < one.kv_heads; ++h) {
            for (std::int32_t i = one.prompt; i < one.length && one.kind != BaselineCase::snapkv; ++i) {
                std::int32_t seen = 0;
                for (std::int32_t t = 0; t <= i; ++t) {
                    seen +=
                        i < one.expiry[static_cast<std::size_t>(std::int64_t{h} * one.length + t)] ? 1 : 0;
                }
                CHECK(seen == std::min(i + 1, one.budget + 1));
            }
        }
    }
}

TEST_CASE("refusals") {
    const host ctx{1};
    CHECK_REFUSED(h2o_for_total(-1), "total budget: -1 is not allowed; it must be 0 or more");
    CHECK_REFUSED(h2o_for_total(7, 8),
                  "total budget: 7 is not allowed; it must be at least the recent keys, 8");
    CHECK_REFUSED(h2o_for_total(7, -1), "recent keys: -1");
    CHECK_REFUSED(tova_for_total(-3), "total budget: -3");
    CHECK_REFUSED(snapkv_for_total(31),
                  "total budget: 31 is not allowed; it must be at least sinks + window = 32");
    CHECK_REFUSED(snapkv_for_total(31, 0), "window: 0");

    BaselineCase one{};
    one.kv_heads = 2, one.group = 2, one.length = 9, one.dim = 8, one.seed = 1;
    std::vector<float> q = one.drawn<float>(0), k = one.drawn<float>(1);
    const auto check = [&](const auto& policy, const std::string& text) {
        CHECK_REFUSED(mask_of(ctx, policy, one, q, k, unlimited), text);
    };
    check(snapkv_for_total(32, 4, {.pooling = MassPooling::mean(4)}),
          "pooling width: 4 is not allowed; it must be odd");
    check(h2o_for_total(4, 2, {ObservedPrefill::in_chunks(-1)}), "prefill chunk: -1");
    const std::int32_t budgets[] = {3, 4};
    check(TOVA<>{Window<1>{}, TopKBudget<>{per_head(budgets, 1, 2)}, LastMass{}},
          "sinks, window and budget of head 1: 0, 1, 4 is not allowed; it must be those of head 0 (0, 1, 3)");
    // Heads that decide for themselves may differ.
    CHECK(mask_of(ctx,
                  TOVA<>{Window<1>{}, TopKBudget<>{per_head(budgets, 1, 2)}, LastMass{.whole_layer = false}},
                  one, q, k, 0)
              .size() == 18);
    k[8 * 5 + 3] = std::numeric_limits<float>::quiet_NaN();
    check(h2o_for_total(4), "k[0][0][5]: nan is not allowed; it must be finite numbers");
    k[8 * 5 + 3] = 0.0f;
    q[8 * 9 * 3] = std::numeric_limits<float>::infinity();
    check(h2o_for_total(4), "q[0][3][0]: inf");
    q[8 * 9 * 3] = 0.0f;
    const auto queries = view_bhsd<const float>(q.data(), 1, 4, 9, 8);
    const auto keys = view_bhsd<const float>(k.data(), 1, 2, 9, 8);
    std::vector<expiry_t> expiry(18);
    const auto out = view_bhs(expiry.data(), 1, 2, 9);
    const auto policy = h2o_for_total(4);
    test::Workspace workspace(build_observed_mask_workspace_bytes(ctx, policy, queries, keys));
    CHECK_REFUSED(build_observed_mask(ctx, policy, {}, queries, keys, {.batch = 1, .length = 9}, out, {}),
                  "workspace.bytes");
    CHECK_REFUSED(build_observed_mask(ctx, policy, {}, queries, keys, {.batch = 1, .length = 9}, out,
                                      workspace, {.prompt = -1}),
                  "prompt: -1");
    CHECK_REFUSED(
        build_observed_mask(ctx, policy, {}, queries, keys, {.batch = 1, .length = 10}, out, workspace),
        "sequences.length");
    const std::int32_t edges[] = {0, 9};
    CHECK_REFUSED(
        build_observed_mask(ctx, policy, {}, queries, keys,
                            {.batch = 1, .length = 9, .cu_seqlens = edges, .segments = 1}, out, workspace),
        "cu_seqlens");
    std::vector<float> mass(18);
    CHECK_REFUSED(received_mass<float>(ctx, {}, queries, keys, {}, {.batch = 1, .length = 9},
                                       view_bhs(mass.data(), 1, 2, 9), workspace, {.queries = -1}),
                  "queries: -1");
}
