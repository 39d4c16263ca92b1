// One KV head of a bounded cache, stepped in the order of design, section 2, with nothing clever in
// it: a list of keys, float64 attention, and a ranking written again from the definition. The oracle
// of the cache's tests.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace test {

/// A storage type as float64.
template <class T>
double real(T value) {
    if constexpr (std::is_same_v<T, double>) {
        return value;
    } else {
        return static_cast<double>(static_cast<float>(value));
    }
}
template <class T>
std::vector<double> real_row(const T* row, std::int32_t dim) {
    std::vector<double> values(static_cast<std::size_t>(dim));
    for (std::int32_t d = 0; d < dim; ++d) {
        values[static_cast<std::size_t>(d)] = real(row[d]);
    }
    return values;
}

struct AttentionResult {
    std::vector<double> out;
    double lse = -std::numeric_limits<double>::infinity();
};

/// What ranks a key: design, section 2, "Ranking".
inline double reference_rank(const kvpolicy::HeadParams& head_params, float score, kvpolicy::position_t t,
                             kvpolicy::position_t q, kvpolicy::position_t rebase_limit) {
    const double slope = head_params.log_gamma;
    if (head_params.decay_step == 1) {
        const kvpolicy::position_t base = q / rebase_limit * rebase_limit;
        return double(score) - double(t - base) * slope;
    }
    const kvpolicy::position_t periods = (q - t) / head_params.decay_step;
    return double(score) + double(periods) * slope;
}

class NaiveHead {
  public:
    struct Row {
        kvpolicy::position_t position;
        std::vector<double> k, v;
        float score;      // of a long-range key
        bool long_range;  // has left the window and holds a place
    };

    kvpolicy::HeadParams head_params;
    std::function<bool(float)> open = [](float) { return true; };
    std::function<bool(kvpolicy::position_t)> keeps = [](kvpolicy::position_t) { return false; };
    kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit;
    kvpolicy::position_t length = 0;
    std::vector<Row> rows;
    std::vector<std::vector<std::vector<double>>> queries;  // by query head of the group and position

    /// Query head g's query at the newest position, for evict.
    void asked(std::int32_t g, std::vector<double> query) {
        queries.resize(std::max(queries.size(), static_cast<std::size_t>(g) + 1));
        queries[static_cast<std::size_t>(g)].push_back(std::move(query));
    }

    /// A round of SnapKV's rule (policies/eviction.hpp); returns how many rows were dropped.
    std::int64_t evict(const kvpolicy::SnapKVEviction& part, double scale) {
        std::sort(rows.begin(), rows.end(),
                  [](const Row& a, const Row& b) { return a.position < b.position; });
        const auto n = rows.size();
        std::vector<double> mass(n, 0.0), weights(n);
        for (auto t = std::max<kvpolicy::position_t>(0, length - part.observing); t < length; ++t) {
            std::vector<double> of_group(n, 0.0);
            for (const auto& head : queries) {
                double sum = 0.0;
                for (std::size_t j = 0; j < n; ++j) {
                    double dot = 0.0;
                    for (std::size_t d = 0; d < rows[j].k.size(); ++d) {
                        dot += head[static_cast<std::size_t>(t)][d] * rows[j].k[d];
                    }
                    weights[j] = rows[j].position <= t ? std::exp(scale * dot) : 0.0;
                    sum += weights[j];
                }
                for (std::size_t j = 0; j < n && sum > 0.0; ++j) {
                    const double weight = weights[j] / sum;
                    of_group[j] = part.aggregate == kvpolicy::group_aggregate::max
                                      ? std::max(of_group[j], weight)
                                      : of_group[j] + weight / static_cast<double>(queries.size());
                }
            }
            for (std::size_t j = 0; j < n; ++j) {
                mass[j] += of_group[j];
            }
        }
        // The worst first: the lowest among neighbors, of equal ones the newer.
        std::vector<std::pair<double, kvpolicy::position_t>> candidates;
        const auto reach = static_cast<std::ptrdiff_t>(part.pool / 2),
                   last = static_cast<std::ptrdiff_t>(n) - 1;
        for (std::ptrdiff_t j = 0; j <= last; ++j) {
            double pooled = 0.0;
            for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(0, j - reach); i <= std::min(last, j + reach);
                 ++i) {
                pooled = std::max(pooled, mass[static_cast<std::size_t>(i)]);
            }
            const Row& row = rows[static_cast<std::size_t>(j)];
            if (row.long_range && !keeps(row.position)) {
                candidates.emplace_back(pooled, -row.position);
            }
        }
        std::sort(candidates.begin(), candidates.end());
        // The share as the decimal number that it was written as, of up to six digits.
        const auto share =
            static_cast<std::size_t>(std::llround(static_cast<double>(part.share) * 1e6)) * n / 1000000;
        candidates.resize(std::min(candidates.size(), std::max<std::size_t>(1, share)));
        for (const auto& [score, position] : candidates) {
            rows.erase(std::find_if(rows.begin(), rows.end(),
                                    [at = -position](const Row& row) { return row.position == at; }));
        }
        return static_cast<std::int64_t>(candidates.size());
    }

    /// One token. score_of(position) is asked when that key leaves the window, and only then.
    void append(std::vector<double> key, std::vector<double> value,
                const std::function<float(kvpolicy::position_t)>& score_of) {
        const kvpolicy::position_t q = length++;
        rows.push_back({q, std::move(key), std::move(value), 0.0f, false});
        const kvpolicy::position_t u = q - head_params.window;
        if (u >= head_params.sinks) {
            leave(u, q, score_of);
        }
    }

    [[nodiscard]] AttentionResult attend(const std::vector<double>& query, double scale,
                                         double logits_soft_cap = 0.0) const {
        AttentionResult result;
        if (rows.empty()) {
            return result;
        }
        std::vector<double> logits;
        double top = -std::numeric_limits<double>::infinity();
        for (const Row& row : rows) {
            double dot = 0.0;
            for (std::size_t d = 0; d < query.size(); ++d) {
                dot += query[d] * row.k[d];
            }
            double logit = scale * dot;
            if (logits_soft_cap > 0.0) {
                logit = logits_soft_cap * std::tanh(logit / logits_soft_cap);
            }
            logits.push_back(logit);
            top = std::max(top, logit);
        }
        double sum = 0.0;
        for (const double logit : logits) {
            sum += std::exp(logit - top);
        }
        result.lse = top + std::log(sum);
        result.out.assign(rows[0].v.size(), 0.0);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const double weight = std::exp(logits[i] - top) / sum;
            for (std::size_t c = 0; c < result.out.size(); ++c) {
                result.out[c] += weight * rows[i].v[c];
            }
        }
        return result;
    }

    [[nodiscard]] std::vector<kvpolicy::position_t> positions() const {
        std::vector<kvpolicy::position_t> held;
        for (const Row& row : rows) {
            held.push_back(row.position);
        }
        std::sort(held.begin(), held.end());
        return held;
    }

  private:
    using iterator = std::vector<Row>::iterator;

    void leave(kvpolicy::position_t u, kvpolicy::position_t q,
               const std::function<float(kvpolicy::position_t)>& score_of) {
        const iterator leaver =
            std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.position == u; });
        if (keeps(u)) {
            leaver->long_range = true;
            return;
        }
        const float score = score_of(u);
        if (head_params.budget == 0 || !open(score)) {
            rows.erase(leaver);
            return;
        }
        leaver->score = score;
        leaver->long_range = true;
        // All places and the candidate compete; whoever is worst goes once there are more than k of them.
        std::int32_t kept = 0;
        iterator worst = leaver;
        for (iterator row = rows.begin(); row != rows.end(); ++row) {
            if (!row->long_range || keeps(row->position)) {
                continue;
            }
            ++kept;
            const double mine = reference_rank(head_params, row->score, row->position, q, rebase_limit);
            const double least = reference_rank(head_params, worst->score, worst->position, q, rebase_limit);
            if (mine < least || (mine == least && row->position > worst->position)) {
                worst = row;
            }
        }
        if (kept > head_params.budget) {
            rows.erase(worst);
        }
    }
};

}  // namespace test
