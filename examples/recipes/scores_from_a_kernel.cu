// A scorer of your own on a GPU: a kernel of yours in front of the step, whose scores the step takes.
//
// On the device the library runs its own scorers only. Any other is a kernel that writes one number a new
// key, [count, heads, 1], on the same stream: nothing waits, and it is captured in the same graph. What it
// remembers is memory of yours. The score is wanted when a key comes in, so this one says how little a key
// resembles what came before it (own_scorer.cpp, on the host, looks at what came after).
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

using Policy = kvp::Policy<kvp::Window<4>, kvp::TopKBudget<3>>;  // no scorer: scores are given
constexpr int heads = 2, dim = 8;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// The distance of every head's new key [heads, dim] from a moving average of the keys before it; a block a
// head, a thread a number.
__global__ void novelty(const float* key, float* average, float* score) {
    __shared__ float squares[dim];
    const unsigned d = threadIdx.x, at = blockIdx.x * dim + d;
    const float off = key[at] - average[at];
    squares[d] = off * off;
    average[at] += 0.1f * off;
    __syncthreads();
    if (d == 0) {
        float sum = 0.0f;
        for (const float square : squares) {
            sum += square;
        }
        score[blockIdx.x] = sqrtf(sum);
    }
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const kvp::cuda ctx{};
    kvp::FixedBudgetCache<Policy, float> cache{{.query_heads = heads, .kv_heads = heads, .head_dim = dim}};
    thrust::device_vector<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, raw(memory), memory.size());
    thrust::device_vector<unsigned char> workspace(cache.step_workspace_bytes(ctx, 1));
    thrust::device_vector<float> key(heads * dim), out(heads * dim), score(heads), average(heads * dim, 1.0f);

    // Sixty tokens of the same key, and three others among them.
    for (int t = 0; t < 60; ++t) {
        const bool other = t == 11 || t == 25 || t == 40;
        thrust::fill(key.begin(), key.end(), other ? -1.0f : 1.0f);
        novelty<<<heads, dim, 0, ctx.stream>>>(raw(key), raw(average), raw(score));
        const auto row = kvp::view_bhsd<const float>(raw(key), 1, heads, 1, dim);
        kvp::step(ctx, cache.layer(0),
                  {.q = row,
                   .k = row,
                   .v = row,
                   .out = kvp::view_bhsd(raw(out), 1, heads, 1, dim),
                   .batch = {.count = 1},
                   .scores = kvp::view_bhs<const float>(raw(score), 1, heads, 1)},
                  {raw(workspace), workspace.size()});
        cache.advance(ctx, {.count = 1});
    }

    // A look into a cache on a device: its snapshot, in a cache on the host.
    std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, 0));
    cache.snapshot(ctx, 0, blob.data(), blob.size());
    const kvp::host host_ctx{1};
    kvp::FixedBudgetCache<Policy, float> seen{cache.shape()};
    kvp::Buffer host_memory{host_ctx, seen.bytes()};
    seen.bind(host_ctx, host_memory);
    seen.restore(host_ctx, 0, blob.data(), blob.size());
    for (int head = 0; head < heads; ++head) {
        kvp::position_t held[7];
        const int rows = seen.retained(0, 0, head, held);
        std::printf("head %d, beside the window:", head);
        for (int row = 4; row < rows; ++row) {
            std::printf(" %d", static_cast<int>(held[row]));
        }
        std::printf("\n");
    }
}

// Prints:
// head 0, beside the window: 25 40 11
// head 1, beside the window: 25 40 11
