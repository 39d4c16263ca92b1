// The sequences of a cache's layer in which nothing is clever: for every sequence and head a naive one
// (naive_cache.hpp), and what it was told.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/core/types.hpp>

#include "support/naive_cache.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

template <class P>
struct NaiveSequences {
    P policy;
    std::int32_t heads, dim;
    kvpolicy::position_t rebase;
    std::vector<NaiveHead> head;             // [max_sequences, heads]
    std::vector<std::vector<float>> scores;  // [max_sequences, heads], by position

    /// Of layer 0; keys and values have `of_dim` numbers.
    NaiveSequences(const P& of, std::int32_t max_sequences, std::int32_t of_heads, std::int32_t of_dim,
                   kvpolicy::position_t limit)
        : policy(of), heads(of_heads), dim(of_dim), rebase(limit) {
        head.resize(static_cast<std::size_t>(max_sequences * heads));
        scores.resize(head.size());
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            clear(seq);
        }
    }
    [[nodiscard]] std::size_t at(std::int32_t seq, std::int32_t h) const {
        return static_cast<std::size_t>(seq * heads + h);
    }
    void clear(std::int32_t seq) {
        for (std::int32_t h = 0; h < heads; ++h) {
            NaiveHead& one = head[at(seq, h)];
            one = {};
            one.head_params = policy.params(0, h);
            one.rebase_limit = rebase;
            const auto gate = policy.gate();
            const kvpolicy::HeadParams head_params = one.head_params;
            one.open = [gate, head_params](float score) { return gate.open(score, head_params); };
            scores[at(seq, h)].clear();
        }
    }
    /// Sequence `to` becomes what sequence `source` of `from` is.
    void copy(const NaiveSequences& from, std::int32_t source, std::int32_t to) {
        for (std::int32_t h = 0; h < heads && (&from != this || source != to); ++h) {
            head[at(to, h)] = from.head[at(source, h)];
            scores[at(to, h)] = from.scores[at(source, h)];
        }
    }
    [[nodiscard]] kvpolicy::position_t length(std::int32_t seq) const { return head[at(seq, 0)].length; }
    /// SnapKV's rule over the heads of a sequence.
    kvpolicy::EvictionReport evict(std::int32_t seq, const kvpolicy::SnapKVEviction& part, double scale) {
        kvpolicy::EvictionReport report;
        for (std::int64_t all = 1; all != 0; report.dropped += all) {
            report.rows = all = 0;
            for (std::int32_t h = 0; h < heads; ++h) {
                report.rows += static_cast<std::int64_t>(head[at(seq, h)].rows.size());
            }
            if (report.rows <= part.average * heads) {
                break;
            }
            for (std::int32_t h = 0; h < heads; ++h) {
                all += head[at(seq, h)].evict(part, scale);
            }
            report.rounds += all != 0 ? 1 : 0;
        }
        return report;
    }
    template <class T>
    void append(std::int32_t seq, std::int32_t h, const T* k, const T* v, float score) {
        std::vector<float>& known = scores[at(seq, h)];
        known.push_back(score);
        head[at(seq, h)].append({k, k + dim}, {v, v + dim},
                                [&](kvpolicy::position_t t) { return known[static_cast<std::size_t>(t)]; });
    }
};

}  // namespace test
