// Let a paged attention kernel of an engine read the cache beside the library's own attention
// (engine_append.cu puts it in its place): every KV head is exported as a sequence with a page table, as
// FlashInfer's and FlashAttention's paged kernels take it (one KV head a sequence), and no row is copied.
//
// The cache decides which rows there are. Here a few lines stand in for the engine's kernel. Its outputs make
// the next layer's tokens, so a layer is exported right after its step, with the newest token's row, and
// advance() comes last. Tables are device memory, so all of it can be captured in one graph.
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<28>, kvp::TopKBudget<>>;
using Dims = kvp::head_dims<64>;  // compiled for nothing else

constexpr int layers = 2, batch = 2, heads = 8, kv_heads = 2, group = heads / kv_heads, dim = 64,
              page_size = 16;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// The engine's kernel, which knows pages and tables alone. Block (sequence, KV head) x query head of its
// group, a thread a dimension.
__global__ void paged_attention(const bf16* q, const bf16* k_pages, const bf16* v_pages,
                                kvp::HeadPages tables, float* out) {
    const int sequence = static_cast<int>(blockIdx.x) / group, d = static_cast<int>(threadIdx.x);
    __shared__ float parts[dim];
    const int first = tables.indptr[sequence], last = tables.indptr[sequence + 1];
    float largest = -INFINITY, sum = 0.0f, weighted = 0.0f;
    for (int p = first; p < last; ++p) {
        const int rows = p + 1 < last ? page_size : tables.last_page_len[sequence];
        for (int r = 0; r < rows; ++r) {
            const std::int64_t at = (std::int64_t{tables.indices[p]} * page_size + r) * dim + d;
            __syncthreads();
            parts[d] = static_cast<float>(q[blockIdx.x * dim + d]) * static_cast<float>(k_pages[at]);
            __syncthreads();
            float logit = 0.0f;
            for (int i = 0; i < dim; ++i) {
                logit += parts[i];
            }
            logit *= rsqrtf(float{dim});
            const float now = fmaxf(largest, logit), old = expf(largest - now), weight = expf(logit - now);
            sum = sum * old + weight;
            weighted = weighted * old + weight * static_cast<float>(v_pages[at]);
            largest = now;
        }
    }
    out[blockIdx.x * dim + d] = sum > 0.0f ? weighted / sum : 0.0f;
}

// What an engine does between two layers, in short: their tokens depend on the attention before.
__global__ void next_layer(bf16* rows, const float* attended, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    rows[i] = bf16(0.7f * static_cast<float>(rows[i]) + attended[i % count]);
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const std::int32_t budgets[layers * kv_heads] = {20, 200, 50, 10};  // by layer and head
    const Policy policy{{}, {}, kvp::TopKBudget<>{kvp::per_head(budgets, layers, kv_heads)}};
    const kvp::cuda ctx{};
    kvp::FixedBudgetCache<Policy, bf16> cache{{.layers = layers,
                                               .max_sequences = batch,
                                               .query_heads = heads,
                                               .kv_heads = kv_heads,
                                               .head_dim = dim,
                                               .page_size = page_size},
                                              policy};
    thrust::device_vector<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, raw(memory), memory.size());
    thrust::device_vector<unsigned char> workspace(cache.step_workspace_bytes<Dims>(ctx, batch));
    const kvp::workspace_view scratch{raw(workspace), workspace.size()};

    // The engine's tables: as many pages as its sequences could ever use, in any layer.
    const std::int64_t most = std::max(cache.rows(0), cache.rows(1));
    thrust::device_vector<std::int32_t> indptr(batch * kv_heads + 1), last_page_len(batch * kv_heads),
        indices(batch * (most / page_size));
    const kvp::HeadPages tables{raw(indptr), raw(indices), raw(last_page_len),
                                static_cast<std::int64_t>(indices.size())};

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<bf16> numbers((heads + 2 * kv_heads) * batch * dim);
    std::vector<float> given(batch * kv_heads);
    thrust::device_vector<bf16> rows(numbers.size()), out(batch * heads * dim);
    thrust::device_vector<float> scores(given.size()), theirs(out.size());
    const auto q = kvp::view_bhsd<const bf16>(raw(rows), batch, heads, 1, dim);
    const auto k = kvp::view_bhsd<const bf16>(raw(rows) + batch * heads * dim, batch, kv_heads, 1, dim);
    const auto v =
        kvp::view_bhsd<const bf16>(raw(rows) + batch * (heads + kv_heads) * dim, batch, kv_heads, 1, dim);
    const auto to = kvp::view_bhsd(raw(out), batch, heads, 1, dim);
    float off = 0.0f;
    const auto compare = [&] {
        std::vector<bf16> ours(out.size());
        std::vector<float> other(theirs.size());
        thrust::copy(out.begin(), out.end(), ours.begin());
        thrust::copy(theirs.begin(), theirs.end(), other.begin());
        for (std::size_t i = 0; i < other.size(); ++i) {
            off = std::fmax(off, std::fabs(static_cast<float>(ours[i]) - other[i]));
        }
    };
    for (int t = 0; t < 300; ++t) {
        for (bf16& x : numbers) {
            x = bf16(normal(generator));
        }
        for (float& x : given) {
            x = normal(generator);
        }
        thrust::copy(numbers.begin(), numbers.end(), rows.begin());
        thrust::copy(given.begin(), given.end(), scores.begin());
        for (int layer = 0; layer < layers; ++layer) {
            const auto ref = cache.layer(layer);
            // Appends, evicts, and attends as the library would,
            kvp::step<Dims>(ctx, ref,
                            {.q = q,
                             .k = k,
                             .v = v,
                             .out = to,
                             .batch = {batch},
                             .scores = kvp::view_bhs<const float>(raw(scores), batch, kv_heads, 1)},
                            scratch);
            // and what the engine's kernel finds in the same rows.
            kvp::export_heads(ctx, ref, {batch}, tables);
            paged_attention<<<batch * heads, dim>>>(q.data, ref.k, ref.v, tables, raw(theirs));
            compare();
            next_layer<<<static_cast<unsigned>(rows.size() / dim), dim>>>(raw(rows), raw(theirs),
                                                                          static_cast<int>(theirs.size()));
        }
        cache.advance(ctx, {batch});  // once, after the last layer
    }
    for (int layer = 0; layer < layers; ++layer) {
        kvp::export_heads(ctx, cache.layer(layer), {batch}, tables);
        for (int h = 0; h < kv_heads; ++h) {  // of the first sequence
            const int pages = indptr[h + 1] - indptr[h];
            std::printf("layer %d, head %d: %d pages, %d rows\n", layer, h, pages,
                        (pages - 1) * page_size + static_cast<int>(last_page_len[h]));
        }
    }
    std::printf("%s\n", off < 0.03f ? "the same outputs" : "other outputs");
}

// Prints:
// layer 0, head 0: 4 pages, 52 rows
// layer 0, head 1: 15 pages, 232 rows
// layer 1, head 0: 6 pages, 82 rows
// layer 1, head 1: 3 pages, 42 rows
// the same outputs
