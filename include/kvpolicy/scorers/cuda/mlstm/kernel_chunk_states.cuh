// An mLSTM's states between chunks, forwards (C, z) and backwards (A, a): scans over the chunks, each block with a part of a state's features
// and values in registers.
//
// A scan over chunks takes one chunk after another, and with few planes the GPU waits for it. So a plane's chunks are cut into segments that are scanned
// at once: first each from nothing, for what it adds to a state and how much of one it keeps, then each from what those before it add up
// to. That is the same sum in another order, in fp32.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_state.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_mlstm_warpgroup.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A chunk's part in a scan over chunks.
struct alignas(16) mlstm_state_step {
    float keep, add;
    float ref_weight;        // of the reference
    std::int32_t ref_token;  // its row of the plane; -1: none
    std::int32_t there;      // the chunk has tokens
    std::int32_t adds;       // and adds to the state
    std::int32_t fresh;      // a stream's first
    std::int32_t before;     // backwards: the reference before the chunk
    float ref_weight_before;
};

/// Threads of a scan over chunks: on Hopper one warpgroup, whose products are wgmma's.
template <bool Hopper>
inline constexpr int mlstm_chunk_states_threads = Hopper ? 128 : 256;

/// Shared memory of mlstm_chunk_states_kernel: a ring of what chunks add; on Hopper and of the states before them.
template <class E, int FS, int VS, bool Hopper>
struct mlstm_chunk_states_memory {
    // Five stages fit into the 99 KB that every GPU gives a block, of float rows too.
    static constexpr int stages = Hopper ? 4 : 5, batch = 64;
    static constexpr int columns = (FS + VS + 63) / 64 * 64;
    static constexpr int down = FS / 16,
                         across = mlstm_chunk_states_threads<Hopper> / 32 /
                                  down;  // warps over features, over values

    // Hopper, of each stage: the state before the chunk, then the one that runs backwards on its way out.
    unsigned char* states;
    unsigned char* tiles;     // of each stage: k~ or q~, FS columns, then v~ or d N, VS columns
    float* scale;             // [stages][64]
    float* ratio;             // [stages][64]
    E* split;                 // [2][2][64]: a ratio rounded, and what rounding takes away
    E* ref_token;             // [stages][VS]
    E* before;                // [stages][VS], Hopper
    float* ref_value;         // [2][2][VS], Hopper: references of a step, after and before the chunk
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

/// States before each chunk, or backwards those after it. A block has FS features and VS values of a plane's state in registers, a
/// warp 16 features (on Hopper four warps, else eight), and scans the plane's chunks:
///
///     state <- keep state + sum_r scale_r a_r b_r^T,   sums <- keep sums + sum_r scale_r ratio_r a_r
///
/// Forwards a is k~, b v~, scale the tokens' weights; backwards a is q~, b d N, scale exp(m - M_l), ratio d g_l (forwards 1). Chunks without
/// reads add nothing backwards. Continued sequences take up and leave the caller's states, features (width + 1) + 2 numbers in the
/// features' own order. A block scans one segment; Ends: from nothing, and leaves only what the segment adds and keeps.
///
/// Backwards, on Hopper, a scan over chunks also has the sum of pairs across each chunk: keep times the products of the numbers of the state before the chunk
/// and of its own, added up, which a forget gate's gradient needs.
template <class T, int F, int V, int FS, int VS, bool Backward, bool SegmentStates, bool Hopper>
__device__ inline void compute_chunk_states(const mlstm_params<T>& params) {
    using E = mlstm_element<T>;
    static_assert(
        !Hopper ||
        (Backward &&
         !SegmentStates));  // others: kernel_fused_states_outputs_hopper.cuh, kernel_segment_states_hopper.cuh
    using memory_type = mlstm_chunk_states_memory<E, FS, VS, Hopper>;
    constexpr int threads = mlstm_chunk_states_threads<Hopper>;
    constexpr int stages = memory_type::stages, batch = memory_type::batch;
    constexpr int WM = memory_type::down, WN = memory_type::across;
    constexpr int NI = VS / 8 / WN, parts = F / FS * (V / VS);
    const scorer_streams& streams = params.streams;
    const memory_type memory(aligned_dynamic_shared());
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    // The last segment adds to nobody.
    const std::int32_t num_segments = SegmentStates ? params.segments - 1 : params.segments;
    const std::int32_t plane = block / parts / num_segments, segment = block / parts % num_segments;
    const std::int32_t chunks = streams.chunks, begun = segment * params.segment_chunks;
    const std::int32_t count = min(params.segment_chunks, chunks - begun);
    const int f0 = block % parts / (V / VS) * FS, part_v = block % (V / VS), v0 = part_v * VS;
    const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
    const int m0 = warp_id() % WM * 16, wn = warp_id() / WM, n0 = wn * (VS / WN);
    const std::int64_t first_chunk = std::int64_t{plane} * chunks, first_row = first_chunk * scorer_chunk;
    const auto chunk_at = [&](std::int32_t n) { return Backward ? chunks - 1 - begun - n : begun + n; };

    const auto load_steps = [&](std::int32_t base) {
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
                           chunks) {  // the reference after the chunk; streams that end need none
                    step.ref_token = params.chunk_stats[first_chunk + chunk_index + 1].before;
                    step.ref_weight = params.chunk_stats[first_chunk + chunk_index + 1].ref_weight;
                }
                step.before = Hopper && step.there != 0 ? stats.before : -1;
                step.ref_weight_before = step.before >= 0 ? stats.ref_weight : 0.0f;
            }
            memory.steps[base % (2 * batch) + thread] = step;
        }
    };
    // Where step n's numbers stand; prefetch goes through the steps in order.
    const std::int64_t from = first_row + std::int64_t{chunk_at(0)} * scorer_chunk;
    constexpr int direction = Backward ? -scorer_chunk : scorer_chunk;
    const E* next_a = (Backward ? params.q : params.k) + from * F + f0;
    const E* next_b = (Backward ? params.d_n : params.v) + from * V + v0;
    const float* next_scale = (Backward ? params.kept : params.weight) + from;
    const float* next_ratio = Backward ? params.d_g + from : nullptr;
    const E* const values = params.v + first_row * V + v0;
    // Where on Hopper the block's part of a state begins, in the image of all of it (mlstm_params::memory).
    constexpr auto image_of_part = [](int f, int v) { return v / 64 * (F * 64) + f * 64; };
    const E* const state_before = params.memory + first_chunk * F * V + image_of_part(f0, v0);
    const float* const sums_before = params.sums + first_chunk * F + f0;
    const auto step_of = [&](std::int32_t n) { return memory.steps[n % (2 * batch)]; };
    const auto prefetch = [&](std::int32_t n, const mlstm_state_step& step, int stage) {
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
                copy_image<FS * VS, threads>(memory.state(stage), state_before + chunk_index * (F * V));
                copy_line(memory.z + stage * FS, sums_before + chunk_index * F, FS, 112);
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
    };
    load_steps(0);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < stages - 1; ++n) {
        prefetch(n, step_of(n), n);
    }
    // Multiplies what came for step n by its scales, which on Hopper is done on the way to the product.
    const auto scale_stage = [&](std::int32_t n, const mlstm_state_step& step, int stage) {
        if constexpr (Hopper) {  // a reference's numbers, too
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
    };
    float acc[1][NI][4], of_sums[4];  // every warp has the sums of its features
    const auto clear_all = [&] {
        clear(acc);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            of_sums[e] = 0.0f;
        }
    };
    clear_all();
    const mlstm_state_part part{f0 + m0, v0 + n0, part_v == 0 && wn == 0};
    const std::int64_t partial = std::int64_t{plane} * params.segments + segment + 1;
    float kept = 1.0f;
    if constexpr (SegmentStates) {
        if (!Backward && segment == 0 && part.takes_state(params, plane)) {
            const float* const state = part.state_of(params, plane);
            part.take(params, F, state, state + std::int64_t{params.features} * params.width, acc[0],
                      of_sums);
            part.template write_partial<F, V>(params, partial - 1, acc[0], of_sums);
            clear_all();
        }
    } else {
        part.template begin<F, V>(params, plane, segment, Backward, acc[0], of_sums);
    }
    const auto row_of = [&](int r) { return m0 + lane / 4 + 8 * r; };
    // Numbers of a reference: a token's value, times its share.
    const auto get_reference = [&](std::int32_t token, float ref_weight, const E* of,
                                   float(&ref_value)[NI][2], [[maybe_unused]] const float* made) {
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
    };
    // What rounding takes from the state before step n, along the reference: the warps' parts.
    const auto write_sums = [&](std::int32_t n, bool there) {
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
    };
    const auto wait_for_others = [] {
        if constexpr (Hopper) {
            fence_async_proxy();
        }
        __syncthreads();
    };
    // On Hopper the left side of step n's product, made while the one before was under way.
#if KVPOLICY_HOPPER_CODE
    mlstm_outer_product<E> product, following;
#endif
    const auto load_following = [&]([[maybe_unused]] const mlstm_state_step& step,
                                    [[maybe_unused]] int stage) {
#if KVPOLICY_HOPPER_CODE
        if constexpr (Hopper) {
            if (step.adds != 0) {
                following.load(memory.tile(stage), memory.scale + stage * scorer_chunk, step.add);
            }
        }
#endif
    };
    copy_wait<stages - 2>();
    wait_for_others();
    mlstm_state_step next_step = step_of(0);
    bool there_before = false;  // of step n - 1
    scale_stage(0, next_step, 0);
    load_following(next_step, 0);
    int stage = 0;  // n % stages
    for (std::int32_t n = 0; n < count; ++n) {
        copy_wait<stages - 3>();  // step n + 1 is there
        wait_for_others();
        const int after = stage + 1 == stages ? 0 : stage + 1;
        // Steps beyond the last have nothing to add.
        const mlstm_state_step step = next_step, ahead = step_of(n + stages - 1);
        next_step = step_of(n + 1);
        const auto prefetch_one = [&] {
            prefetch(n + stages - 1, ahead, stage == 0 ? stages - 1 : stage - 1);
        };
        if constexpr (!Hopper) {
            prefetch_one();
        }
        const std::int64_t chunk = first_chunk + chunk_at(n);
        [[maybe_unused]] E* const to = (Backward ? params.d_memory : params.memory) + chunk * F * V +
                                       (f0 + m0 + lane / 4) * V + v0 + n0 + lane % 4 * 2;
        const E* const split = Backward ? memory.split + n % 2 * 2 * scorer_chunk : nullptr;
        [[maybe_unused]] std::uint32_t rounded[Hopper ? NI / 2 : 1][4];
        [[maybe_unused]] float crossing = 0.0f;
        [[maybe_unused]] const shared_tile<E> state = memory.state(stage);
        if (step.there != 0) {
            // Streams begin without a state, and nothing goes back beyond their first token.
            if (!Backward && step.fresh != 0) {
                asm volatile("" ::: "memory");  // a branch: no selection of every number in every step
                clear_all();
            }
            float z[2];  // the sums of the thread's features, before the chunk
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                z[r] = __shfl_sync(all_lanes, of_sums[2 * r] + of_sums[2 * r + 1], lane & ~3);
            }
#pragma unroll
            for (float& sum : of_sums) {
                sum *= step.keep;
            }
#if KVPOLICY_HOPPER_CODE
            if constexpr (Hopper) {
                product = following;
                if (step.adds != 0) {
                    product.add_sums(of_sums, split);
                }
                // Pairs of tokens before the chunk with outputs after it: the sum of products of both states' numbers.
                float ref_value[NI][2] = {}, of_ref_value[2] = {};
                get_reference(step.before, step.ref_weight_before, memory.before + stage * VS, ref_value,
                              memory.ref_value + (n % 2 * 2 + 1) * VS);
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
            if constexpr (!SegmentStates) {
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
#pragma unroll
                    for (int by = 1; by < 4; by *= 2) {  // side by side, since a shuffle takes its time
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
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
                for (int j = 0; j < NI; ++j) {
                    acc[0][j][e] *= step.keep;
                }
            }
        }
        if constexpr (Hopper) {
#if KVPOLICY_HOPPER_CODE
            const auto meanwhile = [&] {
                if (step.there != 0) {
#pragma unroll
                    for (int by = 4; by < 32; by *= 2) {
                        crossing += __shfl_xor_sync(all_lanes, crossing, by);
                    }
                    if (lane == 0) {
                        memory.crossing[n % 2 * (threads / 32) + warp_id()] = crossing;
                    }
                }
                // The state by way of shared memory, so that whole lines leave. It leaves last of all: whoever takes
                // registers that are being stored waits for them.
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
                        leaving[i] =
                            *reinterpret_cast<const uint4*>(state.data + m0 * 128 + (i * 32 + lane) * 16);
                    }
                }
                write_sums(n - 1, there_before);
                prefetch_one();
                load_following(next_step, after);
                scale_stage(n + 1, next_step, after);
                if (step.there != 0) {
                    E* const rows = params.d_memory + chunk * F * V + image_of_part(f0 + m0, v0) + lane * 8;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        *reinterpret_cast<uint4*>(rows + i * 256) = leaving[i];
                    }
                }
            };
            // The same twice: where a product may or may not be under way, ptxas waits for each at once.
            if (step.adds != 0) {
                product.start(acc[0], memory.tile(stage), FS);
                meanwhile();
                product.wait(acc[0]);
            } else {
                meanwhile();
            }
#endif
        } else {
            write_sums(n - 1, there_before);
            if (step.adds != 0) {
                add_outer<NI>(acc[0], of_sums, memory.tile(stage), m0, FS + n0, split);
            }
            scale_stage(n + 1, next_step, after);
        }
        there_before = step.there != 0;
        if (step.there != 0) {
            if (Backward && step.fresh != 0) {
                asm volatile("" ::: "memory");
                clear_all();
            }
            kept = step.fresh != 0 || kept < 0.0f ? -1.0f : kept * step.keep;
        }
        stage = after;
        if (n % batch == 1) {  // nobody looks at the batch before any more
            load_steps(n - 1 + batch);
        }
    }
    __syncthreads();
    write_sums(count - 1, there_before);
    if constexpr (SegmentStates) {
        part.template write_partial<F, V>(params, partial, acc[0], of_sums);
        if (f0 == 0 && v0 == 0 && thread == 0) {
            params.partial_keeps[partial - 1] = kept;
        }
    } else if constexpr (!Backward) {
        if (segment == params.segments - 1) {
            part.end(params, plane, F, acc[0], of_sums);
        }
    }
}

template <class T, int F, int V, int FS, int VS, bool Backward, bool SegmentStates>
__global__ void __launch_bounds__(mlstm_chunk_states_threads<false>)
    mlstm_chunk_states_kernel(const mlstm_params<T> params) {
    compute_chunk_states<T, F, V, FS, VS, Backward, SegmentStates, false>(params);
}
/// The backward scan over chunks by wgmma, for parts of 64 features and values.
template <class T, int F, int V>
__global__ void __launch_bounds__(KVPOLICY_HOPPER_THREADS(mlstm_chunk_states_threads<true>), 2)
    mlstm_chunk_states_hopper_kernel([[maybe_unused]] const mlstm_params<T> params) {
#if KVPOLICY_HOPPER_CODE
    compute_chunk_states<T, F, V, 64, 64, true, false, true>(params);
#endif
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
