// The rows that a step writes: u goes to its place, the new token to u's row.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_params.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a thread moves, loaded while outputs are computed: 16 bytes of an entry where T has 16 bits, and in
/// thread 0 the leader's note.
struct moved_rows {
    uint4 leaving, arriving;
    std::int32_t newest;
    decode_note note;
};

/// The rows of head `head` of entry `entry`, in sequence `seq`, by all threads of a block.
template <class Rows, class Launch>
class agent_write_entries {
    using T = typename Rows::T;
    static constexpr int piece = sizeof(T) == 2 ? 8 : 1;  // elements
    static constexpr bool on_leaving = decltype(Launch::scorer)::when == score_time::on_leaving;

  public:
    __device__ agent_write_entries(const Launch& call, std::int32_t entry, std::int32_t head,
                                   std::int32_t seq)
        : call_(call), entry_(entry), head_(head), seq_(seq) {}

    /// Starts the loads of all that write() moves at once, to hide DRAM latency.
    [[nodiscard]] __device__ moved_rows fetch(const contiguous_head<T>& head, position_t q,
                                              const decode_note& of_cluster) const {
        moved_rows moved{};
        if (!call_.writes) {
            return moved;
        }
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        moved.newest = head.layout.recent(q);
        if constexpr (sizeof(T) == 2) {
            static_assert(Rows::threads >= 2 * Rows::Dim / piece, "a piece a thread");
            if (thread < pieces()) {
                const row_piece mine = piece_of(head, thread);
                moved.arriving = *reinterpret_cast<const uint4*>(mine.candidate);
                moved.leaving =
                    *reinterpret_cast<const uint4*>(mine.rows + std::int64_t{moved.newest} * mine.dim);
            }
        }
        if (call_.clustered) {
            moved.note = of_cluster;
            return moved;
        }
        const decode_note* const note = call_.notes + (std::int64_t{entry_} * call_.cache.kv_heads + head_);
        moved.note.promoted = __ldcg(&note->promoted);
        if (thread == 0) {
            moved.note.num_long_range = __ldcg(&note->num_long_range);
            moved.note.victim = __ldcg(&note->victim);
            moved.note.arriving = __ldcg(&note->arriving);
            moved.note.leaving = __ldcg(&note->leaving);
        }
        return moved;
    }

    /// The key that leaves the window moves to its top-k slot, then the new token takes its entry. A thread
    /// reads its piece before it writes it.
    __device__ void write(const contiguous_head<T>& head, position_t q, const moved_rows& moved) const {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t to = moved.note.promoted;
        for (std::int32_t i = thread; i < pieces(); i += Rows::threads) {
            const row_piece mine = piece_of(head, i);
            T* const newest = mine.rows + std::int64_t{moved.newest} * mine.dim;
            T* const promoted = mine.rows + std::int64_t{to} * mine.dim;
            if constexpr (sizeof(T) == 2) {
                if (to >= 0) {
                    *reinterpret_cast<uint4*>(promoted) = moved.leaving;
                }
                *reinterpret_cast<uint4*>(newest) = moved.arriving;
            } else {
                if (to >= 0) {
                    *promoted = *newest;
                }
                *newest = *mine.candidate;
            }
        }
        if (thread != 0) {
            return;
        }
        const float arriving = moved.note.arriving, leaving = moved.note.leaving;
        if (to >= 0) {
            head.position[to] = q - head.head_params.window;
            head.score[to] = leaving;
        }
        head.position[moved.newest] = q;
        head.score[moved.newest] = arriving;
        call_.cache.num_long_range[head.index] = moved.note.num_long_range;
        call_.cache.victim[head.index] = moved.note.victim;
        call_.cache.appended[head.index] = 1;
        if (head_ == 0) {
            call_.cache.num_draft[seq_] = 0;
        }
        const bool bad = arriving != arriving || (on_leaving && leaving != leaving);
        if (bad && call_.status != nullptr) {
            atomicOr(call_.status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

  private:
    /// Piece i of a row, those of the key before those of the value.
    struct row_piece {
        T* rows;
        const T* candidate;
        std::int32_t dim;
    };
    [[nodiscard]] __device__ row_piece piece_of(const contiguous_head<T>& head, std::int32_t i) const {
        const std::int32_t of_k = call_.cache.head_dim_qk / piece;
        if (i < of_k) {
            return {head.k + i * piece, call_.k.row(entry_, head_, 0) + i * piece, call_.cache.head_dim_qk};
        }
        i -= of_k;
        return {head.v + i * piece, call_.v.row(entry_, head_, 0) + i * piece, call_.cache.head_dim_vo};
    }
    [[nodiscard]] __device__ std::int32_t pieces() const {
        return (call_.cache.head_dim_qk + call_.cache.head_dim_vo) / piece;
    }

    const Launch& call_;
    std::int32_t entry_, head_, seq_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
