// Inputs of the benchmarks of caches: tensors and scorers with numbers at random.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include "cold.cuh"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace bench {

static __global__ void fill_rows(kvpolicy::bf16* to, std::int64_t count, std::uint32_t seed) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = kvpolicy::bf16(0.433f * hashed(static_cast<std::uint32_t>(i) + seed));
    }
}

static __global__ void fill_weights(float* to, std::int64_t count, float scale, std::uint32_t seed) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = scale * hashed(static_cast<std::uint32_t>(i) + seed);
    }
}

inline unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

/// A tensor of variance 1.
struct Numbers {
    buffer<kvpolicy::bf16> memory;
    Numbers(std::int64_t count, std::uint32_t seed) : memory(count) {
        fill_rows<<<blocks_of(count), 256>>>(memory.data(), count, seed);
        ok(cudaGetLastError());
    }
};

/// The next token's scores: even in [-4, 4), or always better than all before. Part of the graph,
/// before the layers.
static __global__ void next_scores(float* to, std::int32_t count, const kvpolicy::position_t* length,
                                   bool improving) {
    const auto i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        const auto t = static_cast<std::uint32_t>(length[0]);
        to[i] = improving ? static_cast<float>(t) : hashed(t * 8191u + static_cast<std::uint32_t>(i));
    }
}

/// Times `token`, which goes through all layers, as a graph: median_us is the time of one layer, which moves
/// `bytes` bytes at least.
template <class Token>
void measure_layers(benchmark::State& state, cudaStream_t stream, std::int32_t layers, double bytes,
                    const Token& token) {
    token();  // loads the kernels
    ok(cudaStreamSynchronize(stream));
    if (std::getenv("KVPOLICY_BENCH_PROFILE") != nullptr) {
        for (auto _ : state) {
            state.SetIterationTime(1e-9);
        }
        return;
    }
    const captured graph(stream, token);
    for (std::int32_t t = 0; t < 10; ++t) {
        graph();
    }
    ok(cudaStreamSynchronize(stream));
    const stopwatch watch(stream);
    std::vector<double> times;
    for (auto _ : state) {
        times.push_back(watch.time(graph) / layers);
        state.SetIterationTime(times.back() * 1e-3);
    }
    const double median = median_of(times);
    state.counters["median_ms"] = median;
    state.counters["median_us"] = 1e3 * median;
    state.counters["layers"] = layers;
    state.counters["kv_bytes"] = bytes;
    state.counters["gb_per_s"] = bytes / median * 1e-6;
}

/// A scorer with weights at random, which live as long as the program.
template <class S>
S scorer_of(std::int32_t heads, std::int32_t dim) {
    S scorer{};
    scorer.heads = heads;
    scorer.head_dim_qk = scorer.head_dim_vo = dim;
    if constexpr (requires { scorer.hidden; }) {
        scorer.hidden = 128;
    }
    if constexpr (requires { scorer.input.rope; }) {
        scorer.input.rope = {kvpolicy::rope_layout::half_split, 500000.0f};
    }
    if constexpr (requires { scorer.input.width; }) {
        scorer.input.width = 4096;
    }
    typename S::template parameters<float> weights{};
    std::uint32_t seed = 100;
    kvpolicy::for_each_parameter(
        scorer, weights, [&](const char*, float*& array, std::size_t count, bool optional) {
            if (count == 0 || optional) {
                return;
            }
            const auto numbers = static_cast<std::int64_t>(count);
            array = device<float>(numbers);
            fill_weights<<<blocks_of(numbers), 256>>>(array, numbers, 0.05f, seed += 1000);
            ok(cudaGetLastError());
        });
    ok(cudaDeviceSynchronize());
    if constexpr (S::when == kvpolicy::score_time::on_leaving) {
        scorer.weights.w_q = weights.w_q;
        scorer.weights.w_k = weights.w_k;
        scorer.weights.w_v = weights.w_v;
        scorer.weights.w_i = weights.w_i;
        scorer.weights.w_f = weights.w_f;
        scorer.weights.readout = weights.readout;
    } else if constexpr (requires { scorer.weights.w1; }) {
        scorer.weights.w1 = weights.w1;
        scorer.weights.w2 = weights.w2;
    } else {
        scorer.weights.weight = weights.weight;
    }
    return scorer;
}

}  // namespace bench
