// The running cutoff of KVpop, 3.2 and algorithm 2: for each query the rank of the k-th best eligible key.
// Two exact algorithms, one query after the other, and the name of a third that takes all queries at once;
// they give the same integers.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {

/// The rank of a key that does not compete: sinks, kept keys, closed gates, and keys that never
/// leave the window.
inline constexpr std::int32_t no_rank = -1;

/// The cutoff while fewer than k keys are eligible: every eligible key is kept. (The paper's algorithm 2
/// writes -1 there, which contradicts its own C.1.)
inline constexpr std::int32_t open_cutoff = never;

/// An algorithm for one head: from rank[length] (0 = best among the keys that compete, no_rank for the
/// others) writes cutoff[length]. Key t is eligible at q when q >= t + w; cutoff[q] is the rank of the k-th
/// best eligible key, open_cutoff while there are fewer than k, and -1 for k = 0. Eligible key t is visible
/// iff rank[t] <= cutoff[q].
template <class C>
concept Cutoff = requires(const C& cutoff, const std::int32_t* rank, std::int32_t length,
                          const HeadParams& head_params, std::int32_t* out, void* scratch) {
    { C::scratch_bytes(length) } -> std::same_as<std::size_t>;
    {cutoff(rank, length, head_params, out, scratch)};
};

/// Algorithm 2 of the paper: a Fenwick tree over ranks, the k-th by binary lifting. O(S log S)
/// time, 4 S bytes.
struct FenwickCutoff {
    KVPOLICY_HOST_DEVICE static constexpr std::size_t scratch_bytes(std::int32_t length) {
        return (static_cast<std::size_t>(length) + 1) * sizeof(std::int32_t);
    }

    KVPOLICY_HOST_DEVICE void operator()(const std::int32_t* rank, std::int32_t length,
                                         const HeadParams& head_params, std::int32_t* cutoff,
                                         void* scratch) const {
        auto* tree =
            static_cast<std::int32_t*>(scratch);  // 1-based: tree[i] counts ranks in (i - lowbit(i), i]
        for (std::int32_t i = 0; i <= length; ++i) {
            tree[i] = 0;
        }
        std::int32_t top = length > 0 ? 1 : 0;  // the largest power of two within the length
        while (top > 0 && top <= length / 2) {
            top *= 2;
        }
        std::int32_t eligible = 0;
        for (std::int32_t q = 0; q < length; ++q) {
            const std::int32_t t = q >= head_params.window ? q - head_params.window : -1;
            if (t >= 0 && rank[t] != no_rank) {
                for (std::int32_t i = rank[t] + 1; i <= length; i += i & -i) {
                    ++tree[i];
                }
                ++eligible;
            }
            if (head_params.budget == 0) {
                cutoff[q] = -1;
            } else if (eligible < head_params.budget) {
                cutoff[q] = open_cutoff;
            } else {
                std::int32_t index = 0;  // the largest prefix with fewer than k entries
                std::int32_t missing = head_params.budget;
                for (std::int32_t step = top; step > 0; step /= 2) {
                    if (step <= length - index && tree[index + step] < missing) {
                        index += step;
                        missing -= tree[index];
                    }
                }
                cutoff[q] = index;
            }
        }
    }
};

/// The same from the end: with all keys in a list ordered by rank, the last cutoff is its k-th entry;
/// taking keys out in reverse order of arrival moves it only towards worse ranks. O(S) time after the
/// ranks, 8 S bytes.
struct LinkedCutoff {
    KVPOLICY_HOST_DEVICE static constexpr std::size_t scratch_bytes(std::int32_t length) {
        return 2 * (static_cast<std::size_t>(length) + 2) * sizeof(std::int32_t);
    }

    KVPOLICY_HOST_DEVICE void operator()(const std::int32_t* rank, std::int32_t length,
                                         const HeadParams& head_params, std::int32_t* cutoff,
                                         void* scratch) const {
        // Node r + 1 is rank r; 0 and length + 1 are the ends. A rank that never becomes eligible is
        // not in the list.
        auto* next = static_cast<std::int32_t*>(scratch);
        auto* previous = next + length + 2;
        for (std::int32_t i = 0; i < length + 2; ++i) {
            next[i] = absent;
        }
        std::int32_t present = 0;
        for (std::int32_t t = 0; t + std::int64_t{head_params.window} < length; ++t) {
            if (rank[t] != no_rank) {
                next[rank[t] + 1] = 0;
                ++present;
            }
        }
        std::int32_t last = 0;
        for (std::int32_t i = 1; i <= length + 1; ++i) {
            if (i <= length && next[i] == absent) {
                continue;
            }
            next[last] = i;
            previous[i] = last;
            last = i;
        }
        std::int32_t kth = 0;
        if (present >= head_params.budget) {
            for (std::int32_t i = 0; i < head_params.budget; ++i) {
                kth = next[kth];
            }
        }
        for (std::int32_t q = length - 1; q >= 0; --q) {
            cutoff[q] = head_params.budget == 0 ? -1 : present < head_params.budget ? open_cutoff : kth - 1;
            const std::int32_t t = q >= head_params.window ? q - head_params.window : -1;
            if (t < 0 || rank[t] == no_rank) {
                continue;
            }
            const std::int32_t node = rank[t] + 1;
            if (node <= kth) {
                kth = next[kth];
            }  // one better key less: the k-th is now the next worse one
            next[previous[node]] = next[node];
            previous[next[node]] = previous[node];
            --present;
        }
    }

  private:
    static constexpr std::int32_t absent = -1;
};

/// All queries at once: what CUDA does by default (masks/cuda/agent_expire.cuh). On the host it
/// is LinkedCutoff.
struct ParallelCutoff : LinkedCutoff {};

static_assert(Cutoff<FenwickCutoff> && Cutoff<LinkedCutoff> && Cutoff<ParallelCutoff>);

}  // namespace kvpolicy
