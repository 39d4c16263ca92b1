// The KV heads of a layer that share a budget, in float64 and from the definition: at every query all pairs
// (head, key) are sorted anew. The oracle of the tests of masks and caches with a SharedBudget.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include "support/naive_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace test {

/// The numbers of a head beside its HeadParams.
struct SharedHead {
    kvpolicy::HeadParams params;
    std::int32_t floor = 0;  // f best that stay
    std::int32_t cap = 0;    // c best that compete
};

/// One sequence of one layer, all KV heads.
class NaiveShared {
  public:
    std::vector<SharedHead> heads;
    std::int64_t places = 0;
    std::function<bool(std::size_t, float)> open = [](std::size_t, float) { return true; };
    std::function<bool(kvpolicy::position_t)> keeps = [](kvpolicy::position_t) { return false; };
    kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit;
    /// Whether evicted pairs are sorted again at every query, as the definition for static priorities says;
    /// otherwise only pairs that hold slots compete.
    bool from_all = false;
    /// Whether a pair was among the best of a query after one at which it was not: no interval then.
    bool returned = false;
    std::vector<NaiveHead> rows;  // [heads]: what each head holds

    /// Heads, places and flags are set; empties the sequence.
    void clear() {
        rows.assign(heads.size(), NaiveHead{});
        candidates_.clear();
        length_ = 0;
        returned = false;
    }
    [[nodiscard]] kvpolicy::position_t length() const { return length_; }

    /// One token of all heads: keys and values [heads]; score_of(head, position) is asked when a key leaves
    /// its head's window.
    void append(const std::vector<std::vector<double>>& keys, const std::vector<std::vector<double>>& values,
                const std::function<float(std::size_t, kvpolicy::position_t)>& score_of) {
        const kvpolicy::position_t q = length_++;
        for (std::size_t h = 0; h < heads.size(); ++h) {
            rows[h].length = length_;
            rows[h].rows.push_back({q, keys[h], values[h], 0.0f, false});
            const kvpolicy::position_t u = q - heads[h].params.window;
            if (u < heads[h].params.sinks || keeps(u)) {
                continue;
            }
            const float score = score_of(h, u);
            if (open(h, score)) {
                candidates_.push_back({h, u, score, true});
            } else {
                drop(h, u);
            }
        }
        compete(q);
    }

  private:
    struct Pair {
        std::size_t head;
        kvpolicy::position_t position;
        float score;
        bool held;  // was among the best at all queries so far
    };

    /// Whether one value of the layer's decay ranks all pairs at all queries.
    [[nodiscard]] bool one_decay() const {
        for (const SharedHead& head : heads) {
            if (head.params.decay_step != 1 || head.params.log_gamma != heads[0].params.log_gamma) {
                return false;
            }
        }
        return true;
    }
    [[nodiscard]] double value_of(const Pair& pair, kvpolicy::position_t q) const {
        const kvpolicy::HeadParams& params = heads[pair.head].params;
        const double r = double(pair.score) + double(params.score_offset), slope = params.log_gamma;
        if (one_decay()) {
            return r - double(pair.position - q / rebase_limit * rebase_limit) * slope;
        }
        return r + double((q - pair.position) / params.decay_step) * slope;
    }
    [[nodiscard]] bool better(const Pair& a, const Pair& b, kvpolicy::position_t q) const {
        const double x = value_of(a, q), y = value_of(b, q);
        if (std::isnan(x) != std::isnan(y)) {
            return std::isnan(y);
        }
        if (x != y && !std::isnan(x)) {
            return x > y;
        }
        return a.position != b.position ? a.position < b.position : a.head < b.head;
    }

    /// The pairs that are visible at query q, by the definition; the others leave.
    void compete(kvpolicy::position_t q) {
        std::sort(candidates_.begin(), candidates_.end(),
                  [&](const Pair& a, const Pair& b) { return better(a, b, q); });
        std::vector<std::int64_t> rank_in_head(heads.size(), 0);
        std::vector<std::int64_t> ranks;
        std::int64_t left = places;
        for (const Pair& pair : candidates_) {
            const std::int64_t rank = rank_in_head[pair.head]++;
            ranks.push_back(rank);
            left -= rank < heads[pair.head].floor ? 1 : 0;
        }
        std::vector<Pair> kept;
        for (std::size_t i = 0; i < candidates_.size(); ++i) {
            Pair pair = candidates_[i];
            const SharedHead& head = heads[pair.head];
            bool best = ranks[i] < head.floor;
            if (!best && ranks[i] < head.cap && left > 0) {
                best = true;
                --left;
            }
            returned = returned || (best && !pair.held);
            if (pair.held && !best) {
                drop(pair.head, pair.position);
            }
            pair.held = pair.held && best;
            if (from_all || best) {
                kept.push_back(pair);
            }
        }
        candidates_ = std::move(kept);
    }
    void drop(std::size_t h, kvpolicy::position_t position) {
        std::vector<NaiveHead::Row>& mine = rows[h].rows;
        mine.erase(std::find_if(mine.begin(), mine.end(),
                                [&](const NaiveHead::Row& row) { return row.position == position; }));
    }

    std::vector<Pair> candidates_;
    kvpolicy::position_t length_ = 0;
};

}  // namespace test
