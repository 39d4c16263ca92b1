// Attention on CUDA for prefill and training: the forward and backward pass through lifetimes, soft gates, and the
// future-attention target. Tensors and scores are those of benchmarks/baselines/attention.py, bit for bit; lifetimes come from
// build_mask of the scores. Beside every time stand exact live-pair FLOPs (4 D a pair forward, 10 D backward, 2 D without
// values), the rate that they make, and the bytes that a call needs beyond its tensors.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cold.cuh"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvp = kvpolicy;

namespace {

using namespace bench;
using kvp::bf16;

struct shape {
    std::int32_t batch, length, dim;
    static constexpr std::int32_t heads = 8, group = 4;
    [[nodiscard]] std::int32_t query_heads() const { return heads * group; }
    [[nodiscard]] std::int64_t keys() const { return std::int64_t{batch} * heads * length; }
    [[nodiscard]] std::int64_t queries() const { return keys() * group; }
};

__global__ void fill_normal(bf16* to, std::int64_t count, std::uint32_t seed) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = bf16(0.433f * hashed(static_cast<std::uint32_t>(i) + seed));  // variance 1
    }
}

unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

/// Numbers that a baseline makes too: each tensor has a seed.
struct rows {
    buffer<bf16> memory;
    shape of;
    std::int32_t heads;

    rows(const shape& s, std::int32_t head_count, std::uint32_t seed)
        : memory(std::int64_t{s.batch} * head_count * s.length * s.dim), of(s), heads(head_count) {
        fill_normal<<<blocks_of(memory.count()), 256>>>(memory.data(), memory.count(), seed);
        ok(cudaGetLastError());
        ok(cudaDeviceSynchronize());
    }
    [[nodiscard]] kvp::rows_view<bf16> view() const {
        return kvp::view_bhsd(memory.data(), of.batch, heads, of.length, of.dim);
    }
    [[nodiscard]] kvp::rows_view<const bf16> read() const { return view(); }
};

void report(benchmark::State& state, double pairs, double flops_a_pair) {
    state.counters["live_pairs"] = pairs;
    const double flops = pairs * flops_a_pair;
    state.counters["flops"] = flops;
    state.counters["tflops"] = flops / state.counters["median_ms"] * 1e-9;
}

/// Runs `call(on, workspace)`, timed, with as much workspace as it needs.
template <class Call>
void measure_with_workspace(benchmark::State& state, std::size_t bytes, const Call& call) {
    const stream_of_calls calls;
    const kvp::cuda on{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
    const kvp::workspace_view workspace{memory.data(), bytes};
    measure(
        state, calls.stream, [&] { call(on, workspace); }, bytes);
}

// ---- the future-attention target -------------------------------------------------------------------------------------

constexpr std::int32_t window = 256;

void causal_lse(benchmark::State& state, const shape& s) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2);
    const buffer<float> lse(s.queries());
    const kvp::Sequences sequences{s.batch, s.length};
    measure_with_workspace(state, kvp::future_mass_workspace_bytes<bf16>(kvp::cuda{}, q.read(), k.read()),
                           [&](const kvp::cuda& on, kvp::workspace_view workspace) {
                               kvp::causal_lse<bf16>(
                                   on, {}, q.read(), k.read(), sequences,
                                   kvp::view_bhs(lse.data(), s.batch, s.query_heads(), s.length), workspace);
                           });
    const double n = s.length;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 2.0 * s.dim);
}

void future_mass(benchmark::State& state, const shape& s, const kvp::FutureMassOptions& options) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2);
    const buffer<float> lse(s.queries()), target(s.keys());
    const kvp::Sequences sequences{s.batch, s.length};
    const auto of_queries = kvp::view_bhs(lse.data(), s.batch, s.query_heads(), s.length);
    const std::size_t bytes = kvp::future_mass_workspace_bytes<bf16>(kvp::cuda{}, q.read(), k.read());
    {
        const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
        kvp::causal_lse<bf16>(kvp::cuda{}, {}, q.read(), k.read(), sequences, of_queries,
                              {memory.data(), bytes});
        ok(cudaDeviceSynchronize());
    }
    measure_with_workspace(state, bytes, [&](const kvp::cuda& on, kvp::workspace_view workspace) {
        kvp::future_mass<bf16>(on, {}, q.read(), k.read(), of_queries, sequences, options,
                               kvp::view_bhs(target.data(), s.batch, s.heads, s.length), workspace);
    });
    const double n = s.length - window;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 2.0 * s.dim);
}

void add_future_mass() {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const struct {
        const char* name;
        shape of;
        float beta;
    } cases[] = {{"16k", {1, 1 << 14, 128}, 1.0f},
                 {"32k", {1, 1 << 15, 128}, 1.0f},
                 {"16k, beta 2", {1, 1 << 14, 128}, 2.0f},
                 {"16k, beta 7.5", {1, 1 << 14, 128}, 7.5f},
                 {"16k, beta infinite", {1, 1 << 14, 128}, infinity},
                 {"16k, d 64", {1, 1 << 14, 64}, 1.0f},
                 {"8 x 4k", {8, 1 << 12, 128}, 1.0f},
                 {"32 x 2k", {32, 1 << 11, 128}, 1.0f}};
    for (const auto& c : cases) {
        kvp::FutureMassOptions options;
        options.window = window;
        options.beta = c.beta;
        const shape s = c.of;
        add(
            std::string("future mass/") + c.name,
            [=](benchmark::State& state) { future_mass(state, s, options); }, 15);
        if (c.beta == 1.0f) {
            add(
                std::string("causal lse/") + c.name, [=](benchmark::State& state) { causal_lse(state, s); },
                15);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    add_future_mass();
    return run(argc, argv);
}
