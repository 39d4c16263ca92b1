// The policies of cache_life.hpp, with numbers drawn for every head: budgets of 0, of a few entries and
// without a limit beside each other.
#pragma once

#include <kvpolicy/h2o.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/quest.hpp>
#include <kvpolicy/scorers/random.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <kvpolicy/tova.hpp>

#include "support/cache_life.hpp"

#include <array>
#include <cstdint>
#include <random>

namespace test {

/// Numbers by layer and head of a life.
struct LifeNumbers {
    static constexpr std::int32_t layers = 2, heads = 3;
    using Numbers = std::array<std::int32_t, layers * heads>;
    std::mt19937 generator;
    std::int32_t scale;  // of windows and budgets, to the pages' size
    Numbers sinks, windows, budgets, fixed, pages;

    LifeNumbers(std::uint32_t seed, std::int32_t of_scale) : generator(seed), scale(of_scale) {
        for (std::size_t h = 0; h < sinks.size(); ++h) {
            sinks[h] = pick(4);
            windows[h] = 1 + pick(5 * scale);
            fixed[h] = pick(3) == 0 ? 0 : 1 + pick(5 * scale);
            budgets[h] = pick(3) == 0 ? kvpolicy::unlimited : fixed[h];
            pages[h] = 1 + pick(3);
        }
    }
    std::int32_t pick(std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    }
    static kvpolicy::PerHead<std::int32_t> of(const Numbers& numbers) {
        return kvpolicy::per_head(numbers.data(), layers, heads);
    }
    [[nodiscard]] LifeShape shape(std::int32_t page_size, std::int32_t draft) {
        return {.shape = {.layers = layers,
                          .max_sequences = 3,
                          .query_heads = 2 * heads,
                          .kv_heads = heads,
                          .head_dim_qk = 8,
                          .head_dim_vo = 8,
                          .page_size = page_size,
                          .max_draft_tokens = draft},
                .pool = {.slab_pages = 2 + pick(40), .max_slabs = 2000, .max_seq_len = 60 * scale},
                .rebase = pick(2) == 0 ? kvpolicy::rebase_limit : 7 + pick(20),
                .max_tokens = 8 * scale};
    }
};

namespace life {

using namespace kvpolicy;
using Budgets = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;
using Kept = Policy<Sink<>, Window<>, TopKBudget<>, Stride<>>;
using Evicted = Policy<Sink<>, Window<>, TopKBudget<>, Stride<>, SnapKVEviction>;
using Selected = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<>>;
using Recent = Policy<Sink<>, Window<>>;
using Random = Policy<Sink<>, Window<>, TopKBudget<>, RandomScorer>;

/// Runs a life of `P`: in a cache of fixed size where that is asked for and can be.
template <class Side, class T, class P>
void check(const P& policy, LifeNumbers& numbers, const LifeShape& shape, std::int32_t operations,
           [[maybe_unused]] bool fixed) {
    const auto seed = static_cast<std::uint32_t>(numbers.generator());
    if constexpr (Side::fixed_caches && !P::grows && !P::has_keep && !P::has_eviction) {
        if (fixed) {
            CacheLife<Side, P, FixedBudgetCache<P, T>>(shape, policy, seed).run(operations);
            return;
        }
    }
    CacheLife<Side, P, DualCache<P, T>>(shape, policy, seed).run(operations);
}

inline ObservedPrefill blocks(LifeNumbers& numbers) {
    return numbers.pick(2) == 0 ? ObservedPrefill::dense_then_prune()
                                : ObservedPrefill::in_chunks(1 + numbers.pick(6));
}

/// The policies, by number.
enum Which { budgets, kept, evicted, selected, recent, random, h2o, tova, snapkv };
inline constexpr std::int32_t policies = 9;

/// A life of one policy. Pages have `page_size` entries, or a multiple of that; windows and budgets grow with
/// `scale`.
template <class Side, Which which>
void run(std::uint32_t seed, std::int32_t scale, std::int32_t page_size, std::int32_t operations,
         bool fixed = false) {
    LifeNumbers n(seed, scale);
    const Sink<> sinks{LifeNumbers::of(n.sinks)};
    const Window<> windows{LifeNumbers::of(n.windows)};
    const TopKBudget<> keys{LifeNumbers::of(fixed ? n.fixed : n.budgets)};
    const bool drafts = which != h2o && which != tova && which != snapkv;
    LifeShape shape = n.shape(page_size, drafts ? 3 : 0);
    const auto live = [&]<class T = float>(const auto& policy, T = {}) {
        check<Side, T>(policy, n, shape, operations, fixed);
    };
    if constexpr (which == budgets) {
        live(Budgets{sinks, windows, ThresholdGate<above>{-1.0f}, keys,
                     Decay<dynamic>{-0.01f * static_cast<float>(n.pick(2)), 1 + 2 * n.pick(2)}});
    } else if constexpr (which == kept) {
        live(Kept{sinks, windows, keys, Stride<>{2 + n.pick(9)}});
    } else if constexpr (which == evicted) {
        // In double, where the order of two masses does not depend on who computed them.
        live(Evicted{sinks, windows, keys, Stride<>{9 + n.pick(20)},
                     SnapKVEviction{
                         .average = 6 * scale + n.pick(10 * scale),
                         .share = 0.1f * static_cast<float>(1 + n.pick(5)),
                         .observing = 1 + n.pick(9),
                         .pool = 1 + 2 * n.pick(3),
                         .aggregate = n.pick(2) == 0 ? group_aggregate::max : group_aggregate::mean}},
             0.0);
    } else if constexpr (which == selected) {
        shape.shape.page_size = page_size * (1 + n.pick(2));
        live(Selected{sinks, windows, keys, QuestPages<>{page_size, LifeNumbers::of(n.pages)}});
    } else if constexpr (which == recent) {
        live(Recent{sinks, windows});
    } else if constexpr (which == random) {
        live(Random{sinks, windows, keys, RandomScorer{7}});
    } else if constexpr (which == h2o) {
        live(H2O<>{windows, keys, AccumulatedMass{blocks(n)}});
    } else if constexpr (which == tova) {
        live(TOVA<>{Window<1>{}, TopKBudget<>{n.pick(4 * scale)}, LastMass{blocks(n)}});
    } else {
        live(SnapKV<>{windows, keys, WindowMass{blocks(n)}});
    }
}

}  // namespace life
}  // namespace test
