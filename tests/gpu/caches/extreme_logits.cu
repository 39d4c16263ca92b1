// Logits up to +-1e30 in the decode steps of both caches, and the masses that they give. All numbers of a row
// are equal, so a product is exact in any order of its sums, and the logits of different numbers differ by
// more than fp32's rounding: on both contexts a weight is 1 over the number of keys with the largest logit,
// or 0.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "observed_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64, 128>;
using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;

/// Masses are quotients of small whole numbers, rounded by either side.
struct NearQuotients {
    bool near = true;
    void score(std::int32_t, std::int32_t, position_t, float of_device, float of_host) {
        near = near && std::abs(of_device - of_host) <= 0x1p-19f * (1.0f + std::abs(of_host));
    }
    void states(std::int32_t, std::int32_t, const float*, const float*, std::int64_t) {}
};

/// The number of every element of key t, times `x`: of both signs, equal ones, zeros, rising and falling.
float of_key(std::int32_t t, std::int32_t kind) {
    const float some[] = {-1.0f, -1.25f, 1.0f, 0.75f, 0.0f, -0.5f, 1.0f};
    const auto step = static_cast<float>(t / 20);
    return kind == 0   ? some[(t * t + t / 7) % 7]
           : kind == 1 ? -1.0f
           : kind == 2 ? 1.0f + step / 16.0f
           : kind == 3 ? -1.0f - step / 16.0f
                       : (t < 100 ? 0.0f : 1.0f);
}

/// Steps of two sequences whose keys are of the kinds `kind` and kind + 1.
template <class T, class Both>
void steps(Both& both, float logit, std::int32_t kind, bool observed) {
    CAPTURE(logit);
    CAPTURE(kind);
    // Of 8 bits, so that sums of up to 256 products are exact.
    const auto short_number = [](float y) { return static_cast<float>(bf16(y)); };
    const float x = short_number(std::sqrt(logit / std::sqrt(static_cast<float>(both.shape.head_dim_qk))));
    std::mt19937 generator(static_cast<unsigned>(kind));
    for (std::int32_t t = 0; t < 170; ++t) {
        CAPTURE(t);
        CallTensors<T> in(both.shape, 2, 1, Scores::random, generator);
        std::fill(in.q.data.begin(), in.q.data.end(), T(x));
        const std::size_t half = in.k.data.size() / 2;
        for (std::size_t i = 0; i < in.k.data.size(); ++i) {
            in.k.data[i] = T(short_number(x * of_key(t, kind + static_cast<std::int32_t>(i / half))));
        }
        for (T& value : in.v.data) {
            value = T(static_cast<float>(t % 5) - 2.0f);
        }
        if (observed) {
            take_over(both);
        }
        both.call(Mode::step, {1, 0}, {1, 1}, in);
        if (observed) {
            NearQuotients near;
            both.near_rows(near);
            CHECK(near.near);
        }
    }
}

constexpr float wide[] = {1e5f, 1e6f, 3e7f, 1e9f, 1e13f, 1e20f, 1e30f};

CacheShape two_sequences(std::int32_t group, std::int32_t dim) { return shape_of(2, group, dim, 2); }
constexpr PoolShape pool{.slab_pages = 16, .max_slabs = 40, .max_seq_len = 400};

template <class T>
void check_contiguous(std::int32_t group, std::int32_t dim) {
    for (const float logit : wide) {
        if (std::is_same_v<T, fp16> && logit > 1e9f) {
            continue;  // beyond its range
        }
        for (const std::int32_t kind : {0, 2, 3}) {
            BothCaches<Budget, T, Dims, false> both(two_sequences(group, dim),
                                                    Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{100}});
            steps<T>(both, logit, kind, false);
            BothCaches<Observed, T, Dims, false> seen(two_sequences(group, dim), even(accumulated));
            steps<T>(seen, logit, kind, true);
        }
    }
}
template <class T>
void check_paged(std::int32_t group, std::int32_t dim) {
    for (const float logit : wide) {
        for (const std::int32_t kind : {0, 2, 3}) {
            BothDuals<Budget, T, Dims> both(two_sequences(group, dim), pool,
                                            Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{unlimited}});
            steps<T>(both, logit, kind, false);
            BothDuals<Observed, T, Dims> seen(two_sequences(group, dim), pool,
                                              even({.aggregate = group_aggregate::max}));
            steps<T>(seen, logit, kind, true);
        }
    }
}

}  // namespace

TEST_CASE("steps of a FixedBudgetCache on the tensor cores") {
    check_contiguous<bf16>(3, 64);
    check_contiguous<bf16>(1, 128);
    check_contiguous<fp16>(4, 64);
}
TEST_CASE("steps of a FixedBudgetCache by plain loops") { check_contiguous<float>(2, 64); }
TEST_CASE("steps of a DualCache on the tensor cores") {
    check_paged<bf16>(3, 64);
    check_paged<bf16>(1, 128);
}
TEST_CASE("steps of a DualCache by plain loops") { check_paged<float>(2, 64); }
