// Attention over exported pages as an engine's kernel would do it, written plainly in double: entries where
// page tables say, then a chunk's own keys, through expiries.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace test {

/// Where page tables lie, and the entries that they name.
template <class T>
struct ExportedPages {
    kvpolicy::HeadPages tables;
    const T* k = nullptr;  // of page 0, where there are no slabs
    const T* v = nullptr;
    const kvpolicy::Slab<T>* slabs = nullptr;
    kvpolicy::PageStrides strides{};
    std::int32_t slab_pages = 1;
    std::int32_t page_size = 1;

    __device__ std::int32_t rows(std::int32_t sequence) const {
        const std::int32_t pages = tables.indptr[sequence + 1] - tables.indptr[sequence];
        return pages == 0 ? 0 : (pages - 1) * page_size + tables.last_page_len[sequence];
    }
    __device__ const T* key(std::int32_t sequence, std::int32_t row) const {
        const std::int32_t page = tables.indices[tables.indptr[sequence] + row / page_size];
        const T* const from = slabs != nullptr ? slabs[page / slab_pages].k : k;
        return from + page % slab_pages * strides.k_page + row % page_size * strides.k_row;
    }
    __device__ const T* value(std::int32_t sequence, std::int32_t row) const {
        const std::int32_t page = tables.indices[tables.indptr[sequence] + row / page_size];
        const T* const from = slabs != nullptr ? slabs[page / slab_pages].v : v;
        return from + page % slab_pages * strides.v_page + row % page_size * strides.v_row;
    }
};

template <class P, class T>
ExportedPages<T> exported(const kvpolicy::FixedBudgetRef<P, T>& ref, const kvpolicy::HeadPages& tables) {
    const std::int64_t size = ref.page_size;
    return {tables,
            ref.k,
            ref.v,
            nullptr,
            {size * ref.head_dim_qk, size * ref.head_dim_vo, ref.head_dim_qk, ref.head_dim_vo},
            0x7fffffff,
            ref.page_size};
}
template <class P, class T>
ExportedPages<T> exported(const kvpolicy::DualRef<P, T>& ref, const kvpolicy::HeadPages& tables) {
    return {
        tables, nullptr, nullptr, ref.pool.slabs, ref.pool.strides, ref.pool.slab_pages, ref.pool.page_size};
}

/// The engine's attention of a call of n queries per entry. `k` and `v` null: to the pages alone, which all
/// queries see.
template <class T>
struct EngineCall {
    ExportedPages<T> pages;
    kvpolicy::rows_view<const T> q{}, k{}, v{};
    kvpolicy::rows_view<T> out{};
    kvpolicy::plane_view<float> lse{};
    kvpolicy::ChunkExpiry expiry{};
    const std::int32_t* q_len = nullptr;
    std::int32_t kv_heads = 0;
    std::int32_t group = 0;
    double scale = 1.0;
};

inline constexpr int engine_threads = 128, engine_keys = 4096;

/// Grid: entries * query heads * n blocks. Block: engine_threads. At most engine_keys keys of a head.
template <class T>
__global__ void engine_attention(const EngineCall<T> call) {
    __shared__ double logits[engine_keys];
    const std::int32_t n = call.q.length, heads = call.kv_heads * call.group;
    const auto block = static_cast<std::int32_t>(blockIdx.x), thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t j = block % n, head = block / n % heads, entry = block / n / heads;
    const std::int32_t kv_head = head / call.group, sequence = entry * call.kv_heads + kv_head;
    if (j >= call.q_len[entry]) {
        return;
    }
    const std::int32_t rows = call.pages.rows(sequence), own = call.k.data == nullptr ? 0 : call.q_len[entry];
    const auto key = [&](std::int32_t i) {
        return i < rows ? call.pages.key(sequence, i) : call.k.row(entry, kv_head, i - rows);
    };
    const auto value = [&](std::int32_t i) {
        return i < rows ? call.pages.value(sequence, i) : call.v.row(entry, kv_head, i - rows);
    };
    const auto sees = [&](std::int32_t i) {
        if (call.k.data == nullptr) {
            return true;
        }
        const std::int32_t t = i - rows;
        return i < rows ? j < call.expiry.cached.head(entry, kv_head)[i]
                        : t <= j && j < call.expiry.tokens.head(entry, kv_head)[t];
    };
    const T* const q = call.q.row(entry, head, j);
    for (std::int32_t i = thread; i < rows + own; i += engine_threads) {
        double sum = -INFINITY;
        if (sees(i)) {
            sum = 0.0;
            for (std::int32_t d = 0; d < call.q.dim; ++d) {
                sum += static_cast<double>(static_cast<float>(q[d])) *
                       static_cast<double>(static_cast<float>(key(i)[d]));
            }
        }
        logits[i] = call.scale * sum;
    }
    __syncthreads();
    double largest = -INFINITY, total = 0.0;
    for (std::int32_t i = 0; i < rows + own; ++i) {
        largest = logits[i] > largest ? logits[i] : largest;
    }
    for (std::int32_t i = 0; i < rows + own; ++i) {
        total += exp(logits[i] - largest);
    }
    for (std::int32_t d = thread; d < call.out.dim; d += engine_threads) {
        double sum = 0.0;
        for (std::int32_t i = 0; i < rows + own; ++i) {
            if (sees(i)) {
                sum += exp(logits[i] - largest) * static_cast<double>(static_cast<float>(value(i)[d]));
            }
        }
        call.out.row(entry, head, j)[d] = static_cast<T>(static_cast<float>(sum / total));
    }
    if (thread == 0) {
        call.lse.head(entry, head)[j] = static_cast<float>(largest + log(total));
    }
}

/// What each exported entry gets of the only query of its sequence, with the call.lse that engine_attention
/// left: the mean or the largest weight over the query heads of its KV head. Other rows stay as they are.
///
/// Grid: entries * KV heads blocks. Block: engine_threads. Out: masses [entries, KV heads, rows].
template <class T>
__global__ void engine_masses(const EngineCall<T> call, const bool mean,
                              const kvpolicy::plane_view<float> masses) {
    const auto sequence = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t entry = sequence / call.kv_heads, kv_head = sequence % call.kv_heads;
    if (call.q_len[entry] == 0) {
        return;
    }
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.pages.rows(sequence);
         i += engine_threads) {
        double mass = 0.0;
        for (std::int32_t g = 0; g < call.group; ++g) {
            const std::int32_t head = kv_head * call.group + g;
            const T* const q = call.q.row(entry, head, 0);
            double sum = 0.0;
            for (std::int32_t d = 0; d < call.q.dim; ++d) {
                sum += static_cast<double>(static_cast<float>(q[d])) *
                       static_cast<double>(static_cast<float>(call.pages.key(sequence, i)[d]));
            }
            const double weight = exp(call.scale * sum - static_cast<double>(call.lse.head(entry, head)[0]));
            mass = mean ? mass + weight / call.group : weight > mass ? weight : mass;
        }
        masses.head(entry, kv_head)[i] = static_cast<float>(mass);
    }
}

}  // namespace test
