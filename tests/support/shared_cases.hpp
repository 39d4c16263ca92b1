// Budgets that the heads of a layer share: the cases of tests/vectors/shared.kvpv (tests/reference/shared.py
// says what is in them), random ones, the policy that each stands for, and a naive mask.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/ranking.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "lifetime_cases.hpp"
#include "vectors.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kvpolicy_test {

/// The numbers of a layer's policy, by head.
struct SharedCase {
    std::int32_t heads = 1;
    std::int32_t length = 0;
    gate_kind gate = gate_kind::none;
    std::int32_t keep_every = 0;
    kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit;
    std::vector<std::int32_t> sinks, windows, budgets, steps, floors, caps;
    std::vector<float> thresholds, log_gammas, offsets;

    void add(std::int32_t s, std::int32_t w, std::int32_t k, std::int32_t n, std::int32_t floor,
             std::int32_t cap, float tau, float log_gamma, float offset) {
        sinks.push_back(s);
        windows.push_back(w);
        budgets.push_back(k);
        steps.push_back(n);
        floors.push_back(floor);
        caps.push_back(cap);
        thresholds.push_back(tau);
        log_gammas.push_back(log_gamma);
        offsets.push_back(offset);
    }

    /// Calls body(policy). The policy reads the vectors of this object.
    template <class Body>
    void with_policy(Body&& body) const {
        using namespace kvpolicy;
        const auto by_head = [&]<class T>(const std::vector<T>& values) {
            return per_head(values.data(), 1, heads);
        };
        const Sink<> sink{by_head(sinks)};
        const Window<> window{by_head(windows)};
        const SharedBudget<> budget{
            by_head(budgets),
            {.floor = by_head(floors), .cap = by_head(caps), .score_offset = by_head(offsets)}};
        const Decay<dynamic> decay{by_head(log_gammas), by_head(steps)};
        const auto keep = [&](const auto&... parts) {
            if (keep_every > 0) {
                body(Policy<std::decay_t<decltype(parts)>..., KeepEvery>(parts..., KeepEvery{keep_every}));
            } else {
                body(Policy<std::decay_t<decltype(parts)>...>(parts...));
            }
        };
        switch (gate) {
            case gate_kind::none:
                keep(sink, window, budget, decay);
                break;
            case gate_kind::at_least:
                keep(sink, window, ThresholdGate<at_least>(by_head(thresholds)), budget, decay);
                break;
            case gate_kind::above:
                keep(sink, window, ThresholdGate<above>(by_head(thresholds)), budget, decay);
                break;
        }
    }

    [[nodiscard]] std::string text() const {
        std::ostringstream out;
        out << heads << " heads, S " << length << ", gate " << static_cast<int>(gate) << ", keep "
            << keep_every << ", limit " << rebase_limit << ";";
        for (std::size_t h = 0; h < std::min<std::size_t>(sinks.size(), 8); ++h) {
            out << " [s " << sinks[h] << ", w " << windows[h] << ", k " << budgets[h] << ", n " << steps[h]
                << ", floor " << floors[h] << ", cap " << caps[h] << ", log gamma " << log_gammas[h]
                << ", offset " << offsets[h] << "]";
        }
        return out.str();
    }
};

/// A case of shared.kvpv with its scores [heads, length], packed segments (none: empty), and expiries [heads,
/// length], clamped.
struct SharedVector {
    SharedCase numbers;
    std::vector<float> scores;
    std::vector<std::int32_t> cu_seqlens;
    const std::int32_t* expiry;
    const std::int32_t* slot;
};

/// Calls body(vector, index) for the cases of a file, in order.
template <class Body>
void for_each_shared_vector(const vectors& file, Body&& body) {
    const auto& cases = file.get<std::int32_t>("cases");
    const auto& first_head = file.get<std::int32_t>("first_head");
    const auto& rules = file.get<std::int32_t>("rules");
    const auto& levels = file.get<float>("levels");
    const auto& cu_offsets = file.get<std::int32_t>("cu_offsets");
    const std::int32_t* const cu = file.get<std::int32_t>("cu").data();
    for (std::int64_t i = 0; i < cases.shape[0]; ++i) {
        SharedVector one;
        SharedCase& numbers = one.numbers;
        numbers.heads = cases.row(i)[0];
        numbers.length = cases.row(i)[1];
        numbers.rebase_limit = cases.row(i)[2];
        numbers.keep_every = cases.row(i)[3];
        for (std::int32_t head = first_head[i]; head < first_head[i + 1]; ++head) {
            const std::int32_t* const rule = rules.row(head);
            const float* const level = levels.row(head);
            numbers.gate = static_cast<gate_kind>(rule[4]);
            numbers.add(rule[2], rule[3], rule[5], rule[6], rule[7], rule[8], level[0], level[1], level[2]);
            const float* const from = file.get<float>("scores").row(rule[0]) + rule[1];
            one.scores.insert(one.scores.end(), from, from + numbers.length);
        }
        one.cu_seqlens = {cu + cu_offsets[i], cu + cu_offsets[i + 1]};
        const std::int32_t offset = file.get<std::int32_t>("offsets")[i];
        one.expiry = file.get<std::int32_t>("expiry").data() + offset;
        one.slot = file.get<std::int32_t>("slot").data() + offset;
        body(one, i);
    }
}

/// Random numbers of a layer of at most `max_heads` heads. A static order in two of three draws.
inline SharedCase draw_shared_case(std::mt19937& generator, std::int32_t max_heads, std::int32_t length,
                                   std::int32_t max_k) {
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    SharedCase numbers;
    numbers.heads = 1 + pick(max_heads);
    numbers.length = length;
    numbers.gate = static_cast<gate_kind>(pick(2) == 0 ? 0 : pick(3));
    numbers.keep_every = pick(4) == 0 ? 5 : 0;
    numbers.rebase_limit = pick(4) == 0 ? 1 + pick(40) : kvpolicy::rebase_limit;
    constexpr float gammas[] = {0.0f, -0.01f, -0.5f, -3.0f};
    constexpr std::int32_t windows[] = {1, 2, 5, 16, 60}, steps[] = {1, 1, 3, 64, 300};
    const bool is_static = pick(3) != 0, limits = pick(2) == 0, one_window = pick(2) == 0;
    const std::int32_t window = windows[pick(5)];
    const float gamma = gammas[pick(4)];
    std::vector<std::int32_t> budgets;
    std::int32_t left = 0;  // slots that no floor takes
    for (std::int32_t h = 0; h < numbers.heads; ++h) {
        budgets.push_back(pick(max_k + 1));
        left += budgets.back();
    }
    for (std::int32_t h = 0; h < numbers.heads; ++h) {
        const std::int32_t floor = limits ? std::min(left, pick(4)) : 0;
        left -= floor;
        const std::int32_t cap = limits && pick(2) == 0 ? floor + pick(2 * max_k + 1) : kvpolicy::unlimited;
        numbers.add(pick(2) == 0 ? 0 : pick(5), one_window ? window : windows[pick(5)],
                    budgets[static_cast<std::size_t>(h)], is_static ? 1 : steps[pick(5)], floor, cap,
                    0.5f * static_cast<float>(pick(3)) - 0.5f, is_static ? gamma : gammas[pick(4)],
                    0.5f * static_cast<float>(pick(3)));
    }
    return numbers;
}

/// Scores of a kind that makes trouble: ties, infinities, NaN, values that absorb a decay.
inline std::vector<float> draw_shared_scores(std::mt19937& generator, std::size_t count) {
    constexpr float infinite = std::numeric_limits<float>::infinity();
    const auto kind = generator() % 5;
    std::normal_distribution<float> normal;
    std::vector<float> scores(count);
    for (float& score : scores) {
        const auto draw = generator() % 6;
        constexpr float some[] = {-infinite, infinite, 0.0f, -0.0f, 1.0f, -1.0f};
        switch (kind) {
            case 0:
                score = normal(generator);
                break;
            case 1:
                score = static_cast<float>(draw);
                break;
            case 2:
                score = some[draw];
                break;
            case 3:
                score = draw == 0 ? std::numeric_limits<float>::quiet_NaN() : normal(generator);
                break;
            default:
                score = std::ldexp(draw % 2 == 0 ? 1.0f : -1.0f, 53 + static_cast<int>(draw));
        }
    }
    return scores;
}

/// expiry [heads, length] from the definition: at every query the held keys and the candidates are sorted. A
/// NaN closes gates.
inline std::vector<std::int32_t> naive_shared_mask(const SharedCase& numbers, const float* scores) {
    struct Key {
        std::int32_t head, t;
        double value;
    };
    const auto heads = static_cast<std::size_t>(numbers.heads);
    const std::int32_t length = numbers.length;
    bool is_static = true;
    std::int64_t top_k_slots = 0;
    for (std::size_t h = 0; h < heads; ++h) {
        is_static = is_static && numbers.log_gammas[h] == numbers.log_gammas[0] &&
                    (numbers.steps[h] == 1 || numbers.log_gammas[0] == 0.0f);
        top_k_slots += numbers.budgets[h];
    }
    std::vector<std::int32_t> expiry(heads * static_cast<std::size_t>(length), kvpolicy::never);
    const auto at = [&](std::int32_t h, std::int32_t t) {
        return static_cast<std::size_t>(h) * static_cast<std::size_t>(length) + static_cast<std::size_t>(t);
    };
    std::vector<Key> held;
    for (std::int32_t q = 0; q < length; ++q) {
        for (std::int32_t h = 0; h < numbers.heads; ++h) {
            const auto i = static_cast<std::size_t>(h);
            const std::int32_t t = q - numbers.windows[i];
            if (t < numbers.sinks[i] || (numbers.keep_every > 0 && t % numbers.keep_every == 0)) {
                continue;
            }
            const float score = scores[at(h, t)], tau = numbers.thresholds[i];
            if ((numbers.gate == gate_kind::at_least && !(score >= tau)) ||
                (numbers.gate == gate_kind::above && !(score > tau))) {
                expiry[at(h, t)] = q;
                continue;
            }
            held.push_back({h, t, 0.0});
        }
        for (Key& key : held) {
            const auto i = static_cast<std::size_t>(key.head);
            const double r = static_cast<double>(scores[at(key.head, key.t)]) + numbers.offsets[i];
            const std::int64_t base = q - q % numbers.rebase_limit;
            const std::int64_t age = is_static ? base - key.t : (q - key.t) / numbers.steps[i];
            key.value = r + static_cast<double>(age) * numbers.log_gammas[i];
        }
        std::sort(held.begin(), held.end(), [](const Key& a, const Key& b) {
            if (std::isnan(a.value) != std::isnan(b.value)) {
                return std::isnan(b.value);
            }
            if (!std::isnan(a.value) && a.value != b.value) {
                return a.value > b.value;
            }
            return a.t != b.t ? a.t < b.t : a.head < b.head;
        });
        // The floors first, then the best of the others up to their caps.
        std::vector<std::int64_t> of_head(heads, 0);
        std::vector<bool> stays(held.size(), false);
        std::int64_t taken = 0;
        for (std::size_t i = 0; i < held.size(); ++i) {
            const auto h = static_cast<std::size_t>(held[i].head);
            if (of_head[h]++ < numbers.floors[h]) {
                stays[i] = true;
                ++taken;
            }
        }
        std::fill(of_head.begin(), of_head.end(), 0);
        for (std::size_t i = 0; i < held.size(); ++i) {
            const auto h = static_cast<std::size_t>(held[i].head);
            const bool may = of_head[h]++ < numbers.caps[h];
            if (!stays[i] && may && taken < top_k_slots) {
                stays[i] = true;
                ++taken;
            }
        }
        std::vector<Key> next;
        for (std::size_t i = 0; i < held.size(); ++i) {
            if (stays[i]) {
                next.push_back(held[i]);
            } else {
                expiry[at(held[i].head, held[i].t)] = q;
            }
        }
        held = std::move(next);
    }
    return expiry;
}

}  // namespace kvpolicy_test
