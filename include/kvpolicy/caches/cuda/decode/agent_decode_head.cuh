// What the blocks that share a head do in a step, wherever its entries lie: find the worst top-k slot, score
// the new token, and learn which of them arrives last.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Of a head's blocks, in shared memory.
template <class Rows>
struct decode_head_memory {
    detail::ranked_slot worst[Rows::warps];
    std::uint32_t last;
};

/// What a step does to a head, and how the key that leaves the window ranks.
struct decided_step : detail::step_decision {
    detail::ranked_slot ranked{};
};

/// A block's place in the work: `pair` is an entry of the batch and a KV head, `part` one of its group of
/// query heads.
template <class Launch>
class agent_decode_head {
  protected:
    using Rows = typename Launch::Rows;
    using Scorer = typename Launch::Scorer;
    using T = typename Launch::T;
    using Compute = typename Launch::Compute;
    static constexpr bool on_leaving = Scorer::when == score_time::on_leaving;
    static constexpr bool observed = Scorer::when == score_time::observed;

    __device__ agent_decode_head(const Launch& call, decode_head_memory<Rows>& memory, unsigned char* regions,
                                 std::int32_t pair, std::int32_t part, std::int32_t seq)
        : call_(call),
          regions_(regions),
          part_(part),
          pair_(pair),
          entry_(pair / call.cache.kv_heads),
          head_(pair % call.cache.kv_heads),
          seq_(seq),
          of_head_(memory) {}

    /// Bytes of a warp's region.
    [[nodiscard]] __device__ int region_bytes() const { return Rows::shared_bytes(call_.cache.head_dim_vo); }
    [[nodiscard]] __device__ stream_queries<T> queries() const {
        const std::int32_t first = part_ * Rows::heads, left = call_.cache.group - first;
        return {call_.q.row(entry_, head_ * call_.cache.group + first, 0), call_.q.head_stride,
                left < Rows::heads ? left : Rows::heads};
    }

    /// The worst of the head's slots where no step before has left it, the same in all threads. All warps of
    /// the block come here or none. `records` writes those of the head's tiles; with `known`, which is
    /// detail::known_worst, they may be there.
    template <class Head, class Slots>
    [[nodiscard]] __device__ detail::ranked_slot worst_of_block(const Head& head, const Slots& top_k_slots,
                                                                [[maybe_unused]] std::int32_t known,
                                                                bool records, std::int32_t num_long_range,
                                                                position_t q) const {
        std::int32_t* const record = call_.cache.record_of(head);
        if constexpr (scored_by_steps<Scorer>) {
            if (known == victim_in_records) {
                return worst_of_records(top_k_slots, record, num_long_range, q);
            }
        }
        return worst_of_warps(detail::worst_of_tiles(warp_group{}, top_k_slots, records ? record : nullptr,
                                                     warp_id(), Rows::warps, num_long_range, q));
    }

    /// Sets out to read what worst_of_block() begins with, before it is known whether it will.
    template <class Head>
    __device__ void ask_records([[maybe_unused]] const Head& head) {
        if constexpr (scored_by_steps<Scorer>) {
            const auto tile = static_cast<std::int32_t>(threadIdx.x);
            if (tile < detail::tiles_of_slots(head.head_params.budget)) {
                early_record_ = call_.cache.record_of(head)[tile];
            }
        }
    }

    /// Whether all other blocks of the head have arrived. What they wrote before is then visible to this one,
    /// and they no longer read the cache. The counter is back at 0 for the next launch.
    [[nodiscard]] __device__ bool arrives_last(std::int64_t index, std::uint32_t blocks) const {
        __syncthreads();  // the block's own work comes before its arrival
        if (threadIdx.x == 0) {
            __threadfence();
            of_head_.last = atomicInc(call_.cache.arrivals + index, blocks - 1) == blocks - 1 ? 1 : 0;
            __threadfence();
        }
        __syncthreads();
        return of_head_.last != 0;
    }

    /// The new token's score as its entry stores it, 0 where it does not count: a sink's is not used, nor is
    /// that of a key that is held for its position.
    [[nodiscard]] __device__ float arriving_score(bool counts) const {
        return arriving_score_of(call_, entry_, head_, pair_, counts);
    }

    /// Decides what the step does to the entries, the same in every block and thread; `score` is u's. All
    /// warps of the block come here or none. Where no step before has left the worst slot, the block that
    /// `records` writes the worst slots of all tiles.
    template <class Head>
    [[nodiscard]] __device__ decided_step decide(const Head& head, position_t q, std::int32_t num_long_range,
                                                 std::int32_t victim, float score, bool records) const {
        const position_t limit = call_.cache.rebase_limit;
        decided_step step{detail::begin_step(call_.params_at_step(head), call_.gate, limit, q, num_long_range,
                                             victim, score, call_.num_protected(head.index))};
        const auto top_k_slots = detail::competing(head.top_k_slots(limit), call_.gate);
        step.ranked = top_k_slots.rank(score, q - head.head_params.window, -1, q);
        if (step.full) {
            detail::ranked_slot worst;
            if (step.known >= 0) {
                worst = top_k_slots.at(step.known, q);
            } else {
                worst = worst_of_block(head, top_k_slots, step.known, records, num_long_range, q);
            }
            detail::resolve_eviction(step, head.head_params, step.ranked, worst);
        }
        return step;
    }
    /// The score of the key that leaves the window, if one does.
    template <class Head>
    [[nodiscard]] __device__ float score_of_leaving(const Head& head, position_t q) const {
        const position_t u = q - head.head_params.window;
        return u >= head.head_params.sinks ? call_.leaving_score(head, pair_, u) : 0.0f;
    }
    /// Leaves the new token's score in a note, by the last warp.
    template <class Head>
    __device__ void note_arriving(const Head& head, position_t q, decode_note& note) const {
        if (warp_id() == Rows::warps - 1) {
            const float arriving = arriving_score(
                q >= head.head_params.sinks && (scores_come_along<Scorer> || !detail::holds(call_.gate, q)));
            if (lane_id() == 0) {
                note.arriving = arriving;
            }
        }
    }
    /// Finds the worst slot after the step, from the records of tiles, and records that of the tile that
    /// changes. Leaves it in a note. By the first warp.
    template <class Head>
    __device__ void note_next_victim(const Head& head, position_t q, const decided_step& step,
                                     decode_note& note) const {
        if (warp_id() == 0) {
            std::int32_t next = victim_in_records;  // as soon as this step's weights are scores
            if constexpr (!observed) {
                const auto top_k_slots =
                    detail::competing(head.top_k_slots(call_.cache.rebase_limit), call_.gate);
                next = detail::next_victim(warp_group{}, top_k_slots, call_.cache.record_of(head), step,
                                           step.ranked, q);
            }
            if (lane_id() == 0) {
                note.victim = next;
            }
        }
    }

    const Launch& call_;
    unsigned char* regions_;
    std::int32_t part_, pair_, entry_, head_, seq_;

  private:
    /// worst_of_block() where step_mass_kernel has left the records.
    template <class Slots>
    [[nodiscard]] __device__ detail::ranked_slot worst_of_records(const Slots& top_k_slots,
                                                                  const std::int32_t* record,
                                                                  std::int32_t num_long_range,
                                                                  position_t q) const {
        detail::ranked_slot worst;
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        for (std::int32_t tile = thread; tile < detail::tiles_of_slots(num_long_range);
             tile += Rows::threads) {
            const detail::ranked_slot one =
                top_k_slots.at(tile == thread && early_record_ >= 0 ? early_record_ : record[tile], q);
            worst = detail::gives_way(one, worst) ? one : worst;
        }
        return worst_of_warps(warp_group::worst(worst));
    }
    [[nodiscard]] __device__ detail::ranked_slot worst_of_warps(detail::ranked_slot worst) const {
        if (lane_id() == 0) {
            of_head_.worst[warp_id()] = worst;
        }
        __syncthreads();
        worst = of_head_.worst[0];
        for (int i = 1; i < Rows::warps; ++i) {
            if (detail::gives_way(of_head_.worst[i], worst)) {
                worst = of_head_.worst[i];
            }
        }
        return worst;
    }

    decode_head_memory<Rows>& of_head_;
    std::int32_t early_record_ = -1;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
