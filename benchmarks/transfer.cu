// Moving layers of a sequence between a device and pinned host memory: save_layer and load_layer, straight
// over the bus and through device memory with a copy, beside a snapshot. 32 layers of 8 heads with 4096
// entries of head_dim 128 in bf16, 550 MB. "bytes_per_second" is that of what is saved.
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/dispatch_transfer.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

namespace kvp = kvpolicy;
using kvp::bf16;
using Policy = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>>;

constexpr std::int32_t layers = 32, heads = 8, dim = 128, sinks = 4, window = 256, rows = 4096;
constexpr std::int64_t entries = std::int64_t{heads} * rows;

void ok(cudaError_t error) {
    if (error != cudaSuccess) {
        std::abort();
    }
}

constexpr kvp::CacheShape shape{.layers = layers,
                                .max_sequences = 2,
                                .query_heads = 4 * heads,
                                .kv_heads = heads,
                                .head_dim = dim,
                                .page_size = 16};

/// A cache whose sequence 0 is full.
template <class Cache>
struct Full {
    Cache cache;
    kvp::cuda ctx{};
    std::size_t bytes = 0;  // of a layer
    void *memory = nullptr, *slab = nullptr, *pinned = nullptr, *staged = nullptr;

    template <class... Pool>
    explicit Full(const Policy& policy, const Pool&... pool) : cache(shape, pool..., policy) {
        ok(cudaMalloc(&memory, cache.bytes().total()));
        cache.bind(ctx, memory, cache.bytes().total());
        if constexpr (Cache::ref_type::pooled) {
            ok(cudaMalloc(&slab, cache.slab_bytes()));
            cache.add_slab(ctx, slab, cache.slab_bytes());
        }
        bytes = kvp::layer_bytes(cache.layer(0), entries);
        ok(cudaMallocHost(&pinned, bytes * layers));
        ok(cudaMalloc(&staged, bytes * layers));
        std::memset(pinned, 0, bytes * layers);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            auto* const to = static_cast<unsigned char*>(at(pinned, layer));
            const auto header = kvp::detail::header_of(cache.layer(layer), rows, entries);
            std::memcpy(to, &header, sizeof header);
            for (std::int32_t head = 0; head < heads; ++head) {
                const kvp::detail::layer_head one{sinks, window, rows - sinks - window, 0};
                std::memcpy(to + sizeof header + static_cast<std::size_t>(head) * sizeof one, &one,
                            sizeof one);
            }
        }
        load();
        ok(cudaDeviceSynchronize());
    }
    ~Full() {
        static_cast<void>(cudaFree(memory));
        static_cast<void>(cudaFree(slab));
        static_cast<void>(cudaFree(staged));
        static_cast<void>(cudaFreeHost(pinned));
    }
    Full(const Full&) = delete;
    Full& operator=(const Full&) = delete;

    [[nodiscard]] void* at(void* first, std::int32_t layer) const {
        return static_cast<unsigned char*>(first) + static_cast<std::size_t>(layer) * bytes;
    }
    void save() {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            kvp::save_layer(ctx, cache.layer(layer), 0, at(pinned, layer), bytes);
        }
    }
    void load() {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            kvp::load_layer(ctx, cache.layer(layer), 0, at(pinned, layer), bytes);
        }
    }
    void save_staged() {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            kvp::save_layer(ctx, cache.layer(layer), 0, at(staged, layer), bytes);
            ok(cudaMemcpyAsync(at(pinned, layer), at(staged, layer), bytes, cudaMemcpyDefault, ctx.stream));
        }
    }
    void load_staged() {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            ok(cudaMemcpyAsync(at(staged, layer), at(pinned, layer), bytes, cudaMemcpyDefault, ctx.stream));
            kvp::load_layer(ctx, cache.layer(layer), 0, at(staged, layer), bytes);
        }
    }
    void snapshot() {
        blob.resize(cache.snapshot_bytes(ctx, 0));
        cache.snapshot(ctx, 0, blob.data(), blob.size());
    }
    std::vector<unsigned char> blob;
};

template <class Cache>
std::unique_ptr<Full<Cache>> full() {
    constexpr std::int32_t budget = rows - sinks - window;
    if constexpr (Cache::ref_type::pooled) {
        return std::make_unique<Full<Cache>>(
            Policy{kvp::Sink<>{sinks}, kvp::Window<>{window}, kvp::TopKBudget<>{kvp::unlimited}},
            kvp::PoolShape{
                .slab_pages = 2 * layers * heads * rows / 16, .max_slabs = 1, .max_seq_len = rows});
    } else {
        return std::make_unique<Full<Cache>>(
            Policy{kvp::Sink<>{sinks}, kvp::Window<>{window}, kvp::TopKBudget<>{budget}});
    }
}

template <class Cache, void (Full<Cache>::*Move)()>
void run(benchmark::State& state) {
    const auto of = full<Cache>();
    ((*of).*Move)();
    ok(cudaDeviceSynchronize());
    for (auto _ : state) {
        ((*of).*Move)();
        ok(cudaDeviceSynchronize());
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * layers *
                            static_cast<std::int64_t>(of->bytes));
}

using Fixed = kvp::FixedBudgetCache<Policy, bf16>;
using Dual = kvp::DualCache<Policy, bf16>;

template <class Cache>
void add(const std::string& kind) {
    const auto row = [&](const char* name, void (*function)(benchmark::State&)) {
        benchmark::RegisterBenchmark((name + ("/" + kind)).c_str(), function)
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
    };
    row("save", run<Cache, &Full<Cache>::save>);
    row("save, staged", run<Cache, &Full<Cache>::save_staged>);
    row("load", run<Cache, &Full<Cache>::load>);
    row("load, staged", run<Cache, &Full<Cache>::load_staged>);
    row("snapshot", run<Cache, &Full<Cache>::snapshot>);
}

}  // namespace

int main(int argc, char** argv) {
    add<Fixed>("contiguous");
    add<Dual>("paged");
    benchmark::Initialize(&argc, argv);
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
