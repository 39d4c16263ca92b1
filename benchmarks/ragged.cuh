// Decode steps of one layer at 128k tokens, batch 16: a DualCache whose heads keep from 2% to 90% of the
// keys, a quarter on average, beside dense decode. Both are steps of this library, everything included; the
// layer is many times the L2 cache. "4k to 128k": the sequences of a batch have those lengths.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cold.cuh"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace bench {

namespace ragged {

namespace kvp = kvpolicy;
using kvp::bf16;
using Dims = kvp::head_dims<128>;

inline constexpr std::int32_t heads = 8, group = 4, dim = 128, sinks = 4, window = 256;

/// A layer's size: sequences of `length` tokens, or of `shortest` to `length`, each longer than the one
/// before by the same factor.
struct Size {
    std::int32_t batch = 16;
    kvp::position_t length = 131072, shortest = length;
    [[nodiscard]] kvp::position_t length_of(std::int32_t seq) const {
        const double share = batch == 1 ? 1.0 : static_cast<double>(seq) / (batch - 1);
        return static_cast<kvp::position_t>(
            std::lround(shortest * std::pow(static_cast<double>(length) / shortest, share)));
    }
    [[nodiscard]] std::vector<kvp::position_t> lengths() const {
        std::vector<kvp::position_t> all;
        for (std::int32_t seq = 0; seq < batch; ++seq) {
            all.push_back(length_of(seq));
        }
        return all;
    }
};
inline constexpr std::int32_t tokens_to_come = 200;

static __global__ void fill_numbers(bf16* to, std::int64_t count) {
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        to[i] = bf16(0.433f * hashed(static_cast<std::uint32_t>(i)));
    }
}
static __global__ void fill_scores(float* to, std::int64_t count) {
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        to[i] = hashed(static_cast<std::uint32_t>(i) + 99u);
    }
}
/// The next token's scores, even in [-4, 4). Part of the graph.
static __global__ void next_scores(float* to, std::int32_t count, const kvp::position_t* at) {
    const auto i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        to[i] = hashed(static_cast<std::uint32_t>(at[0]) * 8191u + static_cast<std::uint32_t>(i));
    }
}
inline void fill(bf16* to, std::int64_t count) {
    fill_numbers<<<4096, 256>>>(to, count);
    ok(cudaGetLastError());
}

/// A call's tensors.
struct Tensors {
    std::int32_t batch;
    std::int64_t row = std::int64_t{batch} * heads * dim;
    buffer<bf16> q{row * group}, k{row}, v{row}, out{row * group};
    buffer<float> scores{std::int64_t{batch} * heads};
    explicit Tensors(std::int32_t entries) : batch(entries) {
        fill(q.data(), q.count());
        fill(k.data(), k.count());
        fill(v.data(), v.count());
    }
    [[nodiscard]] kvp::StepIO<bf16> io() const {
        return {.q = kvp::view_bhsd<const bf16>(q.data(), batch, heads * group, 1, dim),
                .k = kvp::view_bhsd<const bf16>(k.data(), batch, heads, 1, dim),
                .v = kvp::view_bhsd<const bf16>(v.data(), batch, heads, 1, dim),
                .out = kvp::view_bhsd(out.data(), batch, heads * group, 1, dim),
                .scores = kvp::view_bhs<const float>(scores.data(), batch, heads, 1)};
    }
};

/// Times graphs of a step and what belongs to it.
template <class Cache>
void time_steps(benchmark::State& state, Cache& cache, const stream_of_calls& calls, const Tensors& in,
                double bytes) {
    const kvp::cuda ctx{calls.stream};
    const std::int32_t batch = in.batch;
    const auto ref = cache.layer(0);
    const std::size_t needed = kvp::step_workspace_bytes<Dims>(ctx, ref, batch);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(needed));
    const buffer<std::uint32_t> status(batch);
    ok(cudaMemset(status.data(), 0, static_cast<std::size_t>(batch) * sizeof(std::uint32_t)));
    ok(cudaDeviceSynchronize());
    const auto token = [&] {
        next_scores<<<1, static_cast<unsigned>(batch * heads), 0, calls.stream>>>(in.scores.data(),
                                                                                  batch * heads, ref.length);
        kvp::step<Dims>(ctx, ref, in.io(), {workspace.data(), needed}, {.status = status.data()});
        cache.advance(ctx, {batch}, {.status = status.data()});
    };
    token();  // loads the kernels
    ok(cudaStreamSynchronize(calls.stream));
    const captured graph(calls.stream, token);
    for (std::int32_t t = 0; t < 3; ++t) {
        graph();
    }
    const stopwatch watch(calls.stream);
    std::vector<double> times;
    for (auto _ : state) {
        times.push_back(watch.time(graph));
        state.SetIterationTime(times.back() * 1e-3);
    }
    std::vector<std::uint32_t> words(static_cast<std::size_t>(batch));
    ok(cudaMemcpy(words.data(), status.data(), static_cast<std::size_t>(batch) * sizeof(std::uint32_t),
                  cudaMemcpyDeviceToHost));
    if (std::any_of(words.begin(), words.end(), [](std::uint32_t word) { return word != 0; })) {
        state.SkipWithError("a step did not run: its status is set");
    }
    const double median = median_of(times);
    state.counters["median_ms"] = median;
    state.counters["kv_bytes"] = bytes;
    state.counters["gb_per_s"] = bytes / median * 1e-6;
    state.counters["workspace_bytes"] = static_cast<double>(needed);
}

template <class T>
std::unique_ptr<buffer<T>> on_device(const std::vector<T>& numbers) {
    auto memory = std::make_unique<buffer<T>>(static_cast<std::int64_t>(numbers.size()));
    ok(cudaMemcpy(memory->data(), numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

using Gated = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::ThresholdGate<kvp::at_least>>;
using Selecting =
    kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::ThresholdGate<kvp::at_least>, kvp::QuestPages<16>>;

/// The state of a DualCache after length[seq] tokens of which head h of sequence seq has promoted
/// kept[seq * heads + h]. Pages of a head are scattered over the pool.
template <class P>
__global__ void fill_dual(kvp::DualRef<P, bf16> cache, const std::int32_t* kept,
                          const std::int64_t* first_page, std::int64_t pages, const kvp::position_t* length) {
    const std::int32_t seq = static_cast<std::int32_t>(blockIdx.x) / heads,
                       h = static_cast<std::int32_t>(blockIdx.x) % heads;
    const std::int32_t used = sinks + window + kept[blockIdx.x],
                       held = (used + cache.page_size - 1) / cache.page_size;
    const std::int64_t first = first_page[blockIdx.x];
    for (auto page = static_cast<std::int32_t>(threadIdx.x); page < held;
         page += static_cast<std::int32_t>(blockDim.x)) {
        const auto id = static_cast<std::int32_t>((first + page) * 7919 % pages);
        cache.pages(seq, h)[page] = id;
        cache.pool.names[id] = 1;
    }
    if (threadIdx.x == 0) {
        const std::int64_t index = cache.head_index(seq, h);
        cache.held[index] = held;
        cache.num_long_range[index] = kept[blockIdx.x];
        if (h == 0) {
            cache.length[seq] = length[seq];
        }
    }
}
template <class P>
__global__ void fill_free(kvp::DualRef<P, bf16> cache, std::int64_t first, std::int64_t pages) {
    for (std::int64_t x = first + threadIdx.x; x < pages; x += blockDim.x) {
        cache.pool.free_ids[x - first] = static_cast<std::int32_t>(x * 7919 % pages);
    }
    if (threadIdx.x == 0) {
        *cache.pool.free_count = static_cast<std::int32_t>(pages - first);
    }
}

/// Heads of `percent` of the keys each. Of a policy that selects a token reads `read` pages of 16
/// rows of every head.
template <class P = Gated>
void dual(benchmark::State& state, const Size& size, const std::array<float, heads>& percent,
          std::int32_t page_size, std::int32_t read = kvp::unlimited) {
    const std::int32_t batch = size.batch;
    const kvp::position_t length = size.length;
    std::array<float, heads> thresholds{};
    std::vector<std::int32_t> kept;
    std::vector<std::int64_t> first_page;
    std::int64_t used_pages = 0, rows = 0;
    for (std::int32_t seq = 0; seq < batch; ++seq) {
        for (std::size_t h = 0; h < heads; ++h) {
            thresholds[h] = 4.0f - 0.08f * percent[h];  // of scores that are even in [-4, 4)
            const auto open = static_cast<float>(size.length_of(seq)) * percent[h] / 100.0f;
            kept.push_back(std::max(0, static_cast<std::int32_t>(open) - sinks - window));
            first_page.push_back(used_pages);
            const std::int64_t used = sinks + window + std::int64_t{kept.back()};
            used_pages += (used + page_size - 1) / page_size;
            rows += used;
        }
    }
    std::int64_t pages = used_pages + std::int64_t{batch} * heads * (tokens_to_come / page_size + 2);
    pages += pages % 7919 == 0 ? 1 : 0;  // so that every page has one place
    const P policy = [&] {
        const kvp::ThresholdGate<kvp::at_least> gate{kvp::per_head(thresholds.data(), 1, heads)};
        if constexpr (P::has_selection) {
            return P{kvp::Sink<>{sinks}, kvp::Window<>{window}, gate, kvp::QuestPages<16>{read}};
        } else {
            return P{kvp::Sink<>{sinks}, kvp::Window<>{window}, gate};
        }
    }();
    kvp::DualCache<P, bf16> cache({.layers = 1,
                                   .max_sequences = batch,
                                   .query_heads = heads * group,
                                   .kv_heads = heads,
                                   .head_dim = dim,
                                   .page_size = page_size},
                                  {.slab_pages = static_cast<std::int32_t>(pages),
                                   .max_slabs = 1,
                                   .max_seq_len = length + tokens_to_come},
                                  policy);
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total())),
        slab(static_cast<std::int64_t>(cache.slab_bytes()));
    cache.bind(ctx, memory.data(), cache.bytes().total());
    cache.add_slab(ctx, slab.data(), cache.slab_bytes());
    const auto ref = cache.layer(0);
    kvp::Slab<bf16> provided;
    ok(cudaMemcpy(&provided, ref.pool.slabs, sizeof provided, cudaMemcpyDeviceToHost));
    fill(provided.k, pages * page_size * dim);
    fill(provided.v, pages * page_size * dim);
    fill_scores<<<4096, 256>>>(provided.score, pages * page_size);
    double rows_read = static_cast<double>(rows);
    if constexpr (P::has_selection) {
        fill(provided.bounds, pages * page_size / 16 * 2 * dim);  // any: a choice costs the same
        rows_read = rows_read / 16 +
                    16.0 * read * heads * batch;  // bounds of a page are as many bytes as a key and a value
    }
    const auto of_kept = on_device(kept);
    const auto of_pages = on_device(first_page);
    const auto of_lengths = on_device(size.lengths());
    fill_dual<<<static_cast<unsigned>(batch * heads), 256>>>(ref, of_kept->data(), of_pages->data(), pages,
                                                             of_lengths->data());
    fill_free<<<1, 256>>>(ref, used_pages, pages);
    ok(cudaGetLastError());
    ok(cudaDeviceSynchronize());
    const Tensors in(batch);
    time_steps(state, cache, calls, in, 2.0 * rows_read * dim * sizeof(bf16));
}

/// A window of all tokens.
inline void dense(benchmark::State& state, const Size& size) {
    const std::int32_t batch = size.batch;
    const kvp::position_t length = size.length;
    using Dense = kvp::Policy<kvp::Window<>>;
    kvp::FixedBudgetCache<Dense, bf16> cache({.layers = 1,
                                              .max_sequences = batch,
                                              .query_heads = heads * group,
                                              .kv_heads = heads,
                                              .head_dim = dim},
                                             Dense{kvp::Window<>{static_cast<std::int32_t>(length)}});
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total()));
    cache.bind(ctx, memory.data(), cache.bytes().total());
    const auto ref = cache.layer(0);
    fill(ref.k, batch * ref.rows * dim);
    fill(ref.v, batch * ref.rows * dim);
    const std::vector<kvp::position_t> lengths = size.lengths();
    ok(cudaMemcpy(ref.length, lengths.data(), sizeof(kvp::position_t) * lengths.size(),
                  cudaMemcpyHostToDevice));
    const Tensors in(batch);
    const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    time_steps(state, cache, calls, in, 2.0 * heads * static_cast<double>(tokens) * dim * sizeof(bf16));
}

inline void add_rows() {
    constexpr std::array<float, heads> mixed = {2, 4, 8, 12, 16, 25, 43, 90},
                                       even = {25, 25, 25, 25, 25, 25, 25, 25},
                                       full = {100, 100, 100, 100, 100, 100, 100, 100};
    add("dense decode, 128k x 16", [](benchmark::State& state) { dense(state, {}); });
    for (const std::int32_t page_size : {16, 64}) {
        const std::string pages = ", pages of " + std::to_string(page_size);
        add("ragged DualCache, 25% of 128k x 16" + pages,
            [=](benchmark::State& state) { dual(state, {}, mixed, page_size); });
        add("even DualCache, 25% of 128k x 16" + pages,
            [=](benchmark::State& state) { dual(state, {}, even, page_size); });
    }
    const Size lengths{.shortest = 4096};
    add("dense decode, 4k to 128k x 16", [=](benchmark::State& state) { dense(state, lengths); });
    add("ragged DualCache, 25% of 4k to 128k x 16, pages of 16",
        [=](benchmark::State& state) { dual(state, lengths, mixed, 16); });
    add("DualCache, all of 128k x 16, pages of 16",
        [=](benchmark::State& state) { dual(state, {}, full, 16); });
    add("DualCache, 256 pages of 16 read of all of 128k x 16",
        [=](benchmark::State& state) { dual<Selecting>(state, {}, full, 16, 256); });
    // Short sequences, where the launch that plans weighs most.
    for (const std::int32_t batch : {8, 32}) {
        const Size size{batch, 4096};
        const std::string name = "4096 x " + std::to_string(batch);
        add("dense decode, " + name, [=](benchmark::State& state) { dense(state, size); });
        add("DualCache, all of " + name + ", pages of 16",
            [=](benchmark::State& state) { dual(state, size, full, 16); });
    }
}

}  // namespace ragged

}  // namespace bench
