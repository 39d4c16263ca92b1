// Masks at the ends of what numbers can be: rules and scores at the limits of their types, scores that heads
// share, planes that lie gigabytes apart.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "../support/mask_check.hpp"

#include <limits>

using namespace kvpolicy;
using namespace test;

namespace {

constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
constexpr float infinity = std::numeric_limits<float>::infinity(),
                largest = std::numeric_limits<float>::max();

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
using Gated = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>>;

Plane<float> scores_of(std::int32_t batch, std::int32_t heads, std::int32_t length) {
    Plane<float> scores(batch, heads, length);
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    const float ends[] = {
        infinity, -infinity, largest, -largest, 0.0f, -0.0f, std::numeric_limits<float>::denorm_min()};
    for (float& x : scores.data) {
        x = generator() % 3 == 0 ? ends[generator() % 7] : normal(generator);
    }
    return scores;
}

}  // namespace

TEST_CASE("rules and scores at the limits of their types") {
    for (const std::int32_t length : {1, 64, 700, 5000}) {
        MaskCase input{scores_of(1, 2, length), {}, {}, {}};
        const auto check = [&](const auto& policy, const std::string& what) {
            check_mask(policy, input, what + " of " + std::to_string(length));
        };
        for (const std::int32_t sinks : {0, most}) {
            for (const std::int32_t window : {1, 2, most}) {
                for (const std::int32_t budget : {0, 1, most - 1, most}) {
                    const std::string what =
                        std::to_string(sinks) + ", " + std::to_string(window) + ", " + std::to_string(budget);
                    check(Budget{Sink<>{sinks}, Window<>{window}, TopKBudget<>{budget},
                                 Decay<dynamic>{-0.1f, 1}},
                          "decay: " + what);
                    check(Gated{Sink<>{sinks}, Window<>{window}, ThresholdGate<above>{-largest},
                                TopKBudget<>{budget}},
                          "gates: " + what);
                }
            }
        }
        for (const float gamma : {-largest, -1e30f, -1e-38f, -0.0f}) {
            for (const std::int32_t step : {1, 2, most}) {
                check(Budget{Sink<>{1}, Window<>{3}, TopKBudget<>{5}, Decay<dynamic>{gamma, step}},
                      "log gamma " + std::to_string(gamma) + " every " + std::to_string(step));
            }
        }
    }
}

TEST_CASE("scores that heads and sequences share; lifetimes that they would") {
    constexpr std::int32_t batch = 2, heads = 3, length = 900;
    const Plane<float> one = scores_of(1, 1, length);
    MaskCase input{Plane<float>(batch, heads, length), {}, {}, {}};
    for (std::size_t i = 0; i < input.scores.data.size(); ++i) {
        input.scores.data[i] = one.data[i % length];
    }
    const Budget policy{Sink<>{2}, Window<>{9}, TopKBudget<>{50}, Decay<dynamic>{-0.01f, 1}};
    const MaskResult wanted = host_mask(policy, input);
    const kvpolicy::cuda ctx{};
    const Device<float> scores(one.data);
    const Device<expiry_t> expiry(wanted.expiry.size());
    const Sequences sequences{batch, length};
    const Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
    auto out = view_bhs(expiry.data(), batch, heads, length);
    const plane_view<const float> shared{scores.data(), batch, heads, length, 0, 0};
    build_mask(ctx, policy, shared, sequences, out, workspace);
    same(expiry.read(), wanted.expiry, length, "shared scores");
    out.head_stride = 0;
    CHECK_REFUSED(build_mask(ctx, policy, shared, sequences, out, workspace), "expiry: a head stride of 0");
    out = view_bhs(expiry.data(), batch, heads, length);
    out.batch_stride = 0;
    CHECK_REFUSED(build_mask(ctx, policy, shared, sequences, out, workspace), "expiry: a batch stride of 0");
}

TEST_CASE("planes that lie 8 GB apart") {
    constexpr std::int32_t heads = 2, length = 20000;
    constexpr std::int64_t far = (std::int64_t{1} << 31) + 3;
    MaskCase input{scores_of(1, heads, length), {}, {}, {}};
    const Device<float> scores(static_cast<std::size_t>(far) + length);
    const Device<expiry_t> expiry(static_cast<std::size_t>(far) + length);
    const kvpolicy::cuda ctx{};
    const Sequences sequences{1, length};
    for (std::int32_t h = 0; h < heads; ++h) {
        ok(cudaMemcpy(scores.data() + h * far, input.scores.data.data() + h * length, length * sizeof(float),
                      cudaMemcpyHostToDevice));
    }
    for (const std::int32_t step : {1, 3}) {
        const Budget policy{Sink<>{2}, Window<>{9}, TopKBudget<>{500}, Decay<dynamic>{-0.01f, step}};
        const MaskResult wanted = host_mask(policy, input);
        const Device<unsigned char> workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
        build_mask(ctx, policy, plane_view<const float>{scores.data(), 1, heads, length, 0, far}, sequences,
                   plane_view<expiry_t>{expiry.data(), 1, heads, length, 0, far}, workspace);
        std::vector<expiry_t> got(wanted.expiry.size());
        for (std::int32_t h = 0; h < heads; ++h) {
            ok(cudaMemcpy(got.data() + h * length, expiry.data() + h * far, length * sizeof(expiry_t),
                          cudaMemcpyDeviceToHost));
        }
        same(got, wanted.expiry, length, "step " + std::to_string(step));
    }
}
