// ConvScorer inside a cache: keys get their scores between two ages, a batch of them at once (ContextScorer),
// by the kernels that score sequences.
//
// Which keys a call of c tokens scores is a function of the length before it and of the window: those from
// scored_until(base) on, before scored_until(base + c). They and their neighbors are in the window's rows,
// or come with the call. Of them
//
// - those that leave the window in the call are needed by its top-k updates: `leaving`, by the token that
//   they leave with, which also gets the stored scores of the other leavers;
// - those that came with it and stay are written with their rows: `late`, 0 for who has no score yet;
// - those that are in rows and stay there get theirs there, by a launch of its own (`in_rows`) once it is
//   certain that the cache takes the tokens, and before any row is overwritten. A step has no others.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv.cuh>
#include <kvpolicy/scorers/cuda/conv/kernel_conv_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_mlp.cuh>

#include <cstdint>
#include <new>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class View>
struct late_score_params {
    using T = typename View::value_type;

    View cache;
    Batch batch{};
    prefill_tokens<T> tokens{};
    conv_params<T> params{};
    std::int32_t together = 0;  // ConvScorer::batch
    std::int32_t blocks = 1;    // of a head
    bool in_rows = false;
    float* leaving = nullptr;  // [count, Hkv, most]
    float* late = nullptr;     // the same; null: draft tokens keep no score
    std::uint32_t* status = nullptr;
};

/// Tokens 0 .. scored_until - 1 of a sequence have their scores once `length` tokens have come.
__device__ inline position_t late_until(std::int32_t batch, std::int32_t window, position_t length) {
    const std::int32_t most = window - 2 * conv_reach;
    const std::int32_t together = batch == 0 || batch > most ? most : batch;
    return length <= conv_reach ? 0 : (length - conv_reach) / together * together;
}

/// One head of an entry: which tokens a launch scores, [from, end). Tokens are named by their distance from
/// the call's first, which `base` is the position of: those before it, back to `lowest`, are in rows.
template <class View>
struct late_head {
    const late_score_params<View>& call;
    scored_token<View> at;
    std::int32_t tokens, sinks, window;
    std::int32_t lowest;        // of the window, and of the sequence
    std::int32_t first_ring;    // the first token behind the sinks, if the window has it
    std::int32_t ring;          // where the ring has token 0
    std::int32_t known, until;  // whose scores are there before the call, and after it
    std::int32_t recent;        // the window's first token after the call
    std::int32_t from, end;

    __device__ late_head(const late_score_params<View>& launch, std::int32_t pair)
        : call(launch), at(launch.cache, launch.batch, pair, launch.tokens.most) {
        const position_t base = at.base;
        tokens = at.active.tokens;
        sinks = at.rows.head_params.sinks;
        window = at.rows.head_params.window;
        lowest = -static_cast<std::int32_t>(base < window ? base : window);
        first_ring = base - sinks > window ? -window : static_cast<std::int32_t>(sinks - base);
        ring = base < sinks ? 0 : static_cast<std::int32_t>((base - sinks) % window);
        recent = tokens - window;
        known = static_cast<std::int32_t>(late_until(call.together, window, base) - base);
        until = static_cast<std::int32_t>(late_until(call.together, window, base + tokens) - base);
        from = known;
        end = until;
        if (call.in_rows) {
            from = max(from, recent);
            end = min(end, 0);
        } else if (call.late == nullptr) {
            end = min(end, recent);
        }
    }
    /// The row of a token before the call's.
    __device__ std::int32_t row(std::int32_t t) const {
        if (t < first_ring) {
            return static_cast<std::int32_t>(at.base) + t;
        }
        const std::int32_t turned = ring + t;
        return sinks + (turned < 0 ? turned + window : turned);
    }
    /// Whether some token of [first, first + count) is one that this launch scores.
    __device__ bool any(std::int32_t first, std::int32_t count) const {
        const std::int32_t last = min(first + count, end);
        return first < last && (call.in_rows || first < recent || last > 0);
    }
    __device__ void write(std::int32_t t, float score, bool kept) const {
        const bool sink = at.base + t < sinks;
        score = kept || sink ? 0.0f : score;
        const std::int64_t plane = std::int64_t{at.pair} * call.tokens.most;
        if (call.in_rows) {
            if (score != score && call.status != nullptr) {
                atomicOr(call.status + at.entry, static_cast<std::uint32_t>(status_nan_score));
            }
            if (!sink) {
                at.rows.score_of(row(t)) = score;
            }
        } else if (t < recent) {
            call.leaving[plane + t + window] = score;
        } else if (t >= 0) {
            call.late[plane + t] = score;
        }
    }
    /// What is not computed here: scores of leavers that rows hold, and 0 for tokens that get none. By thread
    /// `thread` of `threads`.
    __device__ void fill(std::int32_t thread, std::int32_t threads) const {
        const std::int64_t plane = std::int64_t{at.pair} * call.tokens.most;
        for (std::int32_t j = thread; j < tokens; j += threads) {
            const std::int32_t u = j - window;
            if (u < known) {
                call.leaving[plane + j] = at.base + u >= sinks ? at.rows.score_of(row(u)) : 0.0f;
            }
            if (call.late != nullptr && (j >= until || j < recent)) {
                call.late[plane + j] = 0.0f;
            }
        }
    }
};

/// A block's late_head, in shared memory: in registers it would leave too few for the products. Ends with a
/// barrier.
template <class View>
__device__ inline const late_head<View>& shared_late_head(const late_score_params<View>& call) {
    __shared__ alignas(late_head<View>) unsigned char memory[sizeof(late_head<View>)];
    if (threadIdx.x == 0) {
        new (static_cast<void*>(memory))
            late_head<View>(call, static_cast<std::int32_t>(blockIdx.x) / call.blocks);
    }
    __syncthreads();
    return *reinterpret_cast<const late_head<View>*>(memory);
}

/// The start of both kernels below: the block's head, or null where the entry has no tokens. Of a call whose
/// scores do not go to the cache's entries, the first block of a head fills in what the others do not write.
/// Ends with a barrier at least.
template <class View>
__device__ const late_head<View>* begin_late_block(const late_score_params<View>& call, std::int32_t block,
                                                   std::int32_t threads) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const late_head<View>& head = shared_late_head(call);
    if (head.at.active.tokens == 0) {
        return nullptr;
    }
    if (block == 0 && !call.in_rows) {
        head.fill(static_cast<std::int32_t>(threadIdx.x), threads);
    }
    return &head;
}

/// Rows as a convolution reads them: of the window, or of the call.
template <class View>
struct late_rows {
    using T = typename View::value_type;
    const late_head<View>& head;

    __device__ bool in(std::int32_t t) const { return t >= head.lowest && t < head.tokens; }
    __device__ const T* key(std::int32_t t) const {
        return t < 0 ? head.at.rows.key(head.row(t))
                     : head.call.tokens.key(head.at.rows, head.at.entry, head.at.head, t);
    }
    __device__ const T* value(std::int32_t t) const {
        return t < 0 ? head.at.rows.value(head.row(t))
                     : head.call.tokens.value(head.at.rows, head.at.entry, head.at.head, t);
    }
    __device__ position_t position(std::int32_t t) const { return head.at.base + t; }
    __device__ float position_in_fp32(std::int32_t t) const { return static_cast<float>(position(t)); }

    /// As scorer_rows has it; rows are where they are.
    struct path {
        const late_rows& rows;
        bool of_key;

        __device__ const T* operator()(std::int32_t t, bool there) const {
            return !there ? nullptr : of_key ? rows.key(t) : rows.value(t);
        }
    };
    __device__ path path_from(bool of_key, std::int32_t, std::int32_t) const { return {*this, of_key}; }
};

/// Packs the convolution's weights, and computes RoPE frequencies, if some head of the call scores a key. A
/// step in which no batch is due ends here.
///
/// Grid: any number of blocks. Block: 256.
/// In: the layers' weights fp32. Out: packed weights of T, frequencies [rotated / 2] fp32.
///
/// Phases: 1. Find whether a head has keys to score. 2. Frequencies, by the first block. 3. Weights, by all
/// blocks.
template <class View, int Inputs>
__global__ void __launch_bounds__(256)
    late_prepare_kernel(const __grid_constant__ late_score_params<View> call, const conv_weights from,
                        const float base, float* const frequencies, typename View::value_type* const to) {
    let_next_kernel_start();
    wait_for_kernel_before();
    using T = typename View::value_type;
    const std::int32_t pairs = call.batch.count * call.cache.kv_heads;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Is a key due?
    bool due = false;
    for (std::int32_t pair = thread; pair < pairs; pair += 256) {
        const late_head<View> head(call, pair);
        due = due || head.known < head.until;
    }
    if (__syncthreads_or(due) == 0) {
        return;
    }
    // 2. Frequencies.
    if (frequencies != nullptr && blockIdx.x == 0) {
        for (std::int32_t i = thread; i < call.params.source.rotated / 2; i += 256) {
            frequencies[i] = rope_frequency<float>(base, i, call.params.source.rotated);
        }
    }
    // 3. Weights.
    const std::int64_t at = std::int64_t{blockIdx.x} * 256 + thread, all = std::int64_t{gridDim.x} * 256;
    if constexpr (Inputs != 0) {
        pack_conv<Inputs>(from, to, static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(all));
    } else {
        for (int l = 0; l < 3; ++l) {
            stack_conv(from.layer[l], from.heads, call.params.layer[l],
                       const_cast<T*>(call.params.layer[l].weights), at, all);
        }
    }
}

/// Scores of the keys that reach their age in this call, by mma.sync (compute capability 8.0 on).
///
/// Grid: count * Hkv * call.blocks blocks. Block: 128. Shared memory: the block's late_head; conv_block's
/// tiles.
/// In: keys and values of window entries and tokens, packed weights. Out: leaving and late [count, Hkv,
/// most] fp32, or with `in_rows` the scores of the window's entries.
///
/// Phases: 1. begin_late_block: wait, find the head's tokens, fill in the others' scores. 2. Tiles of
/// tokens.
template <class View, class Gate, int Tiles>
__global__ void __launch_bounds__(128)
    cache_conv_kernel(const __grid_constant__ late_score_params<View> call, const Gate gate) {
    const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) % call.blocks;
    // 1. Wait, and find the tokens.
    const late_head<View>* const begun = begin_late_block(call, block, 128);
    if (begun == nullptr) {
        return;
    }
    const late_head<View>& head = *begun;
    // 2. Tiles of tokens.
    constexpr std::int32_t tokens = conv_tiling<Tiles>::tokens;
    scorer_span s{};
    s.h = head.at.head;
    for (std::int32_t first = head.from + block * tokens; first < head.end; first += call.blocks * tokens) {
        if (!head.any(first, tokens)) {
            continue;
        }
        conv_block<Tiles>(call.params, s, late_rows<View>{head}, first, 0, min(head.end - first, tokens),
                          [&](std::int32_t r, float score) {
                              head.write(first + r, score, detail::holds(gate, head.at.base + first + r));
                          });
        __syncthreads();  // before the next tokens take its memory
    }
}

#if KVPOLICY_HOPPER_CODE
/// The tiles of a block of cache_conv_hopper_kernel.
template <class View, class Gate>
struct late_tiles {
    const late_head<View>& head;
    const Gate& gate;
    std::int32_t from;  // the first tile's first token
    std::int32_t stride;
    int count;

    __device__ late_rows<View> rows() const { return {head}; }
    __device__ std::int32_t first(int i) const { return from + i * stride; }
    __device__ std::int32_t high(int i) const { return min(head.end - first(i), conv_tile); }
    __device__ bool follows(int) const { return false; }
    __device__ void write(int i, std::int32_t r, float score) const {
        head.write(first(i) + r, score, detail::holds(gate, head.at.base + first(i) + r));
    }
};
#endif

/// The same by wgmma, for compute capability 9.0.
///
/// Grid: count * Hkv * call.blocks blocks. Block: conv_consumers threads.
/// Shared memory: the block's late_head; conv_hopper_block's tiles.
/// In, out and phases: as cache_conv_kernel.
template <class View, class Gate, int Inputs>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(conv_consumers), 2)
    cache_conv_hopper_kernel([[maybe_unused]] const __grid_constant__ late_score_params<View> call,
                             [[maybe_unused]] const Gate gate,
                             [[maybe_unused]] const typename View::value_type* const weights) {
#if KVPOLICY_HOPPER_CODE
    const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) % call.blocks;
    // 1. Wait, and find the tokens.
    const late_head<View>* const begun = begin_late_block(call, block, conv_consumers);
    if (begun == nullptr) {
        return;
    }
    const late_head<View>& head = *begun;
    // 2. Tiles of tokens.
    const std::int32_t first = head.from + block * conv_tile, stride = call.blocks * conv_tile;
    const std::int32_t tiles = first < head.end ? (head.end - first + stride - 1) / stride : 0;
    // One tile, mostly: those without a token to score are rare where there are several.
    if (tiles == 0 || (tiles == 1 && !head.any(first, conv_tile))) {
        return;
    }
    conv_hopper_block<Inputs>(call.params, weights, head.at.head,
                              late_tiles<View, Gate>{head, gate, first, stride, tiles}, 0.0f, [] {});
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
