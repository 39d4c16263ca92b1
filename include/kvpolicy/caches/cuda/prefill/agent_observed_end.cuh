// The end of a prompt's block in a cache, for one head by one block: new scores, the choice, and the slot of
// each key that moves. What the CPU backend does (caches/host/observed_step.hpp), with the same places.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/agent_choose_best.cuh>
#include <kvpolicy/caches/cuda/prefill/observed_prefill_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class View>
struct agent_observed_end : observed_prefill_head<View> {
    using of_block = observed_prefill_head<View>;
    using of_block::base, of_block::tokens, of_block::rows, of_block::pair, of_block::params,
        of_block::behind_window, of_block::excluded, of_block::past_plane, of_block::chunk_plane;

    choice_memory& memory;
    const std::int32_t used, thread, max_entries;
    float *const past_score, *const chunk_score;
    unsigned char* const lost;
    std::int32_t *const moved, *const free_slot;

    __device__ agent_observed_end(const observed_prefill_params<View>& of, choice_memory& shared)
        : of_block(of, static_cast<std::int32_t>(blockIdx.x)),
          memory(shared),
          used(of.call.past_rows[pair]),
          thread(static_cast<std::int32_t>(threadIdx.x)),
          max_entries(of.call.top_k.max_entries),
          past_score(of.past_mass + past_plane()),
          chunk_score(of.chunk_mass + chunk_plane()),
          lost(of.lost + past_plane() + chunk_plane()),
          moved(of.moved + past_plane()),
          free_slot(of.free_slot + past_plane()) {}

    __device__ void run() {
        if (tokens == 0) {
            return;
        }
        take_masses();                             // 1
        choose();                                  // 2
        const std::int32_t in_use = find_slots();  // 3
        write_rows(in_use);                        // 4
    }

  private:
    /// Key x of the used rows and the block's tokens, in this order.
    __device__ position_t position_of(std::int32_t x) const {
        return x < used ? rows.position_of(x) : base + (x - used);
    }
    __device__ float score_of(std::int32_t x) const {
        return x < used ? past_score[x] : chunk_score[x - used];
    }

    __device__ void take_masses() {
        for (std::int32_t x = thread; x < used; x += choice_threads) {
            past_score[x] += params.seen.accumulate ? rows.score_of(x) : 0.0f;
        }
        for (std::int32_t x = thread; x < used + tokens; x += choice_threads) {
            lost[x] = x < used && excluded(x) ? 1 : 0;
        }
        __syncthreads();
        for (std::int32_t x = thread; params.call.status != nullptr && x < used + tokens;
             x += choice_threads) {
            if (lost[x] == 0 && score_of(x) != score_of(x)) {
                atomicOr(params.call.status + this->entry, static_cast<std::uint32_t>(status_nan_score));
            }
        }
    }

    /// Keys by row and token.
    struct any_order {
        const agent_observed_end& of;
        __device__ bool competes(std::int32_t x) const {
            return of.lost[x] == 0 && of.behind_window(of.position_of(x));
        }
        __device__ float value(std::int32_t x) const { return of.score_of(x); }
        __device__ position_t position(std::int32_t x) const { return of.position_of(x); }
    };
    /// Those that compete, by position: `held` rows, then tokens from `first` on.
    struct by_position {
        const agent_observed_end& of;
        std::int32_t held, first, count;

        __device__ std::int32_t key(std::int32_t i) const {
            return i < held ? of.params.order[of.past_plane() + i] : of.used + first + i - held;
        }
        __device__ bool competes(std::int32_t /*i*/) const { return true; }
        __device__ float value(std::int32_t i) const {
            return pooled_score(of.params.seen, 0, count, i,
                                [this](std::int32_t j) { return of.score_of(key(j)); });
        }
        __device__ position_t position(std::int32_t i) const { return of.position_of(key(i)); }
    };

    __device__ void choose() {
        const std::int32_t budget = rows.head_params.budget;
        const any_order keys{*this};
        if (params.seen.pool == 1) {
            const chosen_keys chosen = choose_best(memory, used + tokens, budget, keys);
            for (std::int32_t x = thread; x < used + tokens; x += choice_threads) {
                if (keys.competes(x) && !chosen.keeps(choice_number(score_of(x)), position_of(x))) {
                    lost[x] = 1;
                }
            }
            __syncthreads();
            return;
        }
        const int held = choice_total(memory, used, [&](std::int32_t x) { return keys.competes(x) ? 1 : 0; });
        const int own =
            choice_total(memory, tokens, [&](std::int32_t j) { return keys.competes(used + j) ? 1 : 0; });
        const position_t sinks = rows.head_params.sinks - base;
        const by_position sorted{*this, held, static_cast<std::int32_t>(max(position_t{0}, sinks)),
                                 held + own};
        const chosen_keys chosen = choose_best(memory, held + own, budget, sorted);
        for (std::int32_t i = thread; i < held + own; i += choice_threads) {
            if (!chosen.keeps(choice_number(sorted.value(i)), sorted.position(i))) {
                lost[sorted.key(i)] = 1;
            }
        }
        __syncthreads();
    }

    __device__ bool stays_long_range(std::int32_t x) const {
        return lost[x] == 0 && behind_window(position_of(x));
    }
    __device__ bool placed(std::int32_t x, std::int32_t in_use) const {
        return x < used && x >= rows.layout.slot(0) && x < rows.layout.slot(0) + in_use;
    }

    /// Keys in one of the first `in_use` places stay there; the others take free ones, in the order of rows
    /// and tokens. Returns how many are in use.
    __device__ std::int32_t find_slots() {
        constexpr std::int32_t unused = -2, stays = -1;
        const int in_use =
            choice_total(memory, used + tokens, [&](std::int32_t x) { return stays_long_range(x) ? 1 : 0; });
        for (std::int32_t p = thread; p < in_use; p += choice_threads) {
            const std::int32_t row = rows.layout.slot(p);
            moved[p] = row < used && stays_long_range(row) ? stays : unused;
        }
        __syncthreads();
        choice_sums(
            memory, in_use, [&](std::int32_t p) { return moved[p] == unused ? 1 : 0; },
            [&](std::int32_t p, int before) {
                if (moved[p] == unused) {
                    free_slot[before] = p;
                }
            });
        choice_sums(
            memory, used + tokens,
            [&](std::int32_t x) { return stays_long_range(x) && !placed(x, in_use) ? 1 : 0; },
            [&](std::int32_t x, int before) {
                if (stays_long_range(x) && !placed(x, in_use)) {
                    moved[free_slot[before]] = x < used ? x : max_entries + (x - used);
                }
            });
        if (thread == 0) {
            params.num_long_range[pair] = in_use;
        }
        return in_use;
    }

    /// Scores of rows whose key stays in them.
    __device__ void write_rows(std::int32_t in_use) {
        for (std::int32_t x = thread; x < used; x += choice_threads) {
            if (lost[x] == 0 && (placed(x, in_use) || !behind_window(rows.position_of(x)))) {
                rows.score_of(x) = past_score[x];
            }
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
