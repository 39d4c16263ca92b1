// What the kernels of a chunk share: the cache, the tokens, and the workspace.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/prefill/top_k_update_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int prefill_threads = 128;

template <class View_>
struct prefill_params {
    using View = View_;
    using T = typename View::value_type;

    View cache;
    Batch batch{};  // q_len: `appended`, once prefill_begin_kernel has run
    prefill_tokens<T> tokens{};
    plane_view<const float> scores{};  // of the new tokens, where they come with them
    packed_rows packed_scores{};       // of `scores`
    std::int32_t packed_total = 0;     // rows of tensors whose entries are packed
    float* computed = nullptr;         // [count, Hkv, most]: see score_params; null: none
    bool on_leaving = false;           // `computed` are those of the keys that leave
    const float* late =
        nullptr;  // [count, Hkv, most]: of the new tokens, where those are of the keys that leave
    std::uint32_t* status = nullptr;  // [count]
    std::int32_t pieces = 1;          // blocks that share a head
    // Made by the kernels.
    std::int32_t* appended = nullptr;   // [count]: tokens that count
    std::int64_t* first_row = nullptr;  // [count, Hkv]: of the entries; in a paged cache the first page id's
                                        // place in the page tables
    std::int32_t* past_rows = nullptr;  // [count, Hkv]: entries before the chunk
    top_k_head* heads = nullptr;        // [count, Hkv]
    top_k_update_params top_k{};        // decisions; `num_long_range` are slots in use after the chunk
    std::int32_t* num_long_range_before = nullptr;  // [count, Hkv], with a selection
    const float* advanced =
        nullptr;          // [count, Hkv, state_size]: the scorer's states after it, if not in the cache
    T* bounds = nullptr;  // [max_sequences, rows / bound_rows, 2, head_dim_qk], of a FixedBudgetCache
                          // with a selection
    std::int32_t bound_rows = 1;
};

/// One head of an entry.
template <class View>
struct prefill_head {
    std::int32_t pair, entry, head;
    active_entry active;
    typename View::head_type rows;
    position_t base;

    __device__ prefill_head(const prefill_params<View>& call, std::int32_t number)
        : pair(number),
          entry(number / call.cache.kv_heads),
          head(number % call.cache.kv_heads),
          active(call.cache, call.batch, entry, call.tokens.most),
          rows(call.cache, active.seq, head),
          base(active.there ? call.cache.length[active.seq] : 0) {}

    /// The score of token j, as its row will keep it.
    __device__ float score(const prefill_params<View>& call, std::int32_t j) const {
        float score = 0.0f;
        if (call.computed != nullptr) {
            const float* const from = call.on_leaving ? call.late : call.computed;
            score = from == nullptr ? 0.0f : from[std::int64_t{pair} * call.tokens.most + j];
        } else if (call.tokens.spare) {
            score = rows.spare_score(j);
        } else if (call.scores) {
            score = call.scores.head(entry, head)[call.packed_scores.begin(entry) + j];
        }
        const bool counts = base + j >= rows.head_params.sinks;
        return counts ? score : call.computed == nullptr && score == score ? score : 0.0f;
    }
    /// The score of the key that leaves the window when token j comes.
    __device__ float leaving_score(const prefill_params<View>& call, std::int32_t j) const {
        const position_t u = base + j - rows.head_params.window;
        if (call.on_leaving && call.computed != nullptr) {
            return call.computed[std::int64_t{pair} * call.tokens.most + j];
        }
        return u < base ? rows.score_of(rows.layout.recent(u))
                        : score(call, static_cast<std::int32_t>(u - base));
    }
    /// The name of key u, which leaves the window: see top_k_head.
    __device__ std::int32_t name(position_t u) const {
        return u < base ? rows.layout.recent(u) : rows.capacity() + static_cast<std::int32_t>(u - base);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
