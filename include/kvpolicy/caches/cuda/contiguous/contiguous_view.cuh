// A layer of a FixedBudgetCache as kernels see it: the ref without its policy, so that policies of the same
// structure share their kernels.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/cache_view.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_source.cuh>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
struct contiguous_head;

template <class T>
struct contiguous_view : cache_view {
    using value_type = T;
    using head_type = contiguous_head<T>;
    static constexpr bool paged = false;

    const std::int64_t* row_offset = nullptr;  // [kv_heads + 1]
    T* k = nullptr;                            // [max_sequences, rows, head_dim_qk]
    T* v = nullptr;                            // [max_sequences, rows, head_dim_vo]
    position_t* position = nullptr;            // [max_sequences, rows]
    float* score = nullptr;                    // [max_sequences, rows]
    std::int64_t rows = 0;                     // of one sequence
    std::int64_t tiles = 0;                    // of one sequence

    /// Whether a sequence may become so much longer.
    [[nodiscard]] __device__ bool takes(std::int32_t /*sequence*/, std::int32_t /*tokens*/) const {
        return true;
    }

    template <class P>
    __host__ __device__ explicit contiguous_view(const FixedBudgetRef<P, T>& ref)
        : cache_view(ref),
          row_offset(ref.row_offset),
          k(ref.k),
          v(ref.v),
          position(ref.position),
          score(ref.score),
          rows(ref.rows),
          tiles(ref.tiles(ref.rows, ref.kv_heads)) {}
};

template <class P, class T>
contiguous_view<T> view_of(const FixedBudgetRef<P, T>& cache) {
    return contiguous_view<T>(cache);
}

/// The same element of every row.
template <class T>
struct contiguous_column {
    T* first;
    std::int32_t stride;

    [[nodiscard]] __device__ T* at(std::int32_t row) const { return first + std::int64_t{row} * stride; }
};

/// One head of one sequence.
template <class T>
struct contiguous_head {
    HeadParams head_params;
    HeadRows layout;
    std::int64_t index;  // sequence * kv_heads + head
    std::int64_t tile;   // its first tile of top-k slots
    T* k;
    T* v;
    position_t* position;
    float* score;
    std::int32_t head_dim_qk, head_dim_vo;

    __device__ contiguous_head(const contiguous_view<T>& cache, std::int32_t seq, std::int32_t head)
        : head_params(cache.all_params[head]), layout{head_params.sinks, head_params.window} {
        const std::int64_t offset = cache.row_offset[head], first = seq * cache.rows + offset;
        index = std::int64_t{seq} * cache.kv_heads + head;
        tile = seq * cache.tiles + offset / detail::slot_tile + head;
        k = cache.k + first * cache.head_dim_qk;
        v = cache.v + first * cache.head_dim_vo;
        position = cache.position + first;
        score = cache.score + first;
        head_dim_qk = cache.head_dim_qk;
        head_dim_vo = cache.head_dim_vo;
    }
    [[nodiscard]] __device__ contiguous_source<T> source() const { return {k, v, head_dim_qk, head_dim_vo}; }
    // What heads of other caches have too, wherever their rows lie.
    [[nodiscard]] __device__ T* key(std::int32_t row) const { return k + std::int64_t{row} * head_dim_qk; }
    [[nodiscard]] __device__ T* value(std::int32_t row) const { return v + std::int64_t{row} * head_dim_vo; }
    [[nodiscard]] __device__ contiguous_column<T> key_column(std::int32_t i) const {
        return {k + i, head_dim_qk};
    }
    [[nodiscard]] __device__ contiguous_column<T> value_column(std::int32_t i) const {
        return {v + i, head_dim_vo};
    }
    [[nodiscard]] __device__ position_t& position_of(std::int32_t row) const { return position[row]; }
    [[nodiscard]] __device__ float& score_of(std::int32_t row) const { return score[row]; }
    [[nodiscard]] __device__ T* spare_key(std::int32_t j) const { return key(capacity() + j); }
    [[nodiscard]] __device__ T* spare_value(std::int32_t j) const { return value(capacity() + j); }
    [[nodiscard]] __device__ position_t& spare_position(std::int32_t j) const {
        return position[capacity() + j];
    }
    [[nodiscard]] __device__ float& spare_score(std::int32_t j) const { return score[capacity() + j]; }
    /// Rows before the spare ones.
    [[nodiscard]] __device__ std::int32_t capacity() const { return layout.slot(head_params.budget); }
    [[nodiscard]] __device__ detail::head_slots top_k_slots(position_t rebase_limit) const {
        return {head_params, rebase_limit, score + layout.slot(0), position + layout.slot(0)};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
