// A consumer warpgroup of a Hopper forward block: 64 rows of the tile, products by wgmma, softmax in
// registers.
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/forward/forward_pipeline.cuh>
#include <kvpolicy/attention/cuda/forward/online_softmax.cuh>
#include <kvpolicy/attention/cuda/forward/row_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class S>
class agent_forward_consumer : forward_pipeline<S> {
  public:
    using T = typename S::T;

    __device__ explicit agent_forward_consumer(const forward_pipeline<S>& ring) : forward_pipeline<S>(ring) {}

    /// Multiplies until the producer says that there are no more tiles.
    __device__ void consume(int group) const {
        const std::uint64_t queries = describe_k_major(queries_ + group * 64 * S::row_bytes);
        const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane_id() / 4;
        pipeline_state<S::stages> ring;
        for (std::uint32_t parity = 0;; parity ^= 1) {
            barrier_wait(queries_full_, parity);
            const std::int32_t number = memory_->tile;
            if (number < 0) {
                return;
            }
            // The frame of the notes: that of the super-tile where rows are listed, else that of the tile.
            std::uint32_t query[2];
            {
                const tile_coords coords = tile_coords_of(call_, static_cast<std::uint32_t>(number));
                if (64 * group >= coords.queries * call_.heads) {
                    skip_tile(ring);
                    continue;
                }
                const int begin = call_.listed ? coords.first_query % call_.plan.super_q : 0;
                query[0] = static_cast<std::uint32_t>(begin + first_row / call_.heads);
                query[1] = static_cast<std::uint32_t>(begin + (first_row + 8) / call_.heads);
            }
            float o[parts][columns];
#pragma unroll
            for (int x = 0; x < parts; ++x) {
#pragma unroll
                for (int i = 0; i < columns; ++i) {
                    o[x][i] = 0.0f;
                }
            }
            online_softmax softmax;
            if constexpr (S::tuning.overlap) {
                attend_overlapped(ring, queries, query, softmax, o);
            } else {
                attend_in_turn(ring, queries, query, softmax, o);
            }

            float inverse[2], lse[2];
            softmax.finish(S::General ? 1.0f : call_.slope, inverse, lse);
            const tile_coords coords = tile_coords_of(call_, static_cast<std::uint32_t>(number));
            T* rows[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows[r] = row_to_store(call_, coords, first_row + 8 * r, lse[r]);
            }
#pragma unroll
            for (int x = 0; x < parts; ++x) {
                if (zero_if_finite(o[x]) != 0.0f) {
                    *call_.not_finite = 1;
                }
                store_rows(o[x], inverse, rows, 128 * x, call_.out.dim);
            }
        }
    }

  private:
    using shares = forward_pipeline<S>;
    using shares::call_, shares::memory_, shares::queries_, shares::ring_, shares::full_, shares::empty_,
        shares::queries_full_, shares::queries_empty_;

    static constexpr int scores = S::keys / 2;
    static constexpr int parts = S::Dim / 128 > 0 ? S::Dim / 128 : 1;  // of the output's columns
    static constexpr int columns = S::Dim / 2 / parts;                 // of a part, a thread

    /// This warp no longer needs a stage (or the queries): what its lanes have read comes before what the
    /// producer writes.
    __device__ static void release(std::uint32_t barrier) { warp_arrive(barrier, lane_id()); }

    using Output = float[parts][columns];
    using Weights = std::uint32_t[S::keys / 16][4];

    /// Enqueues s = Q K^T with the keys of a stage.
    __device__ void multiply_keys(float (&s)[scores], std::uint64_t queries, int stage) const {
        const std::uint64_t k = describe_k_major(ring_ + stage * S::tile_bytes);
#pragma unroll
        for (int step = 0; step < S::Dim / 16; ++step) {
            wgmma<T, 0, 0>(s, queries + ((step % 4) * 32 + (step / 4) * 64 * 128) / 16,
                           k + ((step % 4) * 32 + (step / 4) * S::keys * 128) / 16, step != 0);
        }
        wgmma_commit();
    }
    /// Enqueues o += P V with the values of a stage.
    __device__ void multiply_values(Output& o, const Weights& p, int stage) const {
        const std::uint64_t v = describe_mn_major(ring_ + stage * S::tile_bytes, S::keys * 128);
#pragma unroll
        for (int step = 0; step < S::keys / 16; ++step) {
#pragma unroll
            for (int x = 0; x < parts; ++x) {
                wgmma<T, 1>(o[x], p[step], v + (x * 2 * S::keys * 128 + step * 2048) / 16, 1);
            }
        }
        wgmma_commit();
    }
    __device__ static void pin_output(Output& o) {
#pragma unroll
        for (int x = 0; x < parts; ++x) {
            pin(o[x]);
        }
    }
    __device__ static void rescale(Output& o, const float (&decay)[2]) {
#pragma unroll
        for (int x = 0; x < parts; ++x) {
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                o[x][i] *= decay[(i / 2) % 2];
            }
        }
    }

    /// From the scores of a stage to logits, as far as anything is to be done.
    __device__ void to_stage_logits(float (&s)[scores], int stage, const std::uint32_t (&query)[2]) const {
        const key_notes<S::keys, S::General>& notes = memory_->notes[stage];
        if constexpr (S::General) {
            to_logits(s, call_.slope, call_.cap, notes, query);
        }
        if (notes.masked != 0) {
            hide(s, notes, query);
        }
    }
    __device__ float slope() const { return S::General ? 1.0f : call_.slope; }

    /// Of the scores of a stage, by weigh() for finish_weights().
    struct weighing {
        bool done;   // they are weights, or
        bool last;   // (where the stage is released) the stage was the tile's last,
        bool moves;  // and the output so far must be multiplied by `decay`
        float decay[2];
    };
    /// Whether weights are relative to the first maximum. Above head_dim 128 it moves lazily, which is 4%
    /// faster there.
    static constexpr bool fixed_reference = S::Dim <= 128;

    /// This warp no longer needs the keys of a stage. True where it was the tile's last.
    __device__ bool release_keys(int stage) const {
        const bool last = memory_->notes[stage].last != 0;
        release(empty_ + 8 * stage);
        if (last) {
            release(queries_empty_);
        }
        return last;
    }

    /// From the scores of a stage to weights, in place, as far as the output need not be ready.
    __device__ weighing weigh(float (&s)[scores], int stage, const std::uint32_t (&query)[2],
                              online_softmax& softmax) const {
        weighing w{};
        if constexpr (fixed_reference) {
            if (softmax.has_reference) {
                to_stage_logits(s, stage, query);
                w.done = softmax.take_relative(s, slope());
            }
        } else {
            to_stage_logits(s, stage, query);
            w.last = release_keys(stage);
            w.moves = softmax.template take<true>(s, slope(), w.decay);
        }
        return w;
    }
    /// After weigh(), with the output so far: s are weights, and the stage is released. True where it was the
    /// tile's last.
    __device__ bool finish_weights(float (&s)[scores], const weighing& w, int stage,
                                   const std::uint32_t (&query)[2], online_softmax& softmax,
                                   Output& o) const {
        if constexpr (fixed_reference) {
            if (!w.done) {
                if (softmax.has_reference) {
                    multiply_again(s, stage);       // weigh() has written over them
                    softmax.has_reference = false;  // take() moves it, perhaps far from 0
                }
                to_stage_logits(s, stage, query);
                float decay[2];
                if (softmax.template take<false>(s, slope(), decay)) {
                    rescale(o, decay);
                }
            }
            return release_keys(stage);
        } else {
            if (w.moves) {
                rescale(o, w.decay);
            }
            return w.last;
        }
    }

    /// s = Q K^T of this warp's rows once more, by the warp alone.
    __device__ void multiply_again(float (&s)[scores], int stage) const {
        // Volatile: what this hardly ever needs is not to be kept in registers.
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int lane = thread % 32;
        const int warp = thread / 32;
        const std::uint32_t q = queries_ + warp / 4 * 64 * S::row_bytes;
        const std::uint32_t k = ring_ + stage * S::tile_bytes;
#pragma unroll
        for (int n = 0; n < S::keys / 16; ++n) {
            float sums[2][4] = {};
#pragma unroll 1
            for (int step = 0; step < S::Dim / 16; ++step) {
                std::uint32_t a[4], b[4];
                load_matrices(a, q + swizzled(64, warp % 4 * 16 + lane % 16, 2 * step + lane / 16));
                load_matrices(
                    b, k + swizzled(S::keys, 16 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
                mma_16x8x16<T>(sums[0], a, b[0], b[1]);
                mma_16x8x16<T>(sums[1], a, b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                s[8 * n + i] = sums[i / 4][i % 4];
            }
        }
    }

    /// o += P V with the values at the pipeline's stage, which are then released.
    __device__ void take_values(pipeline_state<S::stages>& ring, Weights& p, Output& o) const {
        barrier_wait(full_ + 8 * ring.stage, ring.parity);
        pin(p);
        pin_output(o);
        wgmma_fence();
        multiply_values(o, p, ring.stage);
        wgmma_wait<0>();
        pin_output(o);
        release(empty_ + 8 * ring.stage);
        ring.advance();
    }

    /// s = Q K^T with the keys at the pipeline's stage.
    __device__ void take_keys(float (&s)[scores], std::uint64_t queries,
                              const pipeline_state<S::stages>& ring) const {
        barrier_wait(full_ + 8 * ring.stage, ring.parity);
        wgmma_fence();
        multiply_keys(s, queries, ring.stage);
        wgmma_wait<0>();
        pin(s);
    }

    /// Releases a tile's stages: none of its queries are this warpgroup's.
    __device__ void skip_tile(pipeline_state<S::stages>& ring) const {
        bool last;
        do {
            barrier_wait(full_ + 8 * ring.stage, ring.parity);
            last = release_keys(ring.stage);
            ring.advance();
            barrier_wait(full_ + 8 * ring.stage, ring.parity);
            release(empty_ + 8 * ring.stage);
            ring.advance();
        } while (!last);
    }

    /// One product after the other. The warpgroups are out of step, so the tensor cores still have work.
    __device__ void attend_in_turn(pipeline_state<S::stages>& ring, std::uint64_t queries,
                                   const std::uint32_t (&query)[2], online_softmax& softmax,
                                   Output& o) const {
        bool last;
        do {
            float s[scores];
            Weights p;
            take_keys(s, queries, ring);
            const weighing w = weigh(s, ring.stage, query, softmax);
            last = finish_weights(s, w, ring.stage, query, softmax, o);
            ring.advance();
            to_fragments<T>(p, s);
            take_values(ring, p, o);
        } while (!last);
    }

    /// Q K^T of the next block is multiplied beside the softmax of this one; takes the registers for scores
    /// and weights both.
    __device__ void attend_overlapped(pipeline_state<S::stages>& ring, std::uint64_t queries,
                                      const std::uint32_t (&query)[2], online_softmax& softmax,
                                      Output& o) const {
        float s[scores];
        Weights p;
        take_keys(s, queries, ring);
        bool last = finish_weights(s, weigh(s, ring.stage, query, softmax), ring.stage, query, softmax, o);
        to_fragments<T>(p, s);
        while (!last) {
            ring.advance();
            const pipeline_state<S::stages> values = ring;
            ring.advance();
            barrier_wait(full_ + 8 * ring.stage, ring.parity);
            barrier_wait(full_ + 8 * values.stage, values.parity);
            pin(p);
            pin_output(o);
            wgmma_fence();
            multiply_keys(s, queries, ring.stage);
            multiply_values(o, p, values.stage);
            wgmma_wait<1>();
            pin(s);
            const weighing w = weigh(s, ring.stage, query, softmax);
            wgmma_wait<0>();
            pin_output(o);
            pin(p);
            release(empty_ + 8 * values.stage);
            last = finish_weights(s, w, ring.stage, query, softmax, o);
            to_fragments<T>(p, s);
        }
        ring.advance();
        take_values(ring, p, o);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
