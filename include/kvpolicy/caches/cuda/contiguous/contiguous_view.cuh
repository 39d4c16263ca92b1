// A layer of a FixedBudgetCache as kernels see it: the ref without its policy, so that policies of the same
// structure share their kernels.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class T>
struct contiguous_head;

template <class T>
struct contiguous_view {
    using value_type = T;
    using head_type = contiguous_head<T>;

    const HeadParams* all_params = nullptr;    // [kv_heads]
    const std::int64_t* row_offset = nullptr;  // [kv_heads + 1]
    position_t* length = nullptr;              // [max_sequences]
    std::int32_t* num_long_range = nullptr;    // [max_sequences, kv_heads]
    std::int32_t* victim = nullptr;            // [max_sequences, kv_heads]
    std::int32_t* num_draft = nullptr;         // [max_sequences]
    std::int32_t* appended = nullptr;          // [max_sequences, kv_heads]
    std::uint32_t* arrivals = nullptr;         // [max_sequences, kv_heads]
    std::int32_t* tile_victims = nullptr;      // [max_sequences, tiles]
    T* k = nullptr;                            // [max_sequences, rows, head_dim_qk]
    T* v = nullptr;                            // [max_sequences, rows, head_dim_vo]
    position_t* position = nullptr;            // [max_sequences, rows]
    float* score = nullptr;                    // [max_sequences, rows]
    float* state = nullptr;                    // [max_sequences, kv_heads, state_size]
    std::int64_t state_size = 0;
    std::int64_t rows = 0;   // of one sequence
    std::int64_t tiles = 0;  // of one sequence
    std::int32_t max_sequences = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    std::int32_t max_draft_tokens = 0;
    position_t rebase_limit = kvpolicy::rebase_limit;

    /// Whether a sequence may become so much longer.
    [[nodiscard]] __device__ bool takes(std::int32_t /*sequence*/, std::int32_t /*tokens*/) const {
        return true;
    }

    template <class P>
    __host__ __device__ explicit contiguous_view(const FixedBudgetRef<P, T>& ref)
        : all_params(ref.all_params),
          row_offset(ref.row_offset),
          length(ref.length),
          num_long_range(ref.num_long_range),
          victim(ref.victim),
          num_draft(ref.num_draft),
          appended(ref.appended),
          arrivals(ref.arrivals),
          tile_victims(ref.tile_victims),
          k(ref.k),
          v(ref.v),
          position(ref.position),
          score(ref.score),
          state(ref.state),
          state_size(ref.state_size),
          rows(ref.rows),
          tiles(ref.tiles(ref.rows, ref.kv_heads)),
          max_sequences(ref.max_sequences),
          kv_heads(ref.kv_heads),
          group(ref.group),
          head_dim_qk(ref.head_dim_qk),
          head_dim_vo(ref.head_dim_vo),
          max_draft_tokens(ref.max_draft_tokens),
          rebase_limit(ref.rebase_limit) {}
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
    // What heads of other caches have too, wherever their rows lie.
    [[nodiscard]] __device__ T* key(std::int32_t row) const { return k + std::int64_t{row} * head_dim_qk; }
    [[nodiscard]] __device__ T* value(std::int32_t row) const { return v + std::int64_t{row} * head_dim_vo; }
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

/// Tokens of a head that its layer has taken and advance() has not counted: LayerRef::pending.
template <class View>
__device__ std::int32_t num_appended_of(const View& cache, std::int64_t index) {
    return detail::appended_tokens(__ldcg(cache.appended + index));
}
/// Rows that a head has in use now, with those of such tokens: LayerRef::used.
template <class View, class Head>
__device__ std::int32_t rows_now(const View& cache, const Head& head, std::int32_t seq) {
    return head.layout.used(cache.length[seq] + num_appended_of(cache, head.index),
                            cache.num_long_range[head.index]);
}

/// The tokens of one entry of a batch, at most `most`, and its sequence. What the CPU backend would reject
/// counts as no token, and an entry of Batch::no_seq has none. With `grow` the tokens must fit into the
/// sequence.
struct active_entry {
    std::int32_t seq;  // 0 where there is none
    std::int32_t tokens;
    bool there = true;                // there is a sequence, and the tokens are a number that may be
    std::uint32_t wrong = status_ok;  // why there are no tokens

    template <class View>
    __device__ active_entry(const View& cache, const Batch& batch, std::int32_t i, std::int32_t most,
                            bool grow = true)
        : seq(batch.seq(i)), tokens(batch.tokens(i)) {
        if (seq == Batch::no_seq) {
            seq = tokens = 0;
            there = false;
        } else if (seq < 0 || seq >= cache.max_sequences) {
            seq = 0;
            there = false;
            refuse(status_bad_length);
        } else if (tokens < 0 || tokens > most || (grow && tokens != 0 && !cache.takes(seq, tokens))) {
            there = false;
            refuse(status_bad_length);
        }
    }
    /// No tokens if the layer has appended some since the last advance(). Call it before the first write.
    template <class View>
    __device__ active_entry once(const View& cache) const {
        active_entry entry = *this;
        if (tokens != 0 && cache.appended[std::int64_t{seq} * cache.kv_heads] > 0) {
            entry.refuse(status_layer_repeated);
        }
        return entry;
    }
    __device__ void refuse(std::uint32_t why) {
        wrong = why;
        tokens = 0;
    }
    /// By one thread.
    __device__ void report(std::uint32_t* status, std::int32_t i) const {
        if (wrong != 0 && status != nullptr) {
            atomicOr(status + i, wrong);
        }
    }
};

/// Where the tokens of a chunk are: in a call's tensors, or in the spare rows of a cache, where draft tokens
/// wait.
template <class T>
struct prefill_tokens {
    rows_view<const T> k{};  // [count, Hkv, most, Dk]
    rows_view<const T> v{};  // [count, Hkv, most, Dv]
    std::int32_t most = 1;
    bool spare = false;

    template <class Head>
    __device__ const T* key(const Head& head, std::int32_t i, std::int32_t h, std::int32_t j) const {
        return spare ? head.spare_key(j) : k.row(i, h, j);
    }
    template <class Head>
    __device__ const T* value(const Head& head, std::int32_t i, std::int32_t h, std::int32_t j) const {
        return spare ? head.spare_value(j) : v.row(i, h, j);
    }
};

/// A warp as a group of detail's bodies.
struct warp_group {
    __device__ static std::int32_t rank() { return lane_id(); }
    __device__ static std::int32_t size() { return 32; }
    /// Values as integers of the same order, NaN first; the last of equal ones by position. Mostly the upper
    /// half decides.
    __device__ static detail::ranked_slot worst(const detail::ranked_slot& mine) {
        const bool there = mine.slot >= 0;
        const auto bits = static_cast<std::uint64_t>(__double_as_longlong(mine.value + 0.0));  // -0 is 0
        constexpr std::uint64_t sign = std::uint64_t{1} << 63;
        const std::uint64_t ordered = mine.value != mine.value ? 0 : (bits & sign) != 0 ? ~bits : bits | sign;
        const std::uint64_t key = there ? ordered : ~std::uint64_t{0};
        bool least = only_least(static_cast<std::uint32_t>(key >> 32), true);
        unsigned votes = __ballot_sync(all_lanes, least);
        if ((votes & (votes - 1)) != 0) {
            const auto position = static_cast<std::uint64_t>(mine.position);
            least = only_least(static_cast<std::uint32_t>(key), least);
            least = only_least(~static_cast<std::uint32_t>(position >> 32), least);
            least = only_least(~static_cast<std::uint32_t>(position), least);
            votes = __ballot_sync(all_lanes, least);
        }
        const int lane = __ffs(static_cast<int>(votes)) - 1;
        return {__shfl_sync(all_lanes, mine.value, lane),
                static_cast<position_t>(__shfl_sync(all_lanes, static_cast<long long>(mine.position), lane)),
                __shfl_sync(all_lanes, mine.slot, lane)};
    }
    __device__ static void sync() { __syncwarp(); }

  private:
    /// Whether this lane is one of those that count and have the least number.
    __device__ static bool only_least(std::uint32_t number, bool counts) {
        return counts & (__reduce_min_sync(all_lanes, counts ? number : ~0u) == number);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
