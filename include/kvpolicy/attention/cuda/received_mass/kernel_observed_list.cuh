// The lists of keys that an observed policy holds while blocks of a sequence pass: host/observed_list.hpp
// on a device. A list is in the order of positions, so that neighbors in it are neighbors for pooling.
#pragma once

#include <kvpolicy/attention/cuda/received_mass/agent_choose_best.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A block of tokens [first, first + block) of all sequences; shorter ones have a part of it.
struct observed_list_params {
    const HeadParams* all_params = nullptr;  // [Hkv]
    Observation seen;
    const std::int32_t* lengths = nullptr;  // [B] or null
    std::int32_t length = 0;                // S
    std::int32_t batch = 0, kv_heads = 0;
    std::int32_t first = 0, block = 0;
    bool prompt = true;              // else decoded
    bool evicts_at_steps = true;     //
    std::int32_t* tokens = nullptr;  // [B], of the block
    std::int32_t* count = nullptr;   // [B, Hkv], keys of the list before the block's own
    std::int32_t* list = nullptr;    // [B, Hkv, stride], positions
    float* score = nullptr;          // [B, Hkv, stride]
    float* mass = nullptr;           // [B, Hkv, stride], of the block
    std::int64_t stride = 0;         //
    plane_view<expiry_t> expiry;     // [B, Hkv, S]

    __device__ std::int32_t tokens_of(std::int64_t b) const {
        const std::int32_t given = lengths != nullptr ? lengths[b] : length;
        const std::int32_t own = given >= 0 && given <= length ? given : 0;
        return max(0, min(own - first, block));
    }
};

/// One head of one sequence.
struct agent_observed_list {
    const observed_list_params& params;
    choice_memory& memory;
    const std::int64_t b, h, pair;
    const HeadParams head_params;
    const std::int32_t tokens, thread;
    std::int32_t* const list;
    float *const score, *const mass;
    expiry_t* const expiry;

    __device__ agent_observed_list(const observed_list_params& call, choice_memory& shared)
        : params(call),
          memory(shared),
          b(blockIdx.x / call.kv_heads),
          h(blockIdx.x % call.kv_heads),
          pair(blockIdx.x),
          head_params(call.all_params[h]),
          tokens(call.tokens_of(b)),
          thread(static_cast<std::int32_t>(threadIdx.x)),
          list(call.list + pair * call.stride),
          score(call.score + pair * call.stride),
          mass(call.mass + pair * call.stride),
          expiry(call.expiry.head(b, h)) {}

    __device__ void begin() {
        if (h == 0 && thread == 0) {
            params.tokens[b] = tokens;
        }
        std::int32_t count = 0;
        if (params.first == 0) {
            const std::int32_t own = params.lengths != nullptr ? params.lengths[b] : params.length;
            for (std::int32_t t = thread; own <= params.length && t < own; t += choice_threads) {
                expiry[t] = never;
            }
        } else if (tokens != 0) {
            count = params.count[pair];
            if (params.evicts_at_steps) {
                count = choose(count, params.first, params.first);  // 1
            }
        }
        for (std::int32_t j = thread; j < tokens; j += choice_threads) {  // 2
            list[count + j] = params.first + j;
            score[count + j] = 0.0f;
        }
        if (thread == 0) {
            params.count[pair] = count;
        }
    }

    __device__ void end() {
        if (tokens == 0) {
            return;
        }
        const std::int32_t held = params.count[pair];
        std::int32_t count = held + tokens;
        for (std::int32_t i = thread; i < count; i += choice_threads) {  // 1
            score[i] = (params.seen.accumulate && i < held ? score[i] : 0.0f) + mass[i];
        }
        __syncthreads();
        if (params.prompt) {
            const std::int32_t end = params.first + tokens;
            count = choose(count, end - 1, end);  // 2
        }
        if (thread == 0) {
            params.count[pair] = count;
        }
    }

  private:
    struct competitors {
        const agent_observed_list& of;
        std::int32_t from, to;  // they are this range of the list

        __device__ bool competes(std::int32_t i) const { return from <= i && i < to; }
        __device__ float value(std::int32_t i) const {
            return pooled_score(of.params.seen, from, to, i, [this](std::int32_t j) { return of.score[j]; });
        }
        __device__ position_t position(std::int32_t i) const { return of.list[i]; }
    };

    /// The keys up to `at` - w compete. Those that lose leave the list, and have `from` as their expiry.
    /// Returns the length of the list.
    __device__ std::int32_t choose(std::int32_t count, std::int32_t at, expiry_t from) {
        const position_t last = position_t{at} - head_params.window;
        const int before =
            choice_total(memory, count, [&](std::int32_t i) { return list[i] < head_params.sinks ? 1 : 0; });
        const int through =
            choice_total(memory, count, [&](std::int32_t i) { return list[i] <= last ? 1 : 0; });
        const competitors keys{*this, before, through};
        const chosen_keys chosen = choose_best(memory, count, head_params.budget, keys);
        if (chosen.all) {
            return count;
        }
        // Masses have been taken, so that their place says who stays.
        for (std::int32_t i = thread; i < count; i += choice_threads) {
            const bool stays = !keys.competes(i) || chosen.keeps(choice_number(keys.value(i)), list[i]);
            mass[i] = stays ? 1.0f : 0.0f;
            if (!stays) {
                expiry[list[i]] = from;
            }
        }
        return remove(count);
    }

    /// Closes the gaps. Keys move towards the front, and a turn's keys are read before its first is written.
    __device__ std::int32_t remove(std::int32_t count) {
        std::int32_t position = 0;
        float its = 0.0f;
        return choice_sums(
            memory, count,
            [&](std::int32_t i) {
                position = list[i];
                its = score[i];
                return mass[i] != 0.0f ? 1 : 0;
            },
            [&](std::int32_t i, int to) {
                if (mass[i] != 0.0f) {
                    list[to] = position;
                    score[to] = its;
                }
            });
    }
};

/// The beginning of a block.
///
/// Grid: B * Hkv blocks. Block: choice_threads. Shared memory: choice_memory (static).
/// In: count, list, score, lengths. Out: expiry [B, Hkv, S] of keys that leave, in the first block of all
/// keys; tokens [B]. Overwrites: list, score and count with the keys that stay and the block's own behind
/// them (count without these); mass as scratch.
/// 1. Where decoded tokens evict, the keys up to first - w compete with the scores that they have.
/// 2. The block's keys join.
template <class Params>
__global__ void __launch_bounds__(choice_threads)
    observed_begin_kernel(const __grid_constant__ Params params) {
    __shared__ choice_memory memory;
    agent_observed_list(params, memory).begin();
}

/// The end of a block.
///
/// Grid: B * Hkv blocks. Block: choice_threads. Shared memory: choice_memory (static).
/// In: mass [B, Hkv, stride] of the block's queries. Out: expiry of keys that leave. Overwrites: list, score
/// and count with the keys that stay.
/// 1. Scores take the masses: they are added, or replace what was there.
/// 2. In a prompt the keys up to the block's last token - w compete.
template <class Params>
__global__ void __launch_bounds__(choice_threads) observed_end_kernel(const __grid_constant__ Params params) {
    __shared__ choice_memory memory;
    agent_observed_list(params, memory).end();
}

/// The mean over the heads of a layer, whose lists hold the same keys in the same order.
///
/// Grid: B * tiles blocks, `tiles` of choice_threads keys. Block: choice_threads. Shared memory: none. In:
/// counts [B, Hkv] of keys, of which the first head's count; tokens [B], added to them, or null. Overwrites
/// mass [B, Hkv, stride] in all heads.
template <class Number>
__global__ void __launch_bounds__(choice_threads)
    layer_mass_kernel(Number* const mass, const std::int64_t stride, const std::int32_t kv_heads,
                      const std::int32_t tiles, const std::int32_t* const counts,
                      const std::int32_t* const tokens) {
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int64_t b = block / tiles;
    const std::int32_t count =
        (counts != nullptr ? counts[b * kv_heads] : 0) + (tokens != nullptr ? max(tokens[b], 0) : 0);
    const std::int32_t i = block % tiles * choice_threads + static_cast<std::int32_t>(threadIdx.x);
    if (i >= count) {
        return;
    }
    Number* const first = mass + b * kv_heads * stride + i;
    double sum = 0.0;
    for (std::int32_t h = 0; h < kv_heads; ++h) {
        sum += static_cast<double>(first[h * stride]);
    }
    for (std::int32_t h = 0; h < kv_heads; ++h) {
        first[h * stride] = static_cast<Number>(sum / kv_heads);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
