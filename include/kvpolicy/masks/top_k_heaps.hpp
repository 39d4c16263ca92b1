// Heaps with the worst key of a head's top-k slots on top (top_k_set.hpp): one of static priorities, and one
// per class of positions for decay steps above 1.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace kvpolicy::detail {

/// A rank value (ranking.hpp) as a number that < and == order as ranks_before() orders values: NaN becomes
/// -inf, and -inf the lowest double, which no value of a finite score comes near.
inline double ordered(double value) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double number = value == -infinity ? std::numeric_limits<double>::lowest() : value;
    return std::isnan(value) ? -infinity : number;
}

/// One skew heap of two: nodes have the members left and right, -1 for none. Children change sides on the way
/// down, which keeps the paths short on average.
template <class Node, class Worse>
std::int32_t merge_skew_heaps(Node* nodes, std::int32_t a, std::int32_t b, const Worse& worse) {
    std::int32_t top = -1;
    std::int32_t* link = &top;
    while (a != -1 && b != -1) {
        if (worse(nodes[b], nodes[a])) {
            std::swap(a, b);
        }
        *link = a;
        Node& one = nodes[a];
        a = one.right;
        one.right = one.left;
        link = &one.left;
    }
    *link = a != -1 ? a : b;
    return top;
}

/// A binary heap with the worst key on top. Values stand still after build(). Calls in order: fill(),
/// build(), then worst() and replace_worst().
class priority_heap {
  public:
    struct node {
        double value;           // ordered()
        std::int32_t position;  // relative; of two equal values the younger key is the worse one
        std::int32_t entry;     // whose priority it is
    };

    explicit priority_heap(node* nodes) : nodes_(nodes) {}

    static bool worse(const node& a, const node& b) {
        // Without branches: half of all comparisons would be predicted wrongly.
        return (a.value < b.value) | ((a.value == b.value) & (a.position > b.position));
    }

    void clear() { size_ = 0; }
    void fill(const node& one) { nodes_[size_++] = one; }
    void build() {
        for (std::int32_t i = size_ / 2; i-- > 0;) {
            descend(i, nodes_[i]);
        }
    }
    [[nodiscard]] std::int32_t size() const { return size_; }
    [[nodiscard]] const node& worst() const { return nodes_[0]; }
    void replace_worst(const node& one) { descend(0, one); }

  private:
    /// Puts `one` at i or below.
    void descend(std::int32_t i, const node one) {
        std::int32_t child = 2 * i + 1;
        for (; child + 1 < size_; child = 2 * i + 1) {
            child += static_cast<std::int32_t>(worse(nodes_[child + 1], nodes_[child]));
            if (!worse(nodes_[child], one)) {
                nodes_[i] = one;
                return;
            }
            nodes_[i] = nodes_[child];
            i = child;
        }
        if (child < size_ && worse(nodes_[child], one)) {
            nodes_[i] = nodes_[child];
            i = child;
        }
        nodes_[i] = one;
    }

    node* nodes_;
    std::int32_t size_ = 0;
};

/// For decay step n > 1: one skew heap for each class of positions mod n, the worst key on top. Two keys of a
/// class age at the same queries, so the real numbers score + age * log gamma keep their order; a node has
/// them as a pair of doubles, without rounding. Ranks are those of the rounded values (ranking.hpp). Rounding
/// is monotonic, so the worst value of a class is its top's; keys that rounding makes equal to it form a
/// subtree at the top, which is searched for the youngest of them. A top-k update costs O(n + log k).
///
/// Nodes have the numbers of the entries that they rank. Ages stay below rebase_limit, so age * log gamma is
/// exact.
class class_heaps {
  public:
    struct node {
        double score;           // ordered()
        double high, low;       // score - (position / n) * log gamma, without rounding, as high + low
        double period;          // position / n, relative
        std::int32_t position;  // relative
        std::int32_t phase;     // position % n
        std::int32_t left, right;
    };

    /// Position `origin` has the relative position 0; nodes [k], links [k + 1], roots [decay step].
    class_heaps(node* nodes, std::int32_t** links, std::int32_t* roots, const HeadParams& head_params,
                position_t origin)
        : nodes_(nodes),
          links_(links),
          roots_(roots),
          steps_(head_params.decay_step),
          log_gamma_(head_params.log_gamma),
          origin_(origin) {}

    void clear() {
        for (std::int32_t phase = 0; phase < steps_; ++phase) {
            roots_[phase] = none;
        }
    }

    void insert(std::int32_t entry, position_t t, double score) {
        node& one = nodes_[entry];
        one.score = ordered(score);
        one.position = static_cast<std::int32_t>(t - origin_);
        one.phase = static_cast<std::int32_t>(t % steps_);
        one.period = period_of(t);
        one.left = one.right = none;
        // high + low is the difference itself (Knuth's two-sum), and a score that absorbs its decay stays
        // what it is.
        const double decay = one.period * log_gamma_;
        one.high = one.score - decay;
        const double taken = one.high - one.score;
        one.low = (one.score - (one.high - taken)) - (decay + taken);
        if (absorbs(one.score)) {
            one.low = 0.0;
        }
        roots_[one.phase] = merge(roots_[one.phase], entry);
    }

    /// The rounded value of the worst key at query q, ordered(): that of some top. At least one key is
    /// there.
    [[nodiscard]] double worst_value(position_t q) const {
        const double period = period_of(q);
        const auto phase = static_cast<std::int32_t>(q % steps_);
        double worst = std::numeric_limits<double>::infinity();
        for (std::int32_t i = 0; i < steps_; ++i) {
            if (roots_[i] != none) {
                const double value = value_of(nodes_[roots_[i]], period, phase);
                worst = value < worst ? value : worst;
            }
        }
        return worst;
    }

    /// The entry of the worst key at query q, whose value is `worst`.
    [[nodiscard]] std::int32_t find_worst(position_t q, double worst) const {
        return *link_of_worst(q, worst);
    }
    /// The same, which leaves.
    std::int32_t remove_worst(position_t q, double worst) {
        std::int32_t* const link = link_of_worst(q, worst);
        const std::int32_t entry = *link;
        *link = merge(nodes_[entry].left, nodes_[entry].right);
        return entry;
    }

  private:
    static constexpr std::int32_t none = -1;

    /// Whose number is the worst key's: a root, or a link of the node above it.
    [[nodiscard]] std::int32_t* link_of_worst(position_t q, double worst) const {
        const double period = period_of(q);
        const auto phase = static_cast<std::int32_t>(q % steps_);
        std::int32_t* youngest = nullptr;
        for (std::int32_t i = 0; i < steps_; ++i) {
            std::int32_t waiting = 0;
            links_[waiting++] = roots_ + i;
            while (waiting != 0) {
                std::int32_t* const link = links_[--waiting];
                if (*link == none || value_of(nodes_[*link], period, phase) != worst) {
                    continue;
                }
                node& one = nodes_[*link];
                if (youngest == nullptr || one.position > nodes_[*youngest].position) {
                    youngest = link;
                }
                // Values that absorb are equal without rounding: the youngest of those is on top.
                if (!absorbs(worst)) {
                    links_[waiting++] = &one.left;
                    links_[waiting++] = &one.right;
                }
            }
        }
        return youngest;
    }
    /// Whether x is the value of an infinite score or of a NaN: no decay changes it.
    static bool absorbs(double x) {
        return x == std::numeric_limits<double>::infinity() || x <= std::numeric_limits<double>::lowest();
    }
    static bool worse(const node& a, const node& b) {
        if (a.high != b.high) {
            return a.high < b.high;
        }
        return a.low != b.low ? a.low < b.low : a.position > b.position;
    }
    [[nodiscard]] double period_of(position_t t) const {
        const position_t periods = t / steps_ - origin_ / steps_;
        return static_cast<double>(periods);
    }
    /// effective_score(), from the query's period and phase: no division.
    [[nodiscard]] double value_of(const node& one, double period, std::int32_t phase) const {
        const double age = period - one.period - (one.phase > phase ? 1.0 : 0.0);
        return one.score + age * log_gamma_;
    }

    std::int32_t merge(std::int32_t a, std::int32_t b) {
        return merge_skew_heaps(nodes_, a, b,
                                [](const node& one, const node& other) { return worse(one, other); });
    }

    node* nodes_;
    std::int32_t** links_;
    std::int32_t* roots_;
    std::int32_t steps_;
    double log_gamma_;
    position_t origin_;
};

}  // namespace kvpolicy::detail
