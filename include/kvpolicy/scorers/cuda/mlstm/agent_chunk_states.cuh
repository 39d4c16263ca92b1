// The block of the chunk_states kernel: one part of a state (FS features, VS values) goes through the chunks
// of a segment, and the state before each chunk is written to memory.
//
// A pass takes one chunk after another. With few planes this leaves SMs idle. So the chunks of a
// plane are cut into segments that run at the same time. A first pass (Ends) starts each segment from an
// empty state and leaves what the segment adds and how much of a state it keeps. segment_scan adds these up.
// The second pass starts each segment from the sum. The result is the same sum in another order, in fp32.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_states_ring.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/chunk_states_memory.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block, one part of a state, one segment. The state is in registers; a warp has 16 features of it.
///
///     state <- keep state + sum_r scale_r a_r b_r^T,   sums <- keep sums + sum_r scale_r ratio_r a_r
///
/// Forward: a is k~, b is v~, scale is the weight of a token, ratio is 1. Backward: a is q~, b is d N, scale
/// is exp(m - M_l), ratio is d g_l; a chunk without outputs adds nothing. Ends: the segment starts empty, and
/// only what it adds and keeps is written. Hopper (backward, not Ends): the block also sums the pairs across
/// each chunk, which the gradient of the forget gates needs: keep times the dot product of the state before
/// the chunk and its own state.
///
/// Continued sequences start from the caller's states and write them back, features (width + 1) + 2 numbers
/// in the caller's order of features.
template <class T, int F, int V, int FS, int VS, bool Backward, bool SegmentStates, bool Hopper>
class chunk_states_agent : private chunk_states_ring<T, F, V, FS, VS, Backward, SegmentStates, Hopper> {
    // Other Hopper cases: kernel_fused_states_outputs_hopper.cuh, kernel_segment_states_hopper.cuh.
    static_assert(!Hopper || (Backward && !SegmentStates));
    using ring = chunk_states_ring<T, F, V, FS, VS, Backward, SegmentStates, Hopper>;
    using ring::f0, ring::part_v, ring::v0, ring::thread, ring::lane, ring::m0, ring::wn, ring::n0;
    using ring::fill_ring, ring::load_steps, ring::prefetch, ring::scale_stage, ring::load_following;
    using ring::first_chunk, ring::part, ring::partial;
    using ring::image_of_part, ring::chunk_at, ring::step_of, ring::row_of;
    using ring::params, ring::memory, ring::block, ring::plane, ring::segment, ring::chunks, ring::count;
    using ring::threads, ring::stages, ring::batch, ring::WN, ring::NI, ring::parts;
    using typename ring::E, typename ring::product_type;

    // Arrays in registers are objects of their own, which run() has: in one object with the members below
    // they would keep all of it in memory until ptxas sees it.
    using state_type = float[1][NI][4];
    using sums_type = float[4];  // every warp has the sums of its features
    using rounded_type = std::uint32_t[Hopper ? NI / 2 : 1][4];

  public:
    __device__ __forceinline__ explicit chunk_states_agent(const mlstm_params<T>& of) : ring(of) {}

    /// The phases; the numbers are those of the kernel's contract.
    __device__ __forceinline__ void run() {
        fill_ring();  // 1
        state_type acc;
        sums_type of_sums;
        begin_state(acc, of_sums);   // 2
        float segment_decay = 1.0f;  // of the state before the segment; below 0: a sequence begins in it
        [[maybe_unused]] product_type product, following;
        copy_wait<stages - 2>();
        wait_for_others();
        mlstm_state_step next_step = step_of(0);
        bool there_before = false;  // of step n - 1
        scale_stage(0, next_step, 0);
        load_following(following, next_step, 0);
        int stage = 0;  // n % stages
        for (std::int32_t n = 0; n < count; ++n) {
            copy_wait<stages - 3>();  // step n + 1 has arrived
            wait_for_others();
            const int after = stage + 1 == stages ? 0 : stage + 1;
            // Steps beyond the last have nothing to add.
            const mlstm_state_step step = next_step, ahead = step_of(n + stages - 1);
            next_step = step_of(n + 1);
            if constexpr (!Hopper) {
                prefetch(n + stages - 1, ahead, stage == 0 ? stages - 1 : stage - 1);
            }
            const std::int64_t chunk = first_chunk + chunk_at(n);
            [[maybe_unused]] rounded_type rounded;
            [[maybe_unused]] float crossing = 0.0f;
            if (step.there != 0) {
                float z[2];
                decay_sums(step, acc, of_sums, z);  // 3
                if constexpr (Hopper) {             // 4
                    product = following;
                    add_pairs_across(n, step, stage, acc, of_sums, z, product, crossing);
                }
                store_state(n, chunk, step, stage, acc, z, rounded, crossing);  // 5
                decay_state(step, acc);
            }
            // 6
            if constexpr (Hopper) {
                const auto meanwhile = [&] {
                    store_crossing(n, step, crossing);
                    store_rounded_state(chunk, step, stage, rounded, [&] {
                        write_sums(n - 1, there_before);
                        prefetch(n + stages - 1, ahead, stage == 0 ? stages - 1 : stage - 1);
                        load_following(following, next_step, after);
                        scale_stage(n + 1, next_step, after);
                    });
                };
                multiply_beside(step, stage, acc, product, meanwhile);
            } else {
                write_sums(n - 1, there_before);
                if (step.adds != 0) {
                    const E* const split = Backward ? memory.split + n % 2 * 2 * scorer_chunk : nullptr;
                    add_outer<NI>(acc[0], of_sums, memory.tile(stage), m0, FS + n0, split);
                }
                scale_stage(n + 1, next_step, after);
            }
            there_before = step.there != 0;
            if (step.there != 0) {
                if (Backward && step.fresh != 0) {
                    asm volatile("" ::: "memory");
                    clear_all(acc, of_sums);
                }
                segment_decay = step.fresh != 0 || segment_decay < 0.0f ? -1.0f : segment_decay * step.keep;
            }
            stage = after;
            if (n % batch == 1) {  // the batch before is no longer read
                load_steps(n - 1 + batch);
            }
        }
        __syncthreads();
        write_sums(count - 1, there_before);
        end_state(acc, of_sums, segment_decay);  // 7
    }

  private:
    __device__ __forceinline__ static void wait_for_others() {
        if constexpr (Hopper) {
            fence_async_proxy();
        }
        __syncthreads();
    }
    __device__ __forceinline__ static void clear_all(state_type& acc, sums_type& of_sums) {
        clear(acc);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            of_sums[e] = 0.0f;
        }
    }

    /// Phase 2: the state that the segment begins with.
    __device__ __forceinline__ void begin_state(state_type& acc, sums_type& of_sums) const {
        clear_all(acc, of_sums);
        if constexpr (SegmentStates) {
            const float* const state = Backward || segment != 0 ? nullptr : params.state_before(plane);
            if (state != nullptr) {
                part.take(params, F, state, state + std::int64_t{params.features} * params.width, acc[0],
                          of_sums);
                part.template write_partial<F, V>(params, partial - 1, acc[0], of_sums);
                clear_all(acc, of_sums);
            }
        } else {
            part.template begin<F, V>(params, plane, segment, Backward, acc[0], of_sums);
        }
    }

    /// Phase 3: the sums of the thread's features before the chunk, z, and their decay.
    __device__ __forceinline__ void decay_sums(const mlstm_state_step& step, state_type& acc,
                                               sums_type& of_sums, float (&z)[2]) const {
        // A sequence begins without a state, and nothing goes back beyond its first token.
        if (!Backward && step.fresh != 0) {
            asm volatile("" ::: "memory");  // a branch: no selection of every number in every step
            clear_all(acc, of_sums);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            z[r] = __shfl_sync(all_lanes, of_sums[2 * r] + of_sums[2 * r + 1], lane & ~3);
        }
#pragma unroll
        for (float& sum : of_sums) {
            sum *= step.keep;
        }
    }

    /// Phase 4, Hopper: pairs of tokens before the chunk with outputs after it, which are the dot product of
    /// the two states, and the chunk's part of the sums.
    __device__ __forceinline__ void add_pairs_across(
        [[maybe_unused]] std::int32_t n, [[maybe_unused]] const mlstm_state_step& step,
        [[maybe_unused]] int stage, [[maybe_unused]] const state_type& acc,
        [[maybe_unused]] sums_type& of_sums, [[maybe_unused]] const float (&z)[2],
        [[maybe_unused]] product_type& product, [[maybe_unused]] float& crossing) const {
#if KVPOLICY_HOPPER_CODE
        if constexpr (Hopper) {
            if (step.adds != 0) {
                product.add_sums(of_sums, memory.split + n % 2 * 2 * scorer_chunk);
            }
            float ref_value[NI][2] = {}, of_ref_value[2] = {};
            get_reference(step.before, step.ref_weight_before, memory.before + stage * VS, ref_value,
                          memory.ref_value + (n % 2 * 2 + 1) * VS);
            const shared_tile<E> state = memory.state(stage);
#pragma unroll
            for (int k = 0; k < NI / 2; ++k) {
                std::uint32_t p[4];
                load_rows(p, state, k);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int j = 2 * k + i / 2, r = i % 2;
                    rounded_pair<E> x;
                    x.both = p[i];
                    const float a[2] = {acc[0][j][2 * r], acc[0][j][2 * r + 1]};
                    crossing = fmaf(x.first(), a[0], fmaf(x.second(), a[1], crossing));
                    of_ref_value[r] =
                        fmaf(ref_value[j][0], a[0], fmaf(ref_value[j][1], a[1], of_ref_value[r]));
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const bool own = part_v == 0 && wn == 0 && lane % 4 == 0;
                const float of_state = memory.z[stage * FS + row_of(r)];
                crossing = fmaf(of_state, of_ref_value[r] + (own ? z[r] : 0.0f), crossing);
            }
            crossing *= step.keep;
        }
#endif
    }
    /// ref_value: a token's value times its ref_weight.
    __device__ __forceinline__ void get_reference(std::int32_t token, float ref_weight, const E* of,
                                                  float (&ref_value)[NI][2],
                                                  [[maybe_unused]] const float* made) const {
        if constexpr (Hopper) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                const float2 pair = *reinterpret_cast<const float2*>(made + n0 + lane % 4 * 2 + 8 * j);
                ref_value[j][0] = pair.x;
                ref_value[j][1] = pair.y;
            }
            return;
        }
        if (token < 0) {
            return;
        }
        const E* const value = of + n0 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            if constexpr (shared_tile<E>::plain) {
                ref_value[j][0] = ref_weight * value[8 * j];
                ref_value[j][1] = ref_weight * value[8 * j + 1];
            } else {
                rounded_pair<E> both;
                both.both = *reinterpret_cast<const std::uint32_t*>(value + 8 * j);
                ref_value[j][0] = ref_weight * both.first();
                ref_value[j][1] = ref_weight * both.second();
            }
        }
    }

    /// Phase 5: the state before the chunk, rounded, to memory (on Hopper: to `rounded`). Backward: what
    /// rounding loses along the reference.
    __device__ __forceinline__ void store_state(
        [[maybe_unused]] std::int32_t n, [[maybe_unused]] std::int64_t chunk,
        [[maybe_unused]] const mlstm_state_step& step, [[maybe_unused]] int stage,
        [[maybe_unused]] const state_type& acc, [[maybe_unused]] const float (&z)[2],
        [[maybe_unused]] rounded_type& rounded, [[maybe_unused]] float& crossing) const {
        if constexpr (!SegmentStates) {
            [[maybe_unused]] E* const to = (Backward ? params.d_memory : params.memory) + chunk * F * V +
                                           (f0 + m0 + lane / 4) * V + v0 + n0 + lane % 4 * 2;
            float ref_value[NI][2] = {};
            get_reference(step.ref_token, step.ref_weight, memory.ref_token + stage * VS, ref_value,
                          memory.ref_value + n % 2 * (2 * VS));
            [[maybe_unused]] float lost[2] = {};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int j = 0; j < NI; ++j) {
                    float x[2] = {acc[0][j][2 * r], acc[0][j][2 * r + 1]};
                    if constexpr (!Backward) {
                        x[0] -= z[r] * ref_value[j][0];
                        x[1] -= z[r] * ref_value[j][1];
                    }
                    if constexpr (Hopper) {
                        rounded[j / 2][j % 2 * 2 + r] = pack<E>(x[0], x[1]);
                    } else {
                        store_pair(to + 8 * r * V + 8 * j, x[0], x[1]);
                    }
                    if (Backward) {
                        round_pair<E>(x[0], x[1]);
                        lost[r] += (acc[0][j][2 * r] - x[0]) * ref_value[j][0] +
                                   (acc[0][j][2 * r + 1] - x[1]) * ref_value[j][1];
                    }
                }
                if (!Backward && part_v == 0 && wn == 0 && lane % 4 == 0) {
                    params.sums[chunk * F + f0 + row_of(r)] = z[r];
                }
            }
            if constexpr (Backward) {
                store_lost(n, lost, z, crossing);
            }
        }
    }
    __device__ __forceinline__ void store_lost(std::int32_t n, float (&lost)[2], const float (&z)[2],
                                               [[maybe_unused]] float& crossing) const {
#pragma unroll
        for (int by = 1; by < 4; by *= 2) {  // side by side, to overlap the shuffles' latencies
            lost[0] += __shfl_xor_sync(all_lanes, lost[0], by);
            lost[1] += __shfl_xor_sync(all_lanes, lost[1], by);
            if constexpr (Hopper) {
                crossing += __shfl_xor_sync(all_lanes, crossing, by);
            }
        }
        if (lane % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                memory.lost[(n % 2 * WN + wn) * FS + row_of(r)] =
                    lost[r] + (part_v == 0 && wn == 0 ? z[r] : 0.0f);
            }
        }
    }
    __device__ __forceinline__ static void decay_state(const mlstm_state_step& step, state_type& acc) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                acc[0][j][e] *= step.keep;
            }
        }
    }

    /// Phase 6, Hopper: the chunk's outer products, and meanwhile(), work done while the tensor cores
    /// multiply.
    template <class Meanwhile>
    __device__ __forceinline__ void multiply_beside([[maybe_unused]] const mlstm_state_step& step,
                                                    [[maybe_unused]] int stage,
                                                    [[maybe_unused]] state_type& acc,
                                                    [[maybe_unused]] product_type& product,
                                                    [[maybe_unused]] const Meanwhile& meanwhile) const {
#if KVPOLICY_HOPPER_CODE
        // The same twice: where a product may or may not be under way, ptxas waits for each at once.
        if (step.adds != 0) {
            product.start(acc[0], memory.tile(stage), FS);
            meanwhile();
            product.wait(acc[0]);
        } else {
            meanwhile();
        }
#endif
    }
    __device__ __forceinline__ void store_crossing(std::int32_t n, const mlstm_state_step& step,
                                                   float& crossing) const {
        if (step.there != 0) {
#pragma unroll
            for (int by = 4; by < 32; by *= 2) {
                crossing += __shfl_xor_sync(all_lanes, crossing, by);
            }
            if (lane == 0) {
                memory.crossing[n % 2 * (threads / 32) + warp_id()] = crossing;
            }
        }
    }
    /// The state goes by way of shared memory, so that whole lines leave. The store comes after between(): an
    /// instruction that overwrites registers that are being stored waits for the store.
    template <class Between>
    __device__ __forceinline__ void store_rounded_state([[maybe_unused]] std::int64_t chunk,
                                                        [[maybe_unused]] const mlstm_state_step& step,
                                                        [[maybe_unused]] int stage,
                                                        [[maybe_unused]] const rounded_type& rounded,
                                                        [[maybe_unused]] const Between& between) const {
#if KVPOLICY_HOPPER_CODE
        const shared_tile<E> state = memory.state(stage);
        uint4 leaving[4];
        if (step.there != 0) {
            __syncwarp();
#pragma unroll
            for (int k = 0; k < NI / 2; ++k) {
                store_rows_of(state, k, rounded[k]);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // the warp's 16 rows
                leaving[i] = *reinterpret_cast<const uint4*>(state.data + m0 * 128 + (i * 32 + lane) * 16);
            }
        }
        between();
        if (step.there != 0) {
            E* const rows = params.d_memory + chunk * F * V + image_of_part(f0 + m0, v0) + lane * 8;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                *reinterpret_cast<uint4*>(rows + i * 256) = leaving[i];
            }
        }
#endif
    }
    /// Of step n, the warps' parts added up: what rounding lost, and on Hopper the pairs across the chunk.
    __device__ __forceinline__ void write_sums(std::int32_t n, bool there) const {
        if (!there) {
            return;
        }
        if (Backward && !SegmentStates && thread < FS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WN; ++w) {
                sum += memory.lost[(n % 2 * WN + w) * FS + thread];
            }
            params.d_sums[((first_chunk + chunk_at(n)) * params.sum_parts + part_v) * F + f0 + thread] = sum;
        }
        if (Hopper && thread == FS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < threads / 32; ++w) {
                sum += memory.crossing[n % 2 * (threads / 32) + w];
            }
            params.d_across[(first_chunk + chunk_at(n)) * parts + block % parts] = sum;
        }
    }

    /// Phase 7: what the segment adds and keeps, or the caller's state.
    __device__ __forceinline__ void end_state(const state_type& acc, const sums_type& of_sums,
                                              [[maybe_unused]] float segment_decay) const {
        if constexpr (SegmentStates) {
            part.template write_partial<F, V>(params, partial, acc[0], of_sums);
            if (f0 == 0 && v0 == 0 && thread == 0) {
                params.partial_keeps[partial - 1] = segment_decay;
            }
        } else if constexpr (!Backward) {
            if (segment == params.segments - 1) {
                part.end(params, plane, F, acc[0], of_sums);
            }
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
