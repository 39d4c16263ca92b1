// A step of one head without attention, by one block: the top-k update of the key that leaves the window, and
// the entries that it and the new token take. What the last phase of a step does, where no query reads.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_head.cuh>
#include <kvpolicy/caches/cuda/decode/agent_write_entries.cuh>
#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes of a block that appends, of rows of any head_dim that caches take.
template <class T_>
struct append_rows {
    using T = T_;
    using Compute = std::conditional_t<is_half<T>, float, T>;
    static constexpr int Dim = 256;
    static constexpr int warps = 4;
    static constexpr int threads = 32 * warps;
};

/// A block of append_kernel.
template <class Launch>
class agent_append_head : agent_decode_head<Launch> {
    using Rows = typename Launch::Rows;
    using Head = typename Launch::View::head_type;
    using base = agent_decode_head<Launch>;
    using base::call_, base::entry_, base::head_, base::seq_;
    struct next_victims;
    /// Whether queries choose among pages by their bounds.
    static constexpr bool selects = requires(const typename Launch::View& view) { view.chosen; };

  public:
    struct Memory : decode_head_memory<Rows> {
        decode_note note;
    };

    __device__ agent_append_head(const Launch& call, Memory& memory, std::int32_t pair, std::int32_t seq)
        : base(call, memory, nullptr, pair, 0, seq), note_(memory.note) {}

    /// Of a paged cache what comes before the wait is beside the admission, which reads no record of tiles;
    /// nothing else is written there.
    __device__ void run() {
        // 1. Loads that do not wait for the decision.
        const Head head(call_.cache, seq_, head_);
        const position_t q = call_.cache.length[seq_];
        const std::int32_t num_long_range = call_.cache.num_long_range[head.index],
                           victim = call_.cache.victim[head.index];
        const agent_write_entries<Launch> moving(call_, entry_, head_, seq_);
        const bool leaves = q - head.head_params.window >= head.head_params.sinks;
        moved_rows moved = moving.fetch(head, head.layout.recent(q), leaves);
        const float score = this->score_of_leaving(head, q);
        this->note_arriving(head, q, note_);
        const next_victims next = find_next(head, q, num_long_range, victim);
        // 2. The decision.
        const decided_step step = this->decide(head, q, num_long_range, victim, score, true);
        note_victim(head, q, step, next);
        __syncthreads();  // the note is there, and all have read what changes now
        if constexpr (Launch::View::paged) {
            wait_for_kernel_before();
            if (call_.work.appended[entry_] <= 0) {
                forget(head, step);
                return;
            }
        }
        // 3. Entries and counters.
        moved.take(step, score);
        moved.note.victim = note_.victim;
        moved.note.arriving = note_.arriving;
        moving.write(head, q, moved);
        if constexpr (selects) {
            refresh_bounds(head, q, step);
        }
    }

  private:
    /// The worst slots beside the known worst slot, in the first warp.
    struct next_victims : detail::next_victims {
        bool found = false;
    };
    [[nodiscard]] __device__ next_victims find_next(const Head& head, position_t q,
                                                    std::int32_t num_long_range, std::int32_t victim) const {
        const position_t limit = call_.cache.rebase_limit;
        const std::int32_t known = detail::known_worst(head.head_params, limit, q, victim);
        if (known < 0 || warp_id() != 0) {
            return {};
        }
        const auto top_k_slots = detail::competing(head.top_k_slots(limit), call_.gate);
        return {detail::find_next_victims(warp_group{}, top_k_slots, call_.cache.record_of(head),
                                          num_long_range, q, known),
                true};
    }
    /// base::note_next_victim, where they are found from these.
    __device__ void note_victim(const Head& head, position_t q, const decided_step& step,
                                const next_victims& next) const {
        if (warp_id() == 0 && next.found) {
            const std::int32_t victim = detail::next_victim(warp_group{}, head.head_params, next,
                                                            call_.cache.record_of(head), step, step.ranked);
            if (lane_id() == 0) {
                note_.victim = victim;
            }
        } else if constexpr (base::observed) {
            if (threadIdx.x == 0) {
                note_.victim = -1;  // scores change, in observe(), before the next step looks
            }
        } else {
            this->note_next_victim(head, q, step, note_);
        }
    }

    /// The records as they were before the step, for an entry that found no pages.
    __device__ void forget(const Head& head, const decided_step& step) const {
        if (threadIdx.x == 0 && step.replaced) {
            call_.cache.record_of(head)[step.known / detail::slot_tile] = step.known;  // the worst of all
        }
    }

    /// The bounds of the pages that a selection chooses from.
    __device__ void refresh_bounds(const Head& head, position_t q, const decided_step& step) const {
        __syncthreads();  // the rows are there
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t used = head.layout.used(q + 1, step.num_long_range), size = head.rows.bound_rows;
        refresh_page(head.rows, step.newest / size, used, thread, Rows::threads);
        if (step.promoted >= 0 && step.promoted / size != step.newest / size) {
            refresh_page(head.rows, step.promoted / size, used, thread, Rows::threads);
        }
    }

    decode_note& note_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
