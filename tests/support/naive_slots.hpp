// The slots of a cache's layer in which nothing is clever: for every slot and head a naive one (naive_cache.hpp), and what it was told.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/types.hpp>

#include "support/naive_cache.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

template <class P>
struct NaiveSlots {
    P policy;
    std::int32_t heads, dim;
    kvpolicy::position_t rebase;
    std::vector<NaiveHead> head;             // [slots, heads]
    std::vector<std::vector<float>> scores;  // [slots, heads], by position

    /// Of layer 0; keys and values have `of_dim` numbers.
    NaiveSlots(const P& of, std::int32_t slots, std::int32_t of_heads, std::int32_t of_dim,
               kvpolicy::position_t limit)
        : policy(of), heads(of_heads), dim(of_dim), rebase(limit) {
        head.resize(static_cast<std::size_t>(slots * heads));
        scores.resize(head.size());
        for (std::int32_t slot = 0; slot < slots; ++slot) {
            clear(slot);
        }
    }
    [[nodiscard]] std::size_t at(std::int32_t slot, std::int32_t h) const {
        return static_cast<std::size_t>(slot * heads + h);
    }
    void clear(std::int32_t slot) {
        for (std::int32_t h = 0; h < heads; ++h) {
            NaiveHead& one = head[at(slot, h)];
            one = {};
            one.rule = policy.rule(0, h);
            one.rebase_limit = rebase;
            const auto gate = policy.gate();
            const kvpolicy::HeadRule rule = one.rule;
            one.open = [gate, rule](float score) { return gate.open(score, rule); };
            scores[at(slot, h)].clear();
        }
    }
    /// Slot `to` becomes what slot `source` of `from` is.
    void copy(const NaiveSlots& from, std::int32_t source, std::int32_t to) {
        for (std::int32_t h = 0; h < heads && (&from != this || source != to); ++h) {
            head[at(to, h)] = from.head[at(source, h)];
            scores[at(to, h)] = from.scores[at(source, h)];
        }
    }
    [[nodiscard]] kvpolicy::position_t length(std::int32_t slot) const { return head[at(slot, 0)].length; }
    /// SnapKV's rule over the heads of a slot.
    kvpolicy::EvictionReport evict(std::int32_t slot, const kvpolicy::SnapKVEviction& part, double scale) {
        kvpolicy::EvictionReport report;
        for (std::int64_t all = 1; all != 0; report.dropped += all) {
            report.rows = all = 0;
            for (std::int32_t h = 0; h < heads; ++h) {
                report.rows += static_cast<std::int64_t>(head[at(slot, h)].rows.size());
            }
            if (report.rows <= part.average * heads) {
                break;
            }
            for (std::int32_t h = 0; h < heads; ++h) {
                all += head[at(slot, h)].evict(part, scale);
            }
            report.rounds += all != 0 ? 1 : 0;
        }
        return report;
    }
    template <class T>
    void append(std::int32_t slot, std::int32_t h, const T* k, const T* v, float score) {
        std::vector<float>& known = scores[at(slot, h)];
        known.push_back(score);
        head[at(slot, h)].append({k, k + dim}, {v, v + dim},
                                 [&](kvpolicy::position_t t) { return known[static_cast<std::size_t>(t)]; });
    }
};

}  // namespace test
