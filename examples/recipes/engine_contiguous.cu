// Plug the cache into an engine that keeps rows as its projections write them: [sequences, heads, head_dim]
// (NHD), a token's queries, keys and values in one fused row. The engine owns all memory; sequences join and
// leave between steps.
//
// Nothing is copied on the way in: q, k and v are three views of the fused rows. Which sequences take a step,
// and in which sequences they live, the engine writes into device memory.
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<2>, kvp::Window<16>, kvp::TopKBudget<30>>;
using Cache = kvp::FixedBudgetCache<Policy, bf16>;
using Dims = kvp::head_dims<64>;  // compiled for nothing else

constexpr int batch = 3, heads = 8, kv_heads = 2, dim = 64, row_heads = heads + 2 * kv_heads, layers = 2;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// `count` heads of every sequence's fused row, from head `first` on.
kvp::rows_view<const bf16> heads_of(const bf16* fused, int first, int count) {
    return {fused + first * dim, batch, count, 1, dim, row_heads * dim, dim, row_heads * dim};
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const kvp::CacheShape shape{
        .layers = layers, .max_sequences = 8, .query_heads = heads, .kv_heads = kv_heads, .head_dim = dim};
    const kvp::cuda ctx{};  // the default stream; kvp::cuda{stream} is another
    Cache cache{shape};
    thrust::device_vector<unsigned char> memory(cache.bytes().total());  // the engine's, bound to the cache
    cache.bind(ctx, raw(memory), memory.size());
    thrust::device_vector<unsigned char> workspace(cache.step_workspace_bytes<Dims>(ctx, batch));
    const kvp::workspace_view scratch{raw(workspace), workspace.size()};

    // The same on the host, to compare with.
    const kvp::host host_ctx{1};
    Cache host_cache{shape};
    kvp::Buffer host_memory{host_ctx, host_cache.bytes()};
    host_cache.bind(host_ctx, host_memory);
    kvp::Buffer host_workspace{host_ctx, host_cache.workspace_bytes(host_ctx, {.batch = batch, .tokens = 1})};

    const std::vector<int> seq_ids{5, 0, 3};
    std::vector<int> q_len(batch);
    std::vector<bf16> fused(batch * row_heads * dim), out(batch * heads * dim), expected(out);
    std::vector<float> scores(batch * kv_heads);
    thrust::device_vector<int> device_seq_ids(seq_ids), device_len(batch);
    thrust::device_vector<bf16> device_fused(fused.size()), device_out(out.size());
    thrust::device_vector<float> device_scores(scores.size());

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    float off = 0.0f;
    for (int t = 0; t < 200; ++t) {
        q_len = {1, t < 120 ? 1 : 0, t < 80 ? 0 : 1};  // the second leaves, the third joins
        const kvp::Batch device_batch{batch, raw(device_seq_ids), raw(device_len)};
        const kvp::Batch host_batch{batch, seq_ids.data(), q_len.data()};
        thrust::copy(q_len.begin(), q_len.end(), device_len.begin());
        for (int layer = 0; layer < layers; ++layer) {
            for (bf16& x : fused) {
                x = bf16(normal(generator));
            }
            for (float& x : scores) {
                x = normal(generator);
            }
            thrust::copy(fused.begin(), fused.end(), device_fused.begin());
            thrust::copy(scores.begin(), scores.end(), device_scores.begin());
            const auto step = [&](const auto& context, const auto& ref, const kvp::Batch& of,
                                  const bf16* rows, const float* given, bf16* to,
                                  kvp::workspace_view provided) {
                const auto q = heads_of(rows, 0, heads), k = heads_of(rows, heads, kv_heads),
                           v = heads_of(rows, heads + kv_heads, kv_heads);
                const auto result = kvp::view_bshd(to, batch, 1, heads, dim);
                kvp::step<Dims>(context, ref,
                                {.q = q,
                                 .k = k,
                                 .v = v,
                                 .out = result,
                                 .batch = of,
                                 .scores = kvp::view_bhs(given, batch, kv_heads, 1)},
                                provided);
            };
            step(ctx, cache.layer(layer), device_batch, raw(device_fused), raw(device_scores),
                 raw(device_out), scratch);
            step(host_ctx, host_cache.layer(layer), host_batch, fused.data(), scores.data(), expected.data(),
                 host_workspace);
            thrust::copy(device_out.begin(), device_out.end(), out.begin());
            for (std::size_t i = 0; i < out.size(); ++i) {
                if (q_len[i / (heads * dim)] != 0) {  // the others' outputs are not touched
                    off = std::fmax(off,
                                    std::fabs(static_cast<float>(out[i]) - static_cast<float>(expected[i])));
                }
            }
        }
        cache.advance(ctx, device_batch);  // once a step, after the last layer
        host_cache.advance(host_ctx, host_batch);
    }
    for (const int seq : seq_ids) {
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, seq)),
            host_blob(host_cache.snapshot_bytes(seq));
        cache.snapshot(ctx, seq, blob.data(), blob.size());
        host_cache.snapshot(host_ctx, seq, host_blob.data(), host_blob.size());
        std::printf("sequence %d: %d tokens seen, %s\n", seq, static_cast<int>(host_cache.length(seq)),
                    blob == host_blob ? "the snapshot of the host's cache" : "another snapshot");
    }
    std::printf("%s\n", off < 0.03f ? "the same outputs" : "other outputs");
}

// Prints:
// sequence 5: 200 tokens seen, the snapshot of the host's cache
// sequence 0: 120 tokens seen, the snapshot of the host's cache
// sequence 3: 120 tokens seen, the snapshot of the host's cache
// the same outputs
