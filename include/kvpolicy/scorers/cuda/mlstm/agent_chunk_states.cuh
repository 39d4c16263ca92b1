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
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a pass must know of a chunk.
struct alignas(16) mlstm_state_step {
    float keep, add;          // state <- keep * state + add * (the chunk's outer products)
    float ref_weight;         // ref_weight: the share of the reference token in all weights
    std::int32_t ref_token;   // ref_token: its row in the plane; -1: none
    std::int32_t there;       // the chunk has tokens
    std::int32_t adds;        // the chunk adds to the state
    std::int32_t fresh;       // the chunk is the first of a sequence
    std::int32_t before;      // backward: the reference token before the chunk
    float ref_weight_before;  // backward: its ref_weight
};

/// Threads of a block. On Hopper a block is one warpgroup, and its products are wgmma.
template <bool Hopper>
inline constexpr int mlstm_chunk_states_threads = Hopper ? 128 : 256;

/// Shared memory of a block: a ring of the rows that chunks add and, on Hopper, of the states before them.
template <class E, int FS, int VS, bool Hopper>
struct mlstm_chunk_states_memory {
    // Five stages fit into the 99 KB that every GPU gives a block, for float rows as well.
    static constexpr int stages = Hopper ? 4 : 5, batch = 64;
    static constexpr int columns = (FS + VS + 63) / 64 * 64;
    static constexpr int down = FS / 16,
                         across = mlstm_chunk_states_threads<Hopper> / 32 /
                                  down;  // warps over features, over values

    // Hopper, per stage: the state before the chunk, then the backward state on its way to memory.
    unsigned char* states;
    unsigned char* tiles;     // per stage: k~ or q~, FS columns, then v~ or d N, VS columns
    float* scale;             // [stages][64]
    float* ratio;             // [stages][64]
    E* split;                 // [2][2][64]: a ratio as a rounded number and the rest
    E* ref_token;             // [stages][VS]: value of the reference token
    E* before;                // [stages][VS], Hopper: value of the reference token before the chunk
    float* ref_value;         // [2][2][VS], Hopper: ref_value after and before the chunk
    float* z;                 // [stages][FS], Hopper
    float* crossing;          // [2][warps]
    float* lost;              // [2][across][FS]
    mlstm_state_step* steps;  // [2][batch]
    std::size_t bytes;

    KVPOLICY_HOST_DEVICE explicit mlstm_chunk_states_memory(unsigned char* memory) {
        shared_parts parts(memory);
        states = parts.tile<E>(FS, Hopper ? stages * VS : 0).data;
        tiles = parts.tile<E>(scorer_chunk, stages * columns).data;
        scale = parts.take<float>(stages * scorer_chunk);
        ratio = parts.take<float>(stages * scorer_chunk);
        split = parts.take<E>(2 * 2 * scorer_chunk);
        ref_token = parts.take<E>(stages * VS);
        before = parts.take<E>(Hopper ? stages * VS : 0);
        ref_value = parts.take<float>(Hopper ? 2 * 2 * VS : 0);
        z = parts.take<float>(Hopper ? stages * FS : 0);
        crossing = parts.take<float>(2 * (mlstm_chunk_states_threads<Hopper> / 32));
        lost = parts.take<float>(2 * across * FS);
        steps = parts.take<mlstm_state_step>(2 * batch);
        bytes = parts.bytes();
    }
    [[nodiscard]] __device__ shared_tile<E> tile(int stage) const {
        return {tiles + shared_tile<E>::bytes(scorer_chunk, columns) * stage, scorer_chunk};
    }
    [[nodiscard]] __device__ shared_tile<E> state(int stage) const {
        return {states + shared_tile<E>::bytes(FS, VS) * stage, FS};
    }
};

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
struct chunk_states_agent {
    // Other Hopper cases: kernel_fused_states_outputs_hopper.cuh, kernel_segment_states_hopper.cuh.
    static_assert(!Hopper || (Backward && !SegmentStates));
    using E = mlstm_element<T>;
    using memory_type = mlstm_chunk_states_memory<E, FS, VS, Hopper>;
    static constexpr int threads = mlstm_chunk_states_threads<Hopper>;
    static constexpr int stages = memory_type::stages, batch = memory_type::batch;
    static constexpr int WM = memory_type::down, WN = memory_type::across;
    static constexpr int NI = VS / 8 / WN, parts = F / FS * (V / VS);
    static constexpr int direction = Backward ? -scorer_chunk : scorer_chunk;

    // Arrays in registers are objects of their own, which run() has: in one object with the members below
    // they would keep all of it in memory until ptxas sees it.
    using state_type = float[1][NI][4];
    using sums_type = float[4];  // every warp has the sums of its features
    using rounded_type = std::uint32_t[Hopper ? NI / 2 : 1][4];
#if KVPOLICY_HOPPER_CODE
    /// Hopper: the left side of a step's product, made while the step before is multiplied.
    using product_type = mlstm_outer_product<E>;
#else
    struct product_type {};
#endif

    const mlstm_params<T>& params;
    const memory_type memory;
    const std::int32_t block;
    // The last segment adds to no other: Ends leaves it out.
    const std::int32_t num_segments, plane, segment, chunks, begun, count;
    const int f0, part_v, v0, thread, lane, m0, wn, n0;
    const std::int64_t first_chunk, first_row;
    // Where the rows of the next step to load are; prefetch takes the steps in order.
    const E *next_a, *next_b;
    const float *next_scale, *next_ratio;
    const E* const values;
    // Hopper: where the block's part of a state begins in the image of all of it (mlstm_params::memory).
    const E* const state_of_part;
    const float* const sums_of_part;
    const mlstm_state_part part;
    const std::int64_t partial;  // number of what the segment begins with in partial_states, plus 1

    __device__ __forceinline__ explicit chunk_states_agent(const mlstm_params<T>& of)
        : params(of),
          memory(aligned_dynamic_shared()),
          block(static_cast<std::int32_t>(blockIdx.x)),
          num_segments(SegmentStates ? of.segments - 1 : of.segments),
          plane(block / parts / num_segments),
          segment(block / parts % num_segments),
          chunks(of.streams.chunks),
          begun(segment * of.segment_chunks),
          count(min(of.segment_chunks, chunks - begun)),
          f0(block % parts / (V / VS) * FS),
          part_v(block % (V / VS)),
          v0(part_v * VS),
          thread(static_cast<int>(threadIdx.x)),
          lane(lane_id()),
          m0(warp_id() % WM * 16),
          wn(warp_id() / WM),
          n0(wn * (VS / WN)),
          first_chunk(std::int64_t{plane} * chunks),
          first_row(first_chunk * scorer_chunk),
          values(of.v + first_row * V + v0),
          state_of_part(of.memory + first_chunk * F * V + image_of_part(f0, v0)),
          sums_of_part(of.sums + first_chunk * F + f0),
          part{f0 + m0, v0 + n0, part_v == 0 && wn == 0},
          partial(std::int64_t{plane} * of.segments + segment + 1) {
        const std::int64_t from = first_row + std::int64_t{chunk_at(0)} * scorer_chunk;
        next_a = (Backward ? of.q : of.k) + from * F + f0;
        next_b = (Backward ? of.d_n : of.v) + from * V + v0;
        next_scale = (Backward ? of.state_decay : of.weight) + from;
        next_ratio = Backward ? of.d_g + from : nullptr;
    }

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
    __device__ __forceinline__ static constexpr int image_of_part(int f, int v) {
        return v / 64 * (F * 64) + f * 64;
    }
    __device__ __forceinline__ std::int32_t chunk_at(std::int32_t n) const {
        return Backward ? chunks - 1 - begun - n : begun + n;
    }
    __device__ __forceinline__ mlstm_state_step step_of(std::int32_t n) const {
        return memory.steps[n % (2 * batch)];
    }
    __device__ __forceinline__ int row_of(int r) const { return m0 + lane / 4 + 8 * r; }
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

    /// Phase 1: steps of the first chunks, then the rows of the first stages.
    __device__ __forceinline__ void fill_ring() {
        load_steps(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < stages - 1; ++n) {
            prefetch(n, step_of(n), n);
        }
    }
    __device__ __forceinline__ void load_steps(std::int32_t base) const {
        if (thread < batch) {
            mlstm_state_step step{};
            step.ref_token = -1;
            step.before = -1;
            if (base + thread < count) {
                const std::int32_t chunk_index = chunk_at(base + thread);
                const mlstm_chunk_stats& stats = params.chunk_stats[first_chunk + chunk_index];
                step.there = stats.count > 0 ? 1 : 0;
                step.adds = step.there != 0 && (!Backward || stats.first_output < scorer_chunk) ? 1 : 0;
                step.fresh = stats.fresh;
                step.keep = stats.keep;
                step.add = Backward ? 1.0f : stats.add;
                if (!Backward) {
                    step.ref_token = stats.before;
                    step.ref_weight = stats.ref_weight;
                } else if (chunk_index + 1 <
                           chunks) {  // the reference after the chunk; a sequence's end needs none
                    step.ref_token = params.chunk_stats[first_chunk + chunk_index + 1].before;
                    step.ref_weight = params.chunk_stats[first_chunk + chunk_index + 1].ref_weight;
                }
                step.before = Hopper && step.there != 0 ? stats.before : -1;
                step.ref_weight_before = step.before >= 0 ? stats.ref_weight : 0.0f;
            }
            memory.steps[base % (2 * batch) + thread] = step;
        }
    }
    __device__ __forceinline__ void prefetch(std::int32_t n, const mlstm_state_step& step, int stage) {
        if (n < count) {
            if (step.adds != 0) {
                const shared_tile<E> tile = memory.tile(stage);
                copy_slice<scorer_chunk, FS, threads>(tile, 0, next_a, F);
                copy_slice<scorer_chunk, VS, threads>(tile, FS, next_b, V);
                copy_line(memory.scale + stage * scorer_chunk, next_scale, scorer_chunk, 0);
                if (Backward) {
                    copy_line(memory.ratio + stage * scorer_chunk, next_ratio, scorer_chunk, 32);
                }
            }
            if (!SegmentStates && step.ref_token >= 0) {
                copy_line(memory.ref_token + stage * VS, values + std::int64_t{step.ref_token} * V, VS, 64);
            }
            if (Hopper && step.there != 0) {
                const std::int64_t chunk_index = chunk_at(n);
                copy_image<FS * VS, threads>(memory.state(stage), state_of_part + chunk_index * (F * V));
                copy_line(memory.z + stage * FS, sums_of_part + chunk_index * F, FS, 112);
                if (step.before >= 0) {
                    copy_line(memory.before + stage * VS, values + std::int64_t{step.before} * V, VS, 96);
                }
            }
            next_a += direction * F;
            next_b += direction * V;
            next_scale += direction;
            next_ratio += Backward ? direction : 0;
        }
        copy_commit();
    }
    /// Multiplies the rows of step n by their scales (on Hopper: on the way to the product), and splits its
    /// ratios.
    __device__ __forceinline__ void scale_stage(std::int32_t n, const mlstm_state_step& step,
                                                int stage) const {
        if constexpr (Hopper) {  // ref_value of both references as well
            static_assert(threads == 2 * VS && !shared_tile<E>::plain);
            if (thread < VS) {
                memory.ref_value[n % 2 * (2 * VS) + thread] =
                    step.ref_token >= 0
                        ? step.ref_weight * static_cast<float>(memory.ref_token[stage * VS + thread])
                        : 0.0f;
            } else {
                memory.ref_value[n % 2 * (2 * VS) + thread] =
                    step.before >= 0
                        ? step.ref_weight_before * static_cast<float>(memory.before[stage * VS + thread - VS])
                        : 0.0f;
            }
        }
        if (step.adds == 0) {
            return;
        }
        const shared_tile<E> tile = memory.tile(stage);
        if constexpr (!Hopper) {
#pragma unroll
            for (int i = thread; i < scorer_chunk * FS / 8; i += threads) {
                const int r = i / (FS / 8), c = i % (FS / 8) * 8;
                const float by = memory.scale[stage * scorer_chunk + r] * step.add;
                float x[8];
                tile.get_eight(r, c, x);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] *= by;
                }
                tile.set_eight(r, c, x);
            }
        }
        if (Backward && thread < scorer_chunk) {
            const float ratio = memory.ratio[stage * scorer_chunk + thread];
            E* const split = memory.split + n % 2 * 2 * scorer_chunk + thread;
            split[0] = static_cast<E>(ratio);
            split[scorer_chunk] = static_cast<E>(ratio - static_cast<float>(split[0]));
        }
    }
    __device__ __forceinline__ void load_following([[maybe_unused]] product_type& following,
                                                   [[maybe_unused]] const mlstm_state_step& step,
                                                   [[maybe_unused]] int stage) const {
#if KVPOLICY_HOPPER_CODE
        if constexpr (Hopper) {
            if (step.adds != 0) {
                following.load(memory.tile(stage), memory.scale + stage * scorer_chunk, step.add);
            }
        }
#endif
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
