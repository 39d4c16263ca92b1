// Steps without attention, for an engine that has its own: append in both caches, with given scores. A call
// appends to all layers of a model once and advances, as one graph. With 64 layers at batch 32 the scores,
// positions and records that they look at are together larger than the L2 cache, and the caches take 34 GB;
// with 4 layers they are found in the L2 cache.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_append.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/cuda/prefill/dispatch_prefill.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_inputs.cuh"
#include "cold.cuh"

#include <cstddef>
#include <cstdint>
#include <string>

namespace bench {

namespace appending {

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>>;

inline constexpr std::int32_t heads = 8, group = 4, dim = 128, sinks = 4, window = 256, page_size = 16;

/// Fills the cache by appending, then times appends to full heads of `rows` entries.
template <class Cache>
void time_appends(benchmark::State& state, Cache& cache, const stream_of_calls& calls, std::int32_t batch,
                  std::int32_t rows, bool improving) {
    const kvp::cuda ctx{calls.stream};
    const std::int32_t layers = cache.shape().layers;
    const std::int64_t row = std::int64_t{batch} * heads * dim;
    const Numbers k(row, 2), v(row, 3);
    const buffer<float> scores(std::int64_t{batch} * heads);
    const buffer<std::uint32_t> status(batch);
    const std::size_t needed = cache.append_workspace_bytes(ctx, {.batch = batch});
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(needed));
    const kvp::StepIO<bf16> io{.k = kvp::view_bhsd<const bf16>(k.memory.data(), batch, heads, 1, dim),
                               .v = kvp::view_bhsd<const bf16>(v.memory.data(), batch, heads, 1, dim),
                               .scores = kvp::view_bhs<const float>(scores.data(), batch, heads, 1)};
    ok(cudaMemset(status.data(), 0, static_cast<std::size_t>(batch) * sizeof(std::uint32_t)));
    ok(cudaDeviceSynchronize());
    const auto token = [&] {
        next_scores<<<blocks_of(scores.count()), 256, 0, calls.stream>>>(
            scores.data(), static_cast<std::int32_t>(scores.count()), cache.layer(0).length, improving);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            kvp::append(ctx, cache.layer(layer), io, {workspace.data(), needed}, {.status = status.data()});
        }
        cache.advance(ctx, {batch}, {.status = status.data()});
    };
    token();  // loads the kernels
    ok(cudaStreamSynchronize(calls.stream));
    {
        const captured graph(calls.stream, token);
        for (std::int32_t t = 0; t < rows + 100; ++t) {
            graph();
        }
        ok(cudaStreamSynchronize(calls.stream));
    }
    // Of keys and values: the new token's, and those of a key that is admitted to a slot at most.
    measure_layers(state, calls.stream, layers, 4.0 * batch * heads * 2 * dim * sizeof(bf16), token);
    state.counters["workspace_bytes"] = static_cast<double>(needed);
    std::uint32_t word = 0;
    ok(cudaMemcpy(&word, status.data(), sizeof word, cudaMemcpyDeviceToHost));
    if (word != 0) {
        state.SkipWithError("an append did not run: its status is set");
    }
}

inline kvp::CacheShape shape_of(std::int32_t layers, std::int32_t batch) {
    return {.layers = layers,
            .max_sequences = batch,
            .query_heads = heads * group,
            .kv_heads = heads,
            .head_dim = dim,
            .page_size = page_size};
}
inline Policy policy_of(std::int32_t rows) {
    return Policy{kvp::Sink<>{sinks}, kvp::Window<>{window}, kvp::TopKBudget<>{rows - sinks - window}};
}

inline void contiguous(benchmark::State& state, std::int32_t layers, std::int32_t batch, std::int32_t rows,
                       bool improving) {
    kvp::FixedBudgetCache<Policy, bf16> cache(shape_of(layers, batch), policy_of(rows));
    const stream_of_calls calls;
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total()));
    cache.bind(kvp::cuda{calls.stream}, memory.data(), cache.bytes().total());
    time_appends(state, cache, calls, batch, rows, improving);
}

inline void paged(benchmark::State& state, std::int32_t layers, std::int32_t batch, std::int32_t rows,
                  bool improving) {
    const std::int32_t pages = layers * batch * heads * (rows / page_size + 1);
    kvp::DualCache<Policy, bf16> cache(shape_of(layers, batch), {.slab_pages = pages, .max_seq_len = 1 << 20},
                                       policy_of(rows));
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total())),
        slab(static_cast<std::int64_t>(cache.slab_bytes()));
    cache.bind(ctx, memory.data(), cache.bytes().total());
    cache.add_slab(ctx, slab.data(), cache.slab_bytes());
    time_appends(state, cache, calls, batch, rows, improving);
}

inline void add_rows() {
    constexpr std::int32_t rows = 4096;
    for (const std::int32_t layers : {64, 4}) {
        for (const std::int32_t batch : {1, 8, 32}) {
            for (const bool improving : {false, true}) {
                const std::string name = std::string(improving ? ", always replaced" : "") + "/" +
                                         std::to_string(rows) + " x " + std::to_string(batch) + ", " +
                                         std::to_string(layers) + " layers";
                add("append" + name,
                    [=](benchmark::State& state) { contiguous(state, layers, batch, rows, improving); });
                add("append, pages of 16" + name,
                    [=](benchmark::State& state) { paged(state, layers, batch, rows, improving); });
            }
        }
    }
}

}  // namespace appending

}  // namespace bench
