// The part SharedBudget: its numbers, what they mean together, and the order of the keys of several heads.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/ranking.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace kvpolicy;

namespace {
constexpr float infinity = std::numeric_limits<float>::infinity();
}

TEST_CASE("a shared budget sums the budgets of its heads, by layer or by layer and head") {
    constexpr Policy<Window<4>, SharedBudget<8>> fixed;
    static_assert(fixed.shares_budget && fixed.has_budget && fixed.shared_slots(0, 5) == 40);
    static_assert(fixed.params(0, 0).floor == 0 && fixed.params(0, 0).cap == unlimited);
    static_assert(!Policy<Window<4>, TopKBudget<8>>::shares_budget && !Policy<Window<4>>::shares_budget);
    const std::int32_t by_layer[] = {3, 5};
    const std::int32_t by_head[] = {1, 2, 4};
    const Policy<SharedBudget<>> layers{SharedBudget<>{per_head(by_layer, 2, 1)}};
    CHECK(layers.shared_slots(0, 3) == 9);
    CHECK(layers.shared_slots(1, 3) == 15);
    const std::int32_t floors[] = {1, 0, 2};
    const float offsets[] = {0.0f, -1.5f, 2.0f};
    const Policy<SharedBudget<>, Window<>> heads{
        SharedBudget<>{per_head(by_head, 1, 3),
                       {.floor = per_head(floors, 1, 3), .cap = 6, .score_offset = per_head(offsets, 1, 3)}},
        Window<>{2}};
    CHECK(heads.shared_slots(7, 3) == 7);
    for (std::int32_t head = 0; head < 3; ++head) {
        const HeadParams head_params = heads.params(7, head);
        CHECK(head_params.floor == floors[head]);
        CHECK(head_params.cap == 6);
        CHECK(head_params.score_offset == offsets[head]);
    }
    heads.check(9, 3);
    constexpr Policy<SharedBudget<4>> with_floor{SharedBudget<4>{{.floor = 4}}};
    with_floor.check(1, 3);
}

TEST_CASE("numbers that the heads of a layer cannot have together are refused") {
    const auto check = [](PerHead<std::int32_t> k, SharedLimits limits) {
        Policy<SharedBudget<>>{SharedBudget<>{k, limits}}.check(2, 3);
    };
    CHECK_REFUSED(Policy<SharedBudget<>>{}.check(1, 1),
                  "budget k: not set is not allowed; it must be a number or an array by layer and head: "
                  "SharedBudget<>{k}");
    CHECK_REFUSED(check(unlimited, {}), "shared budget k of layer 0, head 0: 2147483647 is not allowed");
    CHECK_REFUSED(check(-1, {}), "budget k of layer 0, head 0: -1 is not allowed");
    CHECK_REFUSED(
        check(1 << 30, {}),
        "shared budget of layer 0, the sum over heads: 3221225472 is not allowed; it must be below 2^31");
    CHECK_REFUSED(check(4, {.floor = -1}), "floor of layer 0, head 0: -1 is not allowed");
    CHECK_REFUSED(check(4, {.floor = 2, .cap = 1}), "cap of layer 0, head 0: 1 is not allowed");
    CHECK_REFUSED(check(4, {.score_offset = infinity}),
                  "score offset of layer 0, head 0: inf is not allowed");
    CHECK_REFUSED(check(4, {.score_offset = std::nanf("")}), "score offset of layer 0, head 0: nan");
    const std::int32_t floors[] = {4, 8, 1, 1, 1, 1};
    CHECK_REFUSED(
        check(4, {.floor = per_head(floors, 2, 3)}),
        "sum of the floors of layer 0: 13 is not allowed; it must be at most the slots of the layer, 12");
    CHECK_REFUSED(check(4, {.floor = per_head(floors, 3, 2)}), "array of floors: 3 layers x 2 heads");
    CHECK_REFUSED(check(4, {.cap = per_head(floors, 3, 2)}), "array of caps: 3 layers x 2 heads");
    const float offsets[] = {0.0f, 0.0f};
    CHECK_REFUSED(check(4, {.score_offset = per_head(offsets, 1, 2)}),
                  "array of score offsets: 1 layers x 2 heads");
}

TEST_CASE("the order of a layer is static for one log gamma and decay step 1, or without decay") {
    const float equal[] = {-0.5f, -0.5f, -0.5f};
    const float different[] = {-0.5f, -0.5f, -0.25f};
    const std::int32_t steps[] = {1, 1, 2};
    using One = Policy<SharedBudget<4>, Decay<1>>;
    using Any = Policy<SharedBudget<4>, Decay<dynamic>>;
    CHECK(Policy<SharedBudget<4>>{}.has_static_shared_order(0, 3));
    CHECK(One{{}, Decay<1>{-0.5f}}.has_static_shared_order(0, 3));
    CHECK(One{{}, Decay<1>{per_head(equal, 1, 3)}}.has_static_shared_order(0, 3));
    CHECK(One{{}, Decay<1>{per_head(different, 1, 3)}}.has_static_shared_order(0, 2));
    CHECK_FALSE(One{{}, Decay<1>{per_head(different, 1, 3)}}.has_static_shared_order(0, 3));
    CHECK_FALSE(Any{{}, Decay<dynamic>{-0.5f, 3}}.has_static_shared_order(0, 3));
    CHECK_FALSE(Any{{}, Decay<dynamic>{-0.5f, per_head(steps, 1, 3)}}.has_static_shared_order(0, 3));
    CHECK(Any{{}, Decay<dynamic>{0.0f, per_head(steps, 1, 3)}}.has_static_shared_order(0, 3));
    static_assert(One::ranks_by_query && !Policy<SharedBudget<4>>::ranks_by_query);
    static_assert(!Policy<TopKBudget<4>, Decay<1>>::ranks_by_query);
}

TEST_CASE("the order of keys of several heads: value, age, head; NaN last") {
    const double nan = std::nan("");
    CHECK(ranks_before(2.0, 5, 1, 1.0, 0, 0));
    CHECK(ranks_before(1.0, 4, 1, 1.0, 5, 0));
    CHECK(ranks_before(1.0, 4, 0, 1.0, 4, 1));
    CHECK_FALSE(ranks_before(1.0, 4, 1, 1.0, 4, 0));
    CHECK(ranks_before(0.0, 4, 0, -0.0, 4, 1));
    CHECK(ranks_before(-0.0, 4, 0, 0.0, 4, 1));
    CHECK(ranks_before(-HUGE_VAL, 9, 3, nan, 0, 0));
    CHECK_FALSE(ranks_before(nan, 0, 0, -HUGE_VAL, 0, 3));
    CHECK(ranks_before(nan, 3, 0, nan, 3, 1));

    HeadParams head_params;
    head_params.log_gamma = -0.5f;
    head_params.score_offset = 2.0f;
    head_params.decay_step = 1;
    CHECK(shared_rank_value(head_params, true, 1.0f, 4, 10) == 1.0 + 2.0 + 4 * 0.5);
    CHECK(shared_rank_value(head_params, false, 1.0f, 4, 10) == 1.0 + 2.0 - 6 * 0.5);
    head_params.decay_step = 4;
    CHECK(shared_rank_value(head_params, false, 1.0f, 4, 10) == 1.0 + 2.0 - 1 * 0.5);
    // Both are rounded to double, not to float.
    head_params.score_offset = 1e-8f;
    CHECK(shared_rank_value(head_params, false, 1.0f, 4, 5) == 1.0 + static_cast<double>(1e-8f));
}

TEST_CASE("parts of a default policy have their numbers, behind empty parts too") {
    // Not constexpr: g++ 12 gets these right.
    const Policy<Sink<4>, Window<64>, SharedBudget<956>> fixed{};
    CHECK(fixed.params(0, 0).budget == 956);
    CHECK(fixed.params(0, 0).cap == unlimited);
    CHECK(fixed.shared_slots(0, 8) == 8 * 956);
}
