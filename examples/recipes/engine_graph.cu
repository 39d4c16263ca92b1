// Plug the cache into an engine that decodes by CUDA graph: the step of all layers is captured once and
// launched for every token.
//
// What changes from token to token is in device memory (lengths, counters, the worst places), so the graph
// never changes, however long the sequences grow and whatever is evicted. The engine's own numbers must be
// there too: here a kernel at the head of the graph makes each layer's tensors from the cache's length.
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>

#include <thrust/device_vector.h>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<12>, kvp::TopKBudget<48>>;
using Cache = kvp::FixedBudgetCache<Policy, bf16>;
using Dims = kvp::head_dims<64>;  // compiled for nothing else

constexpr int layers = 4, batch = 2, heads = 4, kv_heads = 2, dim = 64, row_heads = heads + 2 * kv_heads;
constexpr int numbers = batch * row_heads * dim;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// Stands for the engine's projections and its predictor: rows [batch, row_heads, dim] and scores [batch,
// kv_heads] of the next token.
__global__ void next_token(int layer, const kvp::position_t* length, bf16* rows, float* scores) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < numbers) {
        const auto t = static_cast<std::uint64_t>(length[i / (row_heads * dim)]);
        const auto stream = static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint64_t>(i);
        rows[i] = bf16(static_cast<float>(4.0 * kvp::random_unit(1, stream, t) - 2.0));
        if (i < batch * kv_heads) {
            scores[i] = static_cast<float>(
                kvp::random_unit(2, stream, static_cast<std::uint64_t>(length[i / kv_heads])));
        }
    }
}

// A cache with the memory that the engine provides, and the engine's step.
struct Decoder {
    Cache cache{{.layers = layers,
                 .max_sequences = batch,
                 .query_heads = heads,
                 .kv_heads = kv_heads,
                 .head_dim = dim}};
    thrust::device_vector<unsigned char> memory, workspace;
    thrust::device_vector<bf16> rows{numbers}, out{batch * heads * dim};
    thrust::device_vector<float> scores{batch * kv_heads};
    kvp::cuda ctx;

    explicit Decoder(cudaStream_t stream) : memory(cache.bytes().total()), ctx{stream} {
        cache.bind(ctx, raw(memory), memory.size());
        workspace.resize(cache.step_workspace_bytes<Dims>(ctx, batch));
        cudaDeviceSynchronize();  // Thrust works on the default stream
    }
    // Enqueues one token of every sequence.
    void step() {
        for (int layer = 0; layer < layers; ++layer) {
            const auto ref = cache.layer(layer);
            next_token<<<(numbers + 255) / 256, 256, 0, ctx.stream>>>(layer, ref.length, raw(rows),
                                                                      raw(scores));
            const auto heads_from = [&](int first, int count) {
                return kvp::rows_view<const bf16>{raw(rows) + first * dim, batch, count, 1, dim,
                                                  row_heads * dim,         dim,   dim};
            };
            kvp::step<Dims>(ctx, ref,
                            {.q = heads_from(0, heads),
                             .k = heads_from(heads, kv_heads),
                             .v = heads_from(heads + kv_heads, kv_heads),
                             .out = kvp::view_bhsd(raw(out), batch, heads, 1, dim),
                             .batch = {batch},
                             .scores = kvp::view_bhs<const float>(raw(scores), batch, kv_heads, 1)},
                            {raw(workspace), workspace.size()});
        }
        cache.advance(ctx, {batch});  // once a step, after the last layer
    }
    std::vector<unsigned char> snapshot(int seq) const {
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, seq));
        cache.snapshot(ctx, seq, blob.data(), blob.size());
        return blob;
    }
};

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    constexpr int steps = 10000;
    Decoder replayed(stream), eager(stream);
    replayed.step();  // a real one: it also loads the kernels, which a capture may not do everywhere
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t launchable = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    replayed.step();
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&launchable, graph, 0);
    for (int t = 1; t < steps; ++t) {
        cudaGraphLaunch(launchable, stream);
    }
    for (int t = 0; t < steps; ++t) {
        eager.step();
    }
    const bool same = replayed.snapshot(0) == eager.snapshot(0) && replayed.snapshot(1) == eager.snapshot(1);
    std::printf("%d steps, %s\n", steps,
                cudaGetLastError() != cudaSuccess ? "an error"
                : same                            ? "the same caches"
                                                  : "other caches");
    cudaGraphExecDestroy(launchable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

// Prints:
// 10000 steps, the same caches
