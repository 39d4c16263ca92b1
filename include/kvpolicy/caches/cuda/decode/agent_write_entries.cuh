// The entries that a step writes: u, the key that leaves the window, goes to its top-k slot, the new token to
// the entry that u had.
#pragma once

#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>
#include <utility>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a thread moves, loaded while outputs are computed: 16 bytes of an entry where T has 16 bits, and in
/// thread 0 all of the note.
struct moved_rows {
    uint4 leaving, arriving;
    std::int32_t newest;  // the new token's row
    bool num_protected;   // u has its slot for its position
    decode_note note;

    /// What is decided of the step; `score` is u's.
    __device__ void take(const detail::step_decision& step, float score) {
        num_protected = step.num_protected;
        note.promoted = step.promoted;
        note.num_long_range = step.num_long_range;
        note.leaving = score;
    }
};

/// The rows of head `head` of entry `entry`, in sequence `seq`, by all threads of a block. A thread asks the
/// view's head where rows lie.
template <class Launch>
class agent_write_entries {
    using Rows = typename Launch::Rows;
    using T = typename Launch::T;
    static constexpr int piece = sizeof(T) == 2 ? 8 : 1;  // elements
    static constexpr bool on_leaving = Launch::Scorer::when == score_time::on_leaving;

  public:
    __device__ agent_write_entries(const Launch& call, std::int32_t entry, std::int32_t head,
                                   std::int32_t seq)
        : call_(call), entry_(entry), head_(head), seq_(seq) {}

    /// Starts the loads of all that write() moves at once, to hide DRAM latency: of u only where it `moves`.
    template <class Head>
    [[nodiscard]] __device__ moved_rows fetch(const Head& head, std::int32_t newest, bool moves) const {
        moved_rows moved{};
        moved.newest = newest;
        if constexpr (sizeof(T) == 2) {
            static_assert(Rows::threads >= 2 * Rows::Dim / piece, "a piece a thread");
            const auto thread = static_cast<std::int32_t>(threadIdx.x);
            if (thread < pieces()) {
                const column<Head> mine = column_of(head, thread);
                moved.arriving = *reinterpret_cast<const uint4*>(mine.token);
                if (moves) {
                    moved.leaving = *reinterpret_cast<const uint4*>(mine.rows.at(newest));
                }
            }
        }
        return moved;
    }

    /// Rows, counters and what else the cache keeps. A thread reads its piece before it writes it.
    template <class Head>
    __device__ void write(const Head& head, position_t q, const moved_rows& moved) const {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t to = moved.note.promoted;
        if constexpr (sizeof(T) == 2) {
            if (thread < pieces()) {
                const column<Head> mine = column_of(head, thread);
                if (to >= 0) {
                    *reinterpret_cast<uint4*>(mine.rows.at(to)) = moved.leaving;
                }
                *reinterpret_cast<uint4*>(mine.rows.at(moved.newest)) = moved.arriving;
            }
        } else {
            for (std::int32_t i = thread; i < pieces(); i += Rows::threads) {
                const column<Head> mine = column_of(head, i);
                T* const newest = mine.rows.at(moved.newest);
                if (to >= 0) {
                    *mine.rows.at(to) = *newest;
                }
                *newest = *mine.token;
            }
        }
        if constexpr (Launch::View::paged) {
            keep_queries(head.index, q);
            if constexpr (on_leaving) {
                keep_state(head.index);
            }
        }
        if (thread == 0) {
            write_counters(head, q, moved);
        }
    }

  private:
    /// Piece i of every row of the cache, those of the key before those of the value, and of the new token.
    template <class Head>
    struct column {
        decltype(std::declval<const Head&>().key_column(0)) rows;
        const T* token;
    };
    template <class Head>
    [[nodiscard]] __device__ column<Head> column_of(const Head& head, std::int32_t i) const {
        const std::int32_t of_k = call_.cache.head_dim_qk / piece;
        if (i < of_k) {
            return {head.key_column(i * piece), call_.k.row(entry_, head_, 0) + i * piece};
        }
        i -= of_k;
        return {head.value_column(i * piece), call_.v.row(entry_, head_, 0) + i * piece};
    }
    [[nodiscard]] __device__ std::int32_t pieces() const {
        return (call_.cache.head_dim_qk + call_.cache.head_dim_vo) / piece;
    }

    /// The token's queries, for an eviction part.
    __device__ void keep_queries(std::int64_t index, position_t q) const {
        if (call_.cache.queries == nullptr) {
            return;
        }
        const std::int32_t dim = call_.cache.head_dim_qk;
        T* const to = call_.cache.query_row(index, q);
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call_.cache.group * dim;
             i += Rows::threads) {
            to[i] = call_.q.row(entry_, head_ * call_.cache.group + i / dim, 0)[i % dim];
        }
    }
    /// The scorer's state after the step, where it waits outside of the cache.
    __device__ void keep_state(std::int64_t index) const {
        if (call_.advanced == nullptr) {
            return;
        }
        const std::int64_t size = call_.cache.state_size,
                           pair = std::int64_t{entry_} * call_.cache.kv_heads + head_;
        for (std::int64_t i = threadIdx.x; i < size; i += Rows::threads) {
            call_.cache.state[index * size + i] = call_.advanced[pair * size + i];
        }
    }
    /// By one thread.
    template <class Head>
    __device__ void write_counters(const Head& head, position_t q, const moved_rows& moved) const {
        const float arriving = moved.note.arriving, leaving = moved.note.leaving;
        const std::int32_t to = moved.note.promoted;
        if (to >= 0) {
            head.position_of(to) = q - head.head_params.window;
            head.score_of(to) = leaving;
        }
        head.position_of(moved.newest) = q;
        head.score_of(moved.newest) = arriving;
        call_.cache.num_long_range[head.index] = moved.note.num_long_range;
        if constexpr (detail::holds_keys<typename Launch::Gate>) {
            call_.cache.num_protected[head.index] += moved.num_protected ? 1 : 0;
        }
        call_.cache.victim[head.index] = moved.note.victim;
        call_.cache.appended[head.index] = 1;
        if (head_ == 0) {
            call_.cache.num_draft[seq_] = 0;
        }
        if constexpr (Launch::leaves_logits) {
            call_.observed.after[std::int64_t{entry_} * call_.cache.kv_heads + head_] = {
                head.layout.used(q + 1, moved.note.num_long_range), moved.note.num_long_range, seq_, 0};
        }
        const bool bad = arriving != arriving || (on_leaving && leaving != leaving);
        if (bad && call_.status != nullptr) {
            atomicOr(call_.status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    const Launch& call_;
    std::int32_t entry_, head_, seq_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
