// Plug the cache into an engine that has its own attention, and pay for attention once: append() decides,
// evicts and writes, and the engine's paged kernel reads the pages that export_heads() names.
//
// After append() the exported entries are what the token's query sees. For a chunk they are not, since its
// tokens evict keys that its first queries still see. So the engine attends first, to the exported entries
// and to the chunk's own keys, through expiries that chunk_expiry() gives; append_chunk() writes afterwards.
// A cache on the CPU, which attends itself, says what the outputs should be.
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
using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<28>, kvp::TopKBudget<>>;

constexpr int batch = 2, heads = 8, kv_heads = 2, group = heads / kv_heads, dim = 64, page_size = 16,
              chunk = 24, prompt = 3 * chunk, tokens = prompt + 150, rows = 4 + 28 + 100;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// The engine's kernel. Block (entry, query head, query j), a thread a dimension. In decoding `own_k` is null:
// all exported entries are seen, and the token's key is among them.
__global__ void paged_attention(kvp::rows_view<const bf16> q, const bf16* k_pages, const bf16* v_pages,
                                kvp::HeadPages tables, kvp::rows_view<const bf16> own_k,
                                kvp::rows_view<const bf16> own_v, kvp::ChunkExpiry expiry, float* out) {
    const int j = static_cast<int>(blockIdx.x) % q.length,
              head = static_cast<int>(blockIdx.x) / q.length % heads,
              entry = static_cast<int>(blockIdx.x) / q.length / heads, d = static_cast<int>(threadIdx.x);
    const int kv_head = head / group, sequence = entry * kv_heads + kv_head;
    __shared__ float parts[dim];
    float largest = -INFINITY, sum = 0.0f, weighted = 0.0f;
    const auto attend = [&](const bf16* k, const bf16* v) {
        __syncthreads();
        parts[d] = static_cast<float>(q.row(entry, head, j)[d]) * static_cast<float>(k[d]);
        __syncthreads();
        float logit = 0.0f;
        for (int i = 0; i < dim; ++i) {
            logit += parts[i];
        }
        logit *= rsqrtf(float{dim});
        const float now = fmaxf(largest, logit), old = expf(largest - now), weight = expf(logit - now);
        sum = sum * old + weight;
        weighted = weighted * old + weight * static_cast<float>(v[d]);
        largest = now;
    };
    const int first = tables.indptr[sequence], pages = tables.indptr[sequence + 1] - first;
    const int used = pages == 0 ? 0 : (pages - 1) * page_size + tables.last_page_len[sequence];
    for (int r = 0; r < used; ++r) {
        if (own_k.data == nullptr || j < expiry.cached.head(entry, kv_head)[r]) {
            const std::int64_t at =
                (std::int64_t{tables.indices[first + r / page_size]} * page_size + r % page_size) * dim;
            attend(k_pages + at, v_pages + at);
        }
    }
    for (int t = 0; own_k.data != nullptr && t <= j; ++t) {
        if (j < expiry.tokens.head(entry, kv_head)[t]) {
            attend(own_k.row(entry, kv_head, t), own_v.row(entry, kv_head, t));
        }
    }
    out[blockIdx.x * dim + d] = sum > 0.0f ? weighted / sum : 0.0f;
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const std::int32_t budgets[kv_heads] = {20, 100};
    const Policy policy{{}, {}, kvp::TopKBudget<>{kvp::per_head(budgets, 1, kv_heads)}};
    const kvp::CacheShape shape{.max_sequences = batch,
                                .query_heads = heads,
                                .kv_heads = kv_heads,
                                .head_dim = dim,
                                .page_size = page_size};
    const kvp::cuda ctx{};
    kvp::FixedBudgetCache<Policy, bf16> cache{shape, policy};
    thrust::device_vector<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, raw(memory), memory.size());
    const kvp::host cpu{2};
    kvp::FixedBudgetCache<Policy, bf16> attending{shape, policy};
    kvp::Buffer own_memory{cpu, attending.bytes()};
    attending.bind(cpu, own_memory);
    kvp::Buffer own_workspace{cpu, attending.workspace_bytes(cpu, {.batch = batch, .tokens = chunk})};

    // The engine's memory: tables for as many pages as its sequences could ever use, and expiries.
    thrust::device_vector<unsigned char> workspace(
        cache.append_workspace_bytes(ctx, {.batch = batch, .tokens = chunk}));
    const kvp::workspace_view scratch{raw(workspace), workspace.size()};
    thrust::device_vector<std::int32_t> indptr(batch * kv_heads + 1), last_page_len(batch * kv_heads),
        indices(batch * (cache.rows(0) / page_size));
    const kvp::HeadPages tables{raw(indptr), raw(indices), raw(last_page_len),
                                static_cast<std::int64_t>(indices.size())};
    thrust::device_vector<kvp::expiry_t> of_entries(batch * kv_heads * rows),
        of_tokens(batch * kv_heads * chunk);

    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    float off = 0.0f;
    for (int t = 0; t < tokens;) {
        const int n = t < prompt ? chunk : 1;
        std::vector<bf16> q(batch * heads * n * dim), k(batch * kv_heads * n * dim), v(k), out(q);
        std::vector<float> scores(batch * kv_heads * n);
        for (auto* numbers : {&q, &k, &v}) {
            for (bf16& x : *numbers) {
                x = bf16(normal(generator));
            }
        }
        for (float& x : scores) {
            x = normal(generator);
        }
        const thrust::device_vector<bf16> device_q = q, device_k = k, device_v = v;
        const thrust::device_vector<float> device_scores = scores;
        thrust::device_vector<float> attended(q.size());
        const auto view = [&](const thrust::device_vector<bf16>& of, int count) {
            return kvp::view_bhsd<const bf16>(thrust::raw_pointer_cast(of.data()), batch, count, n, dim);
        };
        const auto queries = view(device_q, heads);
        const kvp::StepIO<bf16> io{
            .k = view(device_k, kv_heads),
            .v = view(device_v, kv_heads),
            .scores = kvp::view_bhs(thrust::raw_pointer_cast(device_scores.data()), batch, kv_heads, n)};
        const auto layer = cache.layer(0);
        const kvp::ChunkExpiry expiry{kvp::view_bhs(raw(of_entries), batch, kv_heads, rows),
                                      kvp::view_bhs(raw(of_tokens), batch, kv_heads, n)};
        const auto engine = [&](const kvp::StepIO<bf16>& own) {
            kvp::export_heads(ctx, layer, {batch}, tables);
            paged_attention<<<batch * heads * n, dim>>>(queries, layer.k, layer.v, tables, own.k, own.v,
                                                        expiry, raw(attended));
        };
        if (n == 1) {
            kvp::append(ctx, layer, io, scratch);  // decides, evicts, writes;
            engine({});                            // the pages are what the query sees
        } else {
            kvp::chunk_expiry(ctx, layer, io, expiry, scratch);  // what the chunk's queries see
            engine(io);
            kvp::append_chunk(ctx, layer, io, scratch);
        }
        cache.advance(ctx, {batch, nullptr, nullptr, n});  // once, after the last layer

        auto same = attending.hnd(q.data(), k.data(), v.data(), out.data(), {.batch = batch, .tokens = n});
        same.scores = kvp::view_bhs<const float>(scores.data(), batch, kv_heads, n);
        kvp::prefill(cpu, attending.layer(0), same, own_workspace);
        attending.advance(cpu, {batch, nullptr, nullptr, n});
        std::vector<float> theirs(attended.size());
        thrust::copy(attended.begin(), attended.end(), theirs.begin());
        for (std::size_t i = 0; i < out.size(); ++i) {
            off = std::fmax(off, std::fabs(theirs[i] - static_cast<float>(out[i])));
        }
        t += n;
    }
    for (int h = 0; h < kv_heads; ++h) {
        std::printf("head %d: %d entries after %d tokens\n", h, cache.usage(ctx, 0, 0, h).size(), tokens);
    }
    std::printf("%s\n", off < 0.03f ? "the same outputs" : "other outputs");
}

// Prints:
// head 0: 52 entries after 222 tokens
// head 1: 132 entries after 222 tokens
// the same outputs
