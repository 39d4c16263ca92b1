// Plug the cache into an engine that has a pool of pages already: FlashInfer's [pages, 2, page_size, heads,
// dim] (NHD), keys and values of all heads in one page. The cache's rows live in the engine's pages, and the
// engine's kernel reads them there.
//
// A page of the cache belongs to one KV head, so the pool is attached as a slab for each: strides say where
// its rows lie. The engine keeps its first page to itself, and pads its batch with entries of sequence -1.
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/wgkv.hpp>

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<28>, kvp::ThresholdGate<kvp::at_least>>;
using Dims = kvp::head_dims<64>;  // compiled for nothing else

constexpr int batch = 3, heads = 8, kv_heads = 2, group = heads / kv_heads, dim = 64, page_size = 16,
              pages = 20;
constexpr std::int64_t row = kv_heads * dim, page = 2 * page_size * row;  // strides of the engine's pool

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// The engine's kernel. Block (entry, query head), a thread a dimension. Table entry i is page i % pages of
// head i / pages of the pool.
__global__ void paged_attention(const bf16* q, const bf16* pool, kvp::HeadPages tables, float* out) {
    const int sequence = static_cast<int>(blockIdx.x) / group, d = static_cast<int>(threadIdx.x);
    __shared__ float parts[dim];
    const int first = tables.indptr[sequence], last = tables.indptr[sequence + 1];
    float largest = -INFINITY, sum = 0.0f, weighted = 0.0f;
    for (int p = first; p < last; ++p) {
        const int i = tables.indices[p], rows = p + 1 < last ? page_size : tables.last_page_len[sequence];
        const bf16* const k = pool + i % pages * page + i / pages * dim;
        const bf16* const v = k + page_size * row;
        for (int r = 0; r < rows; ++r) {
            __syncthreads();
            parts[d] = static_cast<float>(q[blockIdx.x * dim + d]) * static_cast<float>(k[r * row + d]);
            __syncthreads();
            float logit = 0.0f;
            for (int j = 0; j < dim; ++j) {
                logit += parts[j];
            }
            logit *= rsqrtf(float{dim});
            const float now = fmaxf(largest, logit), old = expf(largest - now), weight = expf(logit - now);
            sum = sum * old + weight;
            weighted = weighted * old + weight * static_cast<float>(v[r * row + d]);
            largest = now;
        }
    }
    out[blockIdx.x * dim + d] = sum > 0.0f ? weighted / sum : 0.0f;
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const kvp::cuda ctx{};
    // The engine's pool; what is in its first page must stay there.
    thrust::device_vector<bf16> pool(pages * page, bf16(7.0f));

    const Policy policy{{}, {}, kvp::ThresholdGate<kvp::at_least>{0.0f}};
    kvp::DualCache<Policy, bf16> cache{{.max_sequences = 4,
                                        .query_heads = heads,
                                        .kv_heads = kv_heads,
                                        .head_dim = dim,
                                        .page_size = page_size},
                                       {.slab_pages = pages,
                                        .max_slabs = kv_heads,
                                        .max_seq_len = 4096,
                                        .spared_pages = 1,
                                        .strides = {page, page, row, row}},
                                       policy};
    thrust::device_vector<unsigned char> memory(cache.bytes().total()), notes[kv_heads];
    cache.bind(ctx, raw(memory), memory.size());
    for (int h = 0; h < kv_heads; ++h) {
        notes[h].resize(
            cache.notes_bytes());  // positions and scores, which an engine's pool has no space for
        bf16* const keys = raw(pool) + h * dim;
        cache.add_pages(ctx, keys, keys + page_size * row, raw(notes[h]), notes[h].size());
    }
    thrust::device_vector<unsigned char> workspace(cache.step_workspace_bytes<Dims>(ctx, batch));
    const kvp::workspace_view scratch{raw(workspace), workspace.size()};

    // The engine's tables, and its batch: two sequences, and an entry that is only padding.
    thrust::device_vector<std::int32_t> indptr(batch * kv_heads + 1), last_page_len(batch * kv_heads),
        indices(kv_heads * pages), seq_ids(std::vector<std::int32_t>{0, kvp::Batch::no_seq, 1});
    const kvp::HeadPages tables{raw(indptr), raw(indices), raw(last_page_len),
                                static_cast<std::int64_t>(indices.size())};
    const kvp::Batch sequences{batch, raw(seq_ids)};

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
    float off = 0.0f;
    for (int t = 0; t < 300; ++t) {
        for (bf16& x : numbers) {
            x = bf16(normal(generator));
        }
        for (int i = 0; i < batch * kv_heads; ++i) {  // of head 0 a gate in 4 is open, of head 1 one in 16
            given[i] = t % (i % kv_heads == 0 ? 4 : 16) == 0 ? 1.0f : -1.0f;
        }
        thrust::copy(numbers.begin(), numbers.end(), rows.begin());
        thrust::copy(given.begin(), given.end(), scores.begin());
        // Appends, decides, and attends as the library would,
        kvp::step<Dims>(ctx, cache.layer(0),
                        {.q = q,
                         .k = k,
                         .v = v,
                         .out = kvp::view_bhsd(raw(out), batch, heads, 1, dim),
                         .batch = sequences,
                         .scores = kvp::view_bhs<const float>(raw(scores), batch, kv_heads, 1)},
                        scratch);
        cache.advance(ctx, sequences);
        // and what the engine's kernel finds in its own pool.
        kvp::export_heads(ctx, cache.layer(0), sequences, tables);
        paged_attention<<<batch * heads, dim>>>(q.data, raw(pool), tables, raw(theirs));
        std::vector<bf16> ours(out.size());
        std::vector<float> other(theirs.size());
        thrust::copy(out.begin(), out.end(), ours.begin());
        thrust::copy(theirs.begin(), theirs.end(), other.begin());
        for (int i = 0; i < batch * heads * dim; ++i) {
            if (i / (heads * dim) != 1) {  // not the padding
                off = std::fmax(off, std::fabs(static_cast<float>(ours[i]) - other[i]));
            }
        }
    }
    for (int s = 0; s < batch * kv_heads; ++s) {
        const int used = indptr[s + 1] - indptr[s];
        std::printf("entry %d, head %d: %d pages, %d rows\n", s / kv_heads, s % kv_heads, used,
                    used == 0 ? 0 : (used - 1) * page_size + static_cast<int>(last_page_len[s]));
    }
    std::vector<bf16> first(page);
    thrust::copy(pool.begin(), pool.begin() + page, first.begin());
    const bool spared = std::all_of(first.begin(), first.end(), [](bf16 x) { return float(x) == 7.0f; });
    cache.clear(ctx, 0);
    cache.clear(ctx, 1);
    std::printf("%s, the first page %s, %d of %d pages free\n",
                off < 0.03f ? "the same outputs" : "other outputs", spared ? "as it was" : "overwritten",
                static_cast<int>(cache.free_pages(ctx)), static_cast<int>(cache.attached_pages()));
}

// Prints:
// entry 0, head 0: 7 pages, 99 rows
// entry 0, head 1: 3 pages, 48 rows
// entry 1, head 0: 0 pages, 0 rows
// entry 1, head 1: 0 pages, 0 rows
// entry 2, head 0: 7 pages, 99 rows
// entry 2, head 1: 3 pages, 48 rows
// the same outputs, the first page as it was, 38 of 38 pages free
