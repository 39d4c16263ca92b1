// build_mask of budgets that the heads of a layer share, against the vectors of an independent reference
// (tests/reference/shared.py) and a naive mask that sorts at every query.
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/topk_budget.hpp>

#include "support/loops.hpp"
#include "support/shared_cases.hpp"

#include <doctest/doctest.h>

#include "support/refusal.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace kvpolicy;
using kvpolicy_test::draw_shared_case;
using kvpolicy_test::draw_shared_scores;
using kvpolicy_test::for_each_shared_vector;
using kvpolicy_test::gate_kind;
using kvpolicy_test::naive_shared_mask;
using kvpolicy_test::SharedCase;
using kvpolicy_test::SharedVector;

namespace {

constexpr expiry_t untouched = -123;

/// The mask [batch, heads, length] of scores of that shape. The workspace is exactly as asked for, and
/// poisoned.
template <class P>
std::vector<expiry_t> mask_of(const host& ctx, const P& policy, const std::vector<float>& scores,
                              const Sequences& sequences, std::int32_t heads, MaskOptions options = {}) {
    const std::size_t count = static_cast<std::size_t>(sequences.batch) * static_cast<std::size_t>(heads) *
                              static_cast<std::size_t>(sequences.length);
    std::vector<expiry_t> expiry(count + 1, untouched);
    std::vector<float> with_end = scores;
    with_end.push_back(0.0f);  // so that an empty sequence has an address too
    options.nan_ranks_last = true;
    const std::size_t bytes = build_mask_workspace_bytes(ctx, policy, sequences, heads, options);
    std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
    std::fill_n(reinterpret_cast<unsigned char*>(workspace.data()),
                workspace.size() * sizeof(std::max_align_t), static_cast<unsigned char>(0xff));
    build_mask(ctx, policy,
               view_bhs(std::as_const(with_end).data(), sequences.batch, heads, sequences.length), sequences,
               view_bhs(expiry.data(), sequences.batch, heads, sequences.length),
               workspace_view{workspace.data(), bytes}, options);
    CHECK(expiry.back() == untouched);
    expiry.pop_back();
    return expiry;
}

/// Empty where both agree on [heads, length], clamped to `clamp`; else the first difference.
std::string difference(const std::vector<expiry_t>& got, const std::int32_t* wanted, std::int32_t length,
                       std::int32_t clamp) {
    for (std::size_t i = 0; i < got.size(); ++i) {
        const std::int32_t a = std::min(got[i], clamp), b = std::min(wanted[i], clamp);
        if (a != b) {
            const auto row = static_cast<std::size_t>(length);
            return "head " + std::to_string(i / row) + ", key " + std::to_string(i % row) + " expires at " +
                   std::to_string(a) + ", not " + std::to_string(b);
        }
    }
    return "";
}

const kvpolicy_test::vectors& file() {
    static const kvpolicy_test::vectors loaded = kvpolicy_test::vectors::load("shared.kvpv");
    return loaded;
}

Sequences sequences_of(const SharedVector& one) {
    Sequences sequences{.batch = 1, .length = one.numbers.length};
    if (!one.cu_seqlens.empty()) {
        sequences.cu_seqlens = one.cu_seqlens.data();
        sequences.segments = static_cast<std::int32_t>(one.cu_seqlens.size()) - 1;
    }
    return sequences;
}

MaskOptions options_of(const SharedCase& numbers) {
    MaskOptions options;
    options.rebase_limit = numbers.rebase_limit;
    return options;
}

}  // namespace

TEST_CASE("masks of shared budgets equal the reference's, with any number of threads") {
    const host one_thread(1), four(4);
    for_each_shared_vector(file(), [&](const SharedVector& one, std::int64_t index) {
        one.numbers.with_policy([&](const auto& policy) {
            const host& ctx = index % 2 == 0 ? one_thread : four;
            const auto mask = mask_of(ctx, policy, one.scores, sequences_of(one), one.numbers.heads,
                                      options_of(one.numbers));
            const std::string wrong = difference(mask, one.expiry, one.numbers.length, one.numbers.length);
            CHECK_MESSAGE(wrong == "", "case ", index, ": ", one.numbers.text());
            // A key of a packed segment is invisible to the next one.
            for (std::size_t i = 0; !one.cu_seqlens.empty() && i < mask.size(); ++i) {
                const auto t = static_cast<std::int32_t>(i) % one.numbers.length;
                CHECK(mask[i] <= *std::upper_bound(one.cu_seqlens.begin(), one.cu_seqlens.end(), t));
            }
        });
    });
}

TEST_CASE(
    "the reference's slots: the keys that hold one at a query are distinct, and below the layer's number") {
    int seen = 0;
    for_each_shared_vector(file(), [&](const SharedVector& one, std::int64_t) {
        const SharedCase& numbers = one.numbers;
        std::int32_t top_k_slots = 0;
        for (const std::int32_t k : numbers.budgets) {
            top_k_slots += k;
        }
        for (std::int32_t q = 0; one.cu_seqlens.empty() && q < numbers.length; ++q) {
            std::set<std::int32_t> taken;
            std::size_t held = 0;
            for (std::int32_t h = 0; h < numbers.heads; ++h) {
                for (std::int32_t t = 0; t + numbers.windows[static_cast<std::size_t>(h)] <= q; ++t) {
                    const std::int32_t i = h * numbers.length + t;
                    if (one.slot[i] >= 0 && q < one.expiry[i]) {
                        taken.insert(one.slot[i]);
                        ++held;
                        ++seen;
                    }
                }
            }
            CHECK(taken.size() == held);
            CHECK((taken.empty() ||
                   *taken.rbegin() < std::min<std::int32_t>(top_k_slots, static_cast<std::int32_t>(held))));
        }
    });
    CHECK(seen > 10000);
}

TEST_CASE("random draws equal a mask that sorts at every query") {
    const host ctx(2);
    std::mt19937 generator(25);
    for (int draw = 0; draw < test::rounds(400, 60); ++draw) {
        const auto length = static_cast<std::int32_t>(generator() % 130);
        const SharedCase numbers = draw_shared_case(generator, 6, length, 12);
        const auto count = static_cast<std::size_t>(numbers.heads) * static_cast<std::size_t>(length);
        const std::vector<float> scores = draw_shared_scores(generator, count);
        const auto wanted = naive_shared_mask(numbers, scores.data());
        numbers.with_policy([&](const auto& policy) {
            const auto mask = mask_of(ctx, policy, scores, {.batch = 1, .length = length}, numbers.heads,
                                      options_of(numbers));
            CHECK_MESSAGE(difference(mask, wanted.data(), length, length) == "", numbers.text());
        });
    }
}

TEST_CASE("long sequences: a static order is that of one sorted set of all keys") {
    const host ctx(1);
    std::mt19937 generator(7);
    for (const float log_gamma : {0.0f, -0.001f}) {
        const std::int32_t heads = 8, length = 5000, k = 300, window = 32;
        const std::vector<float> scores =
            draw_shared_scores(generator, static_cast<std::size_t>(heads) * length);
        const Policy<Window<>, SharedBudget<>, Decay<1>> policy{Window<>{window}, SharedBudget<>{k},
                                                                Decay<1>{log_gamma}};
        const auto mask = mask_of(ctx, policy, scores, {.batch = 1, .length = length}, heads);
        // NaN first, since it is worst.
        using Key = std::tuple<bool, double, std::int32_t, std::int32_t>;
        std::set<Key> held;
        std::vector<expiry_t> wanted(scores.size(), never);
        for (std::int32_t q = window; q < length; ++q) {
            for (std::int32_t h = 0; h < heads; ++h) {
                const std::int32_t t = q - window;
                const float score = scores[static_cast<std::size_t>(h * length + t)];
                const bool nan = std::isnan(score);
                const double value =
                    nan ? 0.0 : static_cast<double>(score) - t * static_cast<double>(log_gamma);
                held.insert({!nan, value, -t, -h});
            }
            while (held.size() > static_cast<std::size_t>(k * heads)) {
                const Key worst = *held.begin();
                held.erase(held.begin());
                wanted[static_cast<std::size_t>(-std::get<3>(worst) * length - std::get<2>(worst))] = q;
            }
        }
        CHECK(difference(mask, wanted.data(), length, length) == "");
    }
}

TEST_CASE("one head with a shared budget is a head with a budget of its own") {
    const host ctx(1);
    std::mt19937 generator(3);
    for (int draw = 0; draw < 40; ++draw) {
        const std::int32_t length = 200, k = static_cast<std::int32_t>(generator() % 40);
        const std::vector<float> scores = draw_shared_scores(generator, length);
        const Decay<dynamic> decay{-0.3f, draw % 2 == 0 ? 1 : 4};
        const Policy<Sink<2>, Window<9>, SharedBudget<>, Decay<dynamic>> shared{
            {}, {}, SharedBudget<>{k}, decay};
        const Policy<Sink<2>, Window<9>, TopKBudget<>, Decay<dynamic>> alone{{}, {}, TopKBudget<>{k}, decay};
        const Sequences sequences{.batch = 1, .length = length};
        CHECK(mask_of(ctx, shared, scores, sequences, 1) == mask_of(ctx, alone, scores, sequences, 1));
    }
}

TEST_CASE("floors as large as the slots are budgets by head, and caps bound every head") {
    const host ctx(1);
    std::mt19937 generator(4);
    const std::int32_t heads = 4, length = 150;
    const std::vector<float> scores = draw_shared_scores(generator, heads * length);
    const Sequences sequences{.batch = 1, .length = length};
    const Policy<Window<5>, SharedBudget<10>> floors{{}, SharedBudget<10>{{.floor = 10}}};
    const Policy<Window<5>, SharedBudget<40>> caps{{}, SharedBudget<40>{{.cap = 10}}};
    const auto alone = mask_of(ctx, Policy<Window<5>, TopKBudget<10>>{}, scores, sequences, heads);
    CHECK(mask_of(ctx, caps, scores, sequences, heads) == alone);
    // A head has slots of other heads until they fill their floors; all do at once here.
    CHECK(mask_of(ctx, floors, scores, sequences, heads) == alone);
}

TEST_CASE("sequences of one batch have budgets of their own, and nothing past a length is touched") {
    const host ctx(3);
    std::mt19937 generator(5);
    const std::vector<std::int32_t> lengths = {0, 90, 1, 40, 89};
    const std::int32_t batch = 5, length = 90;
    for (int draw = 0; draw < 20; ++draw) {
        SharedCase numbers = draw_shared_case(generator, 3, length, 9);
        const auto row = static_cast<std::size_t>(numbers.heads) * length;
        const std::vector<float> scores = draw_shared_scores(generator, row * 5);
        Sequences sequences{.batch = batch, .length = length};
        sequences.lengths = lengths.data();
        numbers.with_policy([&](const auto& policy) {
            const auto mask = mask_of(ctx, policy, scores, sequences, numbers.heads, options_of(numbers));
            for (std::size_t b = 0; b < 5; ++b) {
                SharedCase shorter = numbers;
                shorter.length = lengths[b];
                std::vector<float> mine;
                for (std::int32_t h = 0; h < numbers.heads; ++h) {
                    const auto from = scores.begin() + static_cast<std::ptrdiff_t>(b * row) + h * length;
                    mine.insert(mine.end(), from, from + lengths[b]);
                }
                mine.push_back(0.0f);
                const auto wanted = naive_shared_mask(shorter, mine.data());
                for (std::int32_t h = 0; h < numbers.heads; ++h) {
                    for (std::int32_t t = 0; t < length; ++t) {
                        const expiry_t got = mask[b * row + static_cast<std::size_t>(h * length + t)];
                        if (t >= lengths[b]) {
                            CHECK(got == untouched);
                        } else {
                            CHECK(std::min(got, lengths[b]) ==
                                  std::min(wanted[static_cast<std::size_t>(h * lengths[b] + t)], lengths[b]));
                        }
                    }
                }
            }
        });
    }
}

TEST_CASE("NaN scores that compete are reported or refused; scores that are not read may be NaN") {
    const host ctx(1);
    const Policy<Sink<1>, Window<2>, SharedBudget<2>> policy;
    std::vector<float> scores(20, 0.0f);
    std::vector<expiry_t> expiry(20, untouched);
    const Sequences sequences{.batch = 1, .length = 10};
    const std::size_t bytes = build_mask_workspace_bytes(ctx, policy, sequences, 2);
    std::vector<std::max_align_t> memory(bytes / sizeof(std::max_align_t) + 1);
    const workspace_view workspace{memory.data(), bytes};
    const auto build = [&](const MaskOptions& options) {
        build_mask(ctx, policy, view_bhs(std::as_const(scores).data(), 1, 2, 10), sequences,
                   view_bhs(expiry.data(), 1, 2, 10), workspace, options);
    };
    const float nan = std::numeric_limits<float>::quiet_NaN();
    scores[0] = scores[8] = scores[9] = scores[10] = scores[18] = nan;  // sinks, and keys of the last window
    std::uint32_t status = 0;
    build({.status = &status});
    CHECK(status == 0);
    scores[15] = nan;
    build({.status = &status});
    CHECK(status == status_nan_score);
    CHECK(expiry[15] == 7);
#if KVPOLICY_EXCEPTIONS
    std::fill(expiry.begin(), expiry.end(), untouched);
    CHECK_REFUSED(build({}), "scores");
    CHECK(std::count(expiry.begin(), expiry.end(), untouched) == 20);
    CHECK_REFUSED(build_mask(ctx, policy, view_bhs(std::as_const(scores).data(), 1, 2, 10), sequences,
                             view_bhs(expiry.data(), 1, 2, 10), workspace_view{memory.data(), bytes - 1},
                             {.nan_ranks_last = true}),
                  "workspace");
#endif
}
