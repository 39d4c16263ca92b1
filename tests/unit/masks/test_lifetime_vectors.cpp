// build_mask against lifetimes that an independent reference computed from the definitions
// (tests/reference/lifetimes.py), for every composition of sinks, window, keep part, gate and budget.
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/masks/build.hpp>

#include "support/lifetime_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using namespace kvpolicy;
using kvpolicy_test::for_each_case;
using kvpolicy_test::gate_kind;
using kvpolicy_test::LifetimeCase;
using kvpolicy_test::vectors;
using kvpolicy_test::with_policy;

namespace {

constexpr expiry_t untouched = -123;

const vectors& file() {
    static const vectors loaded = vectors::load("lifetimes.kvpv");
    return loaded;
}

MaskOptions options_of(position_t limit) {
    MaskOptions options;
    options.rebase_limit = limit;
    return options;
}

/// A mask [batch, heads, length] of its own memory, one guard value after each head, workspace
/// exactly as asked for.
struct Built {
    std::vector<expiry_t> memory;
    plane_view<expiry_t> view;

    [[nodiscard]] bool guards_untouched() const {
        for (std::int32_t b = 0; b < view.batch; ++b) {
            for (std::int32_t h = 0; h < view.heads; ++h) {
                if (view.head(b, h)[view.length] != untouched) {
                    return false;
                }
            }
        }
        return true;
    }
};

template <class P>
Built build(const host& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
            std::int32_t heads, const MaskOptions& options) {
    const std::int64_t row = std::int64_t{sequences.length} + 1;
    Built result;
    result.memory.assign(static_cast<std::size_t>(row * heads * sequences.batch), untouched);
    result.view = {result.memory.data(), sequences.batch, heads, sequences.length, row * heads, row};
    const std::size_t bytes = build_mask_workspace_bytes(ctx, policy, sequences, heads, options);
    std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
    std::fill_n(reinterpret_cast<unsigned char*>(workspace.data()),
                workspace.size() * sizeof(std::max_align_t), static_cast<unsigned char>(0xff));
    build_mask(ctx, policy, scores, sequences, result.view, workspace_view{workspace.data(), bytes}, options);
    return result;
}

std::vector<std::int32_t> segments_of(std::int64_t index) {
    const auto& offsets = file().get<std::int32_t>("cu_offsets");
    const auto& cu = file().get<std::int32_t>("cu");
    return {cu.data() + offsets[index], cu.data() + offsets[index + 1]};
}

const std::int32_t* expected_of(std::int64_t index) {
    return file().get<std::int32_t>("expiry").data() + file().get<std::int32_t>("offsets")[index];
}

std::string describe(const LifetimeCase& c, std::int64_t index) {
    std::ostringstream text;
    text << "case " << index << ": pattern " << c.pattern << ", S " << c.length << ", s " << c.sinks << ", w "
         << c.window << ", gate " << static_cast<int>(c.gate) << ", k ";
    if (c.has_budget) {
        text << c.budget;
    } else {
        text << "none";
    }
    text << ", n " << c.decay_step << ", keep " << c.keep_every << ", limit " << c.rebase_limit << ", tau "
         << c.threshold << ", log gamma " << c.log_gamma;
    return text.str();
}

/// Empty where expiry (clamped to `length`) is as expected, else the first difference.
std::string difference(const expiry_t* expiry, const std::int32_t* expected, std::int32_t length,
                       std::int32_t clamp) {
    for (std::int32_t t = 0; t < length; ++t) {
        const std::int32_t wanted = std::min(expected[t], clamp);
        if (std::min(expiry[t], clamp) != wanted) {
            return "key " + std::to_string(t) + " expires at " + std::to_string(expiry[t]) + ", not " +
                   std::to_string(wanted);
        }
    }
    return "";
}

/// Raw scores of a case, with `poison` in the place of every score that must not be read (nothing if
/// not `poisoned`).
std::vector<float> scores_of(const LifetimeCase& c, std::int64_t index, bool poisoned, float poison) {
    const float* raw = file().get<float>("scores").row(c.pattern);
    std::vector<float> scores(raw, raw + c.length);
    scores.push_back(0.0f);  // so that an empty sequence has an address too
    std::vector<std::int32_t> edges = segments_of(index);
    if (edges.empty()) {
        edges = {0, c.length};
    }
    for (std::size_t segment = 0; poisoned && segment + 1 < edges.size(); ++segment) {
        const std::int32_t begin = edges[segment];
        const std::int32_t end = edges[segment + 1];
        for (std::int32_t t = begin; t < end; ++t) {
            if (score_is_unread(c, t - begin, end - begin)) {
                scores[static_cast<std::size_t>(t)] = t % 2 == 0 ? poison : -poison;
            }
        }
    }
    return scores;
}

void check_all(const host& ctx, bool poisoned, float poison) {
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        const std::vector<float> scores = scores_of(c, index, poisoned, poison);
        const std::vector<std::int32_t> edges = segments_of(index);
        Sequences sequences{.batch = 1, .length = c.length};
        if (!edges.empty()) {
            sequences.cu_seqlens = edges.data();
            sequences.segments = static_cast<std::int32_t>(edges.size()) - 1;
        }
        with_policy(c, [&](const auto& policy) {
            const auto plane = view_bhs(scores.data(), 1, 1, c.length);
            const Built mask = build(ctx, policy, plane, sequences, 1, options_of(c.rebase_limit));
            std::string wrong = difference(mask.view.head(0, 0), expected_of(index), c.length, c.length);
            // A key of a packed segment is invisible to the next one: there, expiries are exact, not
            // only clamped to S.
            for (std::int32_t t = 0; wrong.empty() && !edges.empty() && t < c.length; ++t) {
                const expiry_t end = *std::upper_bound(edges.begin(), edges.end(), t);
                if (mask.view.head(0, 0)[t] > end && end < c.length) {
                    wrong = "key " + std::to_string(t) + " outlives its segment, which ends at " +
                            std::to_string(end);
                }
            }
            CHECK_MESSAGE(wrong == "", describe(c, index));
            CHECK_MESSAGE(mask.guards_untouched(), describe(c, index));
        });
    });
}

}  // namespace

TEST_CASE("lifetimes equal the reference's, for every composition and score pattern") {
    check_all(host(1), false, 0.0f);
}

TEST_CASE("lifetimes do not depend on the number of threads") { check_all(host(4), false, 0.0f); }

TEST_CASE("scores of keys that never leave are not read: garbage there changes nothing") {
    check_all(host(2), true, 1e30f);
}

TEST_CASE("scores of keys that never leave are not read: a NaN there is no error") {
    check_all(host(2), true, std::numeric_limits<float>::quiet_NaN());
}

TEST_CASE("policies that rank nothing need no scores") {
    const host ctx(1);
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        if (c.has_budget || c.gate != gate_kind::none || !segments_of(index).empty()) {
            return;
        }
        const Sequences sequences{.batch = 1, .length = c.length};
        with_policy(c, [&](const auto& policy) {
            const Built mask = build(ctx, policy, {}, sequences, 1, options_of(c.rebase_limit));
            CHECK_MESSAGE(difference(mask.view.head(0, 0), expected_of(index), c.length, c.length) == "",
                          describe(c, index));
        });
        if (c.keep_every > 0) {
            return;
        }
        if (c.window == 1) {  // a policy without a Window has w = 1
            const Built mask = build(ctx, Policy<Sink<>>(Sink<>{c.sinks}), {}, sequences, 1, {});
            CHECK_MESSAGE(difference(mask.view.head(0, 0), expected_of(index), c.length, c.length) == "",
                          describe(c, index));
        }
        if (c.sinks == 0) {  // and one without a Sink has s = 0
            const Built mask = build(ctx, Policy<Window<>>(Window<>{c.window}), {}, sequences, 1, {});
            CHECK_MESSAGE(difference(mask.view.head(0, 0), expected_of(index), c.length, c.length) == "",
                          describe(c, index));
        }
    });
}

TEST_CASE("parameters at compile time give the lifetimes of the same parameters at run time") {
    const host ctx(1);
    int seen = 0;
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        if (c.sinks != 4 || c.window != 16 || !c.has_budget || c.budget != 12 || c.keep_every != 0 ||
            c.rebase_limit != rebase_limit || !segments_of(index).empty()) {
            return;
        }
        const std::vector<float> scores = scores_of(c, index, false, 0.0f);
        const auto check = [&](const auto& policy) {
            ++seen;
            const Sequences sequences{.batch = 1, .length = c.length};
            const Built mask = build(ctx, policy, view_bhs(scores.data(), 1, 1, c.length), sequences, 1, {});
            CHECK_MESSAGE(difference(mask.view.head(0, 0), expected_of(index), c.length, c.length) == "",
                          describe(c, index));
        };
        // Parts in several orders; Decay<n> for the steps that the vectors have.
        const auto with_decay = [&]<class Step>(Step decay) {
            if (c.gate == gate_kind::none) {
                check(Policy<Sink<4>, Window<16>, TopKBudget<12>, Step>({}, {}, {}, decay));
            } else if (c.gate == gate_kind::at_least) {
                const ThresholdGate<at_least> gate(c.threshold);
                check(Policy<Step, ThresholdGate<at_least>, TopKBudget<12>, Window<16>, Sink<4>>(decay, gate,
                                                                                                 {}, {}, {}));
            } else {
                const ThresholdGate<above> gate(c.threshold);
                check(Policy<Window<16>, ThresholdGate<above>, Step, Sink<4>, TopKBudget<12>>({}, gate, decay,
                                                                                              {}, {}));
            }
        };
        if (c.decay_step == 1) {
            with_decay(Decay<1>(c.log_gamma));
        }
        if (c.decay_step == 3) {
            with_decay(Decay<3>(c.log_gamma));
        }
        if (c.decay_step == 64) {
            with_decay(Decay<64>(c.log_gamma));
        }
        if (c.log_gamma == 0.0f && c.gate == gate_kind::none) {
            check(Policy<Sink<4>, Window<16>, TopKBudget<12>>{});
        }
    });
    CHECK(seen > 20);
}

TEST_CASE("heads of one call have their own numbers") {
    // Cases that differ in numbers only, with one length and one base, become the heads of one mask.
    const host ctx(2);
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int64_t>> groups;
    std::vector<LifetimeCase> cases;
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        cases.push_back(c);
        if (c.has_budget && c.keep_every == 0 && c.rebase_limit == rebase_limit &&
            segments_of(index).empty()) {
            groups[{static_cast<std::int32_t>(c.gate), c.length}].push_back(index);
        }
    });
    for (const auto& group : groups) {
        const std::vector<std::int64_t>& members = group.second;
        const auto heads = static_cast<std::int32_t>(members.size());
        const std::int32_t length = group.first.second;
        std::vector<std::int32_t> sinks, windows, budgets, steps;
        std::vector<float> thresholds, slopes, scores;
        for (const std::int64_t index : members) {
            const LifetimeCase& c = cases[static_cast<std::size_t>(index)];
            sinks.push_back(c.sinks);
            windows.push_back(c.window);
            budgets.push_back(c.budget);
            steps.push_back(c.decay_step);
            thresholds.push_back(c.threshold);
            slopes.push_back(c.log_gamma);
            const std::vector<float> mine = scores_of(c, index, false, 0.0f);
            scores.insert(scores.end(), mine.begin(), mine.begin() + length);
        }
        scores.push_back(0.0f);
        const Sink<> sink{per_head(sinks.data(), 1, heads)};
        const Window<> window{per_head(windows.data(), 1, heads)};
        const TopKBudget<> budget{per_head(budgets.data(), 1, heads)};
        const Decay<dynamic> decay{per_head(slopes.data(), 1, heads), per_head(steps.data(), 1, heads)};
        const auto check = [&](const auto& policy) {
            const Sequences sequences{.batch = 1, .length = length};
            const Built mask =
                build(ctx, policy, view_bhs(scores.data(), 1, heads, length), sequences, heads, {});
            for (std::int32_t h = 0; h < heads; ++h) {
                const std::int64_t index = members[static_cast<std::size_t>(h)];
                CHECK_MESSAGE(difference(mask.view.head(0, h), expected_of(index), length, length) == "",
                              describe(cases[static_cast<std::size_t>(index)], index));
            }
            CHECK(mask.guards_untouched());
        };
        const PerHead<float> tau = per_head(thresholds.data(), 1, heads);
        switch (static_cast<gate_kind>(group.first.first)) {
            case gate_kind::none:
                check(Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>(sink, window, budget, decay));
                break;
            case gate_kind::at_least:
                check(Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>, Decay<dynamic>>(
                    sink, window, ThresholdGate<at_least>(tau), budget, decay));
                break;
            case gate_kind::above:
                check(Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>(
                    sink, window, ThresholdGate<above>(tau), budget, decay));
                break;
        }
    }
}

TEST_CASE(
    "sequences of different lengths in one batch: a prefix has the same mask, and nothing past a length is "
    "touched") {
    const host ctx(2);
    for_each_case(file(), [&](const LifetimeCase& c, std::int64_t index) {
        if (!segments_of(index).empty() || c.length < 50 || index % 3 != 0) {
            return;
        }
        const std::vector<std::int32_t> lengths = {0, c.length, 1, c.window < c.length ? c.window : 2,
                                                   c.length / 2};
        const auto batch = static_cast<std::int32_t>(lengths.size());
        const std::vector<float> one = scores_of(c, index, false, 0.0f);
        std::vector<float> scores;
        for (const std::int32_t length : lengths) {
            scores.insert(scores.end(), one.begin(), one.begin() + length);
            scores.insert(scores.end(), static_cast<std::size_t>(c.length - length),
                          std::numeric_limits<float>::quiet_NaN());
        }
        Sequences sequences{.batch = batch, .length = c.length};
        sequences.lengths = lengths.data();
        with_policy(c, [&](const auto& policy) {
            const auto plane = view_bhs(std::as_const(scores).data(), batch, 1, c.length);
            const Built mask = build(ctx, policy, plane, sequences, 1, options_of(c.rebase_limit));
            for (std::int32_t b = 0; b < batch; ++b) {
                const std::int32_t length = lengths[static_cast<std::size_t>(b)];
                const expiry_t* expiry = mask.view.head(b, 0);
                CHECK_MESSAGE(difference(expiry, expected_of(index), length, length) == "",
                              describe(c, index));
                const bool quiet = std::all_of(expiry + length, expiry + c.length,
                                               [](expiry_t e) { return e == untouched; });
                CHECK_MESSAGE(quiet, describe(c, index));
            }
        });
    });
}

#if KVPOLICY_EXCEPTIONS
TEST_CASE("a NaN score that competes is refused, and a workspace too small by a byte") {
    const host ctx(1);
    const Policy<Sink<>, Window<>, TopKBudget<>> policy(Sink<>{1}, Window<>{2}, TopKBudget<>{3});
    std::vector<float> scores(20, 0.0f);
    std::vector<expiry_t> expiry(20, untouched);
    const Sequences sequences{.batch = 1, .length = 20};
    const std::size_t bytes = build_mask_workspace_bytes(ctx, policy, sequences, 1);
    std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
    const auto plane = view_bhs(std::as_const(scores).data(), 1, 1, 20);
    const auto mask = view_bhs(expiry.data(), 1, 1, 20);
    if (bytes > 0) {
        CHECK_THROWS_AS(
            build_mask(ctx, policy, plane, sequences, mask, workspace_view{workspace.data(), bytes - 1}),
            invalid_argument);
    }
    scores[10] = std::numeric_limits<float>::quiet_NaN();
    CHECK_THROWS_AS(build_mask(ctx, policy, plane, sequences, mask, workspace_view{workspace.data(), bytes}),
                    invalid_argument);
    CHECK(std::all_of(expiry.begin(), expiry.end(), [](expiry_t e) { return e == untouched; }));
}
#endif
