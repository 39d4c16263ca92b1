// One head of an observed policy while a block of queries passes: the keys that it holds, as a list, and what
// becomes of them. A cache makes the list from its rows and writes the remaining keys back; a mask keeps the
// list itself. So both decide alike.
//
// A block [a, b), in the order of a step (docs/concepts.md, the order of a step):
//   1. where decoded tokens evict: the keys up to a - w compete with the masses that they have (choose at a);
//   2. the block's keys join; its queries attend, and give mass (observe);
//   3. at the end of a prompt's block the keys up to b - 1 - w compete with new masses (choose at b - 1).
// With w = r + 1 the r most recent keys are exempt when the next query comes, and where steps evict, a block
// of one token has no third part.
#pragma once

#include <kvpolicy/attention/host/mass_pass.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/ranking.hpp>
#include <kvpolicy/scorers/observed.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// The list: key i has position[i], the mass score[i] from before the block, and row[i], the caller's name
/// for where it is (a row of a cache; -1 - j for token j of the block). Held keys in any order, then the
/// block's own in theirs.
template <Storage T>
class observed_list {
  public:
    const T** key = nullptr;
    position_t* position = nullptr;
    float* score = nullptr;
    std::int32_t* row = nullptr;
    double* mass = nullptr;
    std::int32_t count = 0;
    std::int32_t own = 0;  // index of the block's first key

    observed_list() = default;
    /// Takes the memory for `capacity` keys from an arena that may only count.
    observed_list(detail::arena& memory, std::int64_t capacity) {
        const auto n = static_cast<std::size_t>(capacity);
        key = memory.take<const T*>(n);
        position = memory.take<position_t>(n);
        score = memory.take<float>(n);
        row = memory.take<std::int32_t>(n);
        mass = memory.take<double>(n);
        value_ = memory.take<double>(n);
        order_ = memory.take<std::int32_t>(n);
        lost_ = memory.take<unsigned char>(n);
    }

    void add(const T* k, position_t t, float s, std::int32_t name) {
        key[count] = k;
        position[count] = t;
        score[count] = s;
        row[count] = name;
        ++count;
    }

    /// Scratch of `count` entries that choose() uses too.
    [[nodiscard]] std::int32_t* scratch() const { return order_; }

    /// The keys up to q - w compete for the head's places: the k with the largest (pooled) masses stay, ties
    /// to the older key. The others leave the list, each after lost(i).
    template <class Lost>
    void choose(const HeadParams& head_params, const Observation& seen, position_t q, Lost&& lost) {
        std::int32_t competing = 0;
        for (std::int32_t i = 0; i < count; ++i) {
            if (position[i] >= head_params.sinks && position[i] <= q - head_params.window) {
                order_[competing++] = i;
            }
        }
        if (competing <= head_params.budget) {
            return;
        }
        value(seen, competing);
        const auto better = [this](std::int32_t a, std::int32_t b) {
            return ranks_before(value_[a], position[a], value_[b], position[b]);
        };
        std::int32_t* const places = order_ + head_params.budget;
        if (competing == head_params.budget + 1) {
            std::iter_swap(places, std::max_element(order_, order_ + competing, better));
        } else {
            std::nth_element(order_, places, order_ + competing, better);
        }
        std::fill_n(lost_, count, static_cast<unsigned char>(0));
        for (const std::int32_t* i = places; i != order_ + competing; ++i) {
            lost_[*i] = 1;
        }
        remove(lost);
    }

    /// Adds the block's masses to what keys had, or puts them in its place.
    void take_masses(const Observation& seen) {
        for (std::int32_t i = 0; i < count; ++i) {
            const double before = seen.accumulate && i < own ? static_cast<double>(score[i]) : 0.0;
            score[i] = static_cast<float>(before + mass[i]);
        }
    }

  private:
    /// What the competitors order_[0 .. competing) are ranked by, value_[i] for key i.
    void value(const Observation& seen, std::int32_t competing) {
        if (seen.pool == 1) {
            for (std::int32_t n = 0; n < competing; ++n) {
                value_[order_[n]] = static_cast<double>(score[order_[n]]);
            }
            return;
        }
        std::sort(order_, order_ + competing,
                  [this](std::int32_t a, std::int32_t b) { return position[a] < position[b]; });
        const std::int32_t reach = seen.pool / 2;
        for (std::int32_t n = 0; n < competing; ++n) {
            const std::int32_t begin = std::max(n - reach, 0);
            const auto end =
                static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{n} + reach + 1, competing));
            double sum = 0.0, largest = 0.0;
            for (std::int32_t j = begin; j < end; ++j) {
                const double one = static_cast<double>(score[order_[j]]);
                sum += one;
                largest = std::max(largest, one);
            }
            value_[order_[n]] = seen.pool_largest ? largest : sum / seen.pool;
        }
    }

    template <class Lost>
    void remove(Lost& lost) {
        std::int32_t kept = 0, before_own = own;
        for (std::int32_t i = 0; i < count; ++i) {
            if (lost_[i] != 0) {
                lost(i);
                before_own -= i < own ? 1 : 0;
                continue;
            }
            key[kept] = key[i];
            position[kept] = position[i];
            score[kept] = score[i];
            row[kept++] = row[i];
        }
        count = kept;
        own = before_own;
    }

    double* value_ = nullptr;
    std::int32_t* order_ = nullptr;
    unsigned char* lost_ = nullptr;
};

/// A list in the caller's workspace.
template <Storage T>
struct observed_head {
    observed_list<T> list;
    std::int32_t excluded = -1;  // the row that lost its place when the block began; -1: none

    static std::size_t bytes(std::int64_t keys) { return lay_out(nullptr, nullptr, keys); }
    static observed_head& at(std::byte* memory) { return *reinterpret_cast<observed_head*>(memory); }
    /// Makes an empty one in the bytes(keys) of memory that begin at `head`, aligned.
    static void make(observed_head* head, std::int64_t keys) { lay_out(head, head, keys); }

  private:
    static std::size_t lay_out(void* memory, observed_head* head, std::int64_t keys) {
        detail::arena parts(memory);
        static_cast<void>(parts.take<observed_head>(1));
        observed_head made;
        made.list = observed_list<T>(parts, keys);
        if (head != nullptr) {
            *head = made;
        }
        return detail::aligned_size(parts.bytes());
    }
};

/// Part 2 of a block of n tokens: mass[i] of every key of the list. `queries` are the block's.
template <Storage T>
void observe(isa set, const attention_shape& shape, const Observation& seen, const HeadParams& head_params,
             mass_queries<T> queries, observed_list<T>& list, std::byte* scratch, std::int64_t capacity) {
    const std::int32_t counted = seen.queries == 0 ? head_params.window : seen.queries;
    queries.begin = counted < queries.end ? queries.end - counted : 0;
    std::fill_n(list.mass, list.count, 0.0);
    add_mass(set, shape, seen.aggregate, queries, list.key, sees_prefix{list.own}, list.mass, scratch,
             capacity);
}

/// The mean of the masses of heads whose lists hold the same keys in the same order; list(h) is that of head
/// h.
template <class ListOf>
void average_masses(std::int32_t heads, ListOf&& list) {
    for (std::int32_t i = 0; i < list(0).count; ++i) {
        double sum = 0.0;
        for (std::int32_t h = 0; h < heads; ++h) {
            sum += list(h).mass[i];
        }
        for (std::int32_t h = 0; h < heads; ++h) {
            list(h).mass[i] = sum / heads;
        }
    }
}

}  // namespace kvpolicy::host_backend
