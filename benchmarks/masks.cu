// build_mask on CUDA: ranks, running cutoffs and expiries of a policy's whole mask, everything included. Scores are those
// of benchmarks/baselines/masks.py, bit for bit. Every timed call finds cold caches: a buffer of several times the L2 cache
// is overwritten before it, outside of the timing. Times are CUDA events on the stream; median_ms is the number to read.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

namespace kvp = kvpolicy;

namespace {

void ok(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
        std::exit(1);
    }
}

enum class order { random, equal, improving, worsening, jump, level };

/// A score in [-4, 4) from its index: the same integers in C++ and in the baseline.
__device__ float hashed(std::uint32_t i) {
    std::uint32_t x = i * 2654435761u + 12345u;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
    return static_cast<float>(x >> 8) * 0x1p-21f - 4.0f;
}

__global__ void fill(float* scores, std::int64_t count, std::int32_t length, int kind, float log_gamma) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    const auto t = static_cast<std::int32_t>(i % length);
    const auto step = static_cast<float>(t);
    float x = hashed(static_cast<std::uint32_t>(i));
    switch (static_cast<order>(kind)) {
        case order::random:
            break;
        case order::equal:
            x = 1.5f;
            break;
        case order::improving:
            x = 0.25f * step;
            break;
        case order::worsening:
            x = -0.25f * step;
            break;
        case order::jump:
            x = t < length / 2 ? x : step;
            break;
        case order::level:
            x = 1000.0f + step * log_gamma;
            break;  // priorities that fp32 cannot tell apart
    }
    scores[i] = x;
}

/// Device memory for as long as the program runs.
template <class T>
T* device(std::int64_t count) {
    void* memory = nullptr;
    ok(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)));
    return static_cast<T*>(memory);
}

constexpr std::size_t flushed_bytes = std::size_t{256} << 20;

/// Times `call` with cold caches; `state` gets the median, the least, and the workspace.
template <class Call>
void measure(benchmark::State& state, cudaStream_t stream, const Call& call, std::size_t workspace_bytes) {
    if (std::getenv("KVPOLICY_BENCH_PROFILE") != nullptr) {  // one call, for a profiler to look at
        call();
        ok(cudaStreamSynchronize(stream));
        for (auto _ : state) {
            state.SetIterationTime(1e-9);
        }
        return;
    }
    static void* const flushed = device<unsigned char>(flushed_bytes);
    cudaEvent_t begin = nullptr, end = nullptr;
    ok(cudaEventCreate(&begin));
    ok(cudaEventCreate(&end));
    for (int i = 0; i < 3; ++i) {
        call();
    }
    ok(cudaStreamSynchronize(stream));
    // One graph of the call, so that what the host needs to enqueue it is not in the time.
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call();
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&ready, graph, 0));
    std::vector<double> times, direct;
    const auto once = [&](bool by_graph) {
        ok(cudaMemsetAsync(flushed, 1, flushed_bytes, stream));
        ok(cudaEventRecord(begin, stream));
        if (by_graph) {
            ok(cudaGraphLaunch(ready, stream));
        } else {
            call();
        }
        ok(cudaEventRecord(end, stream));
        ok(cudaEventSynchronize(end));
        float ms = 0.0f;
        ok(cudaEventElapsedTime(&ms, begin, end));
        return static_cast<double>(ms);
    };
    for (auto _ : state) {
        times.push_back(once(true));
        direct.push_back(once(false));
        state.SetIterationTime(times.back() * 1e-3);
    }
    const auto median = [](std::vector<double> of) {
        std::nth_element(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2), of.end());
        return of[of.size() / 2];
    };
    state.counters["median_ms"] = median(times);
    state.counters["min_ms"] = *std::min_element(times.begin(), times.end());
    state.counters["median_ms_without_graph"] = median(direct);
    state.counters["workspace_bytes"] = static_cast<double>(workspace_bytes);
    ok(cudaGraphExecDestroy(ready));
    ok(cudaGraphDestroy(graph));
    ok(cudaEventDestroy(begin));
    ok(cudaEventDestroy(end));
}

struct shape {
    std::int32_t batch, heads, length;
    [[nodiscard]] std::int64_t count() const { return std::int64_t{batch} * heads * length; }
};

/// Scores and masks of one shape at a time.
struct tensors {
    float* scores = nullptr;
    kvp::expiry_t* expiry = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;

    tensors(const shape& of, order kind, float log_gamma, std::size_t bytes) : workspace_bytes(bytes) {
        scores = device<float>(of.count());
        expiry = device<kvp::expiry_t>(of.count());
        ok(cudaMalloc(&workspace, bytes == 0 ? 1 : bytes));
        fill<<<static_cast<unsigned>((of.count() + 255) / 256), 256>>>(scores, of.count(), of.length,
                                                                       static_cast<int>(kind), log_gamma);
        ok(cudaGetLastError());
        ok(cudaDeviceSynchronize());
    }
    tensors(const tensors&) = delete;
    tensors& operator=(const tensors&) = delete;
    ~tensors() {
        ok(cudaFree(scores));
        ok(cudaFree(expiry));
        ok(cudaFree(workspace));
    }
};

class stream_of_calls {
  public:
    stream_of_calls() { ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    stream_of_calls(const stream_of_calls&) = delete;
    stream_of_calls& operator=(const stream_of_calls&) = delete;
    ~stream_of_calls() { ok(cudaStreamDestroy(stream)); }
    cudaStream_t stream = nullptr;
};

template <class P>
void mask(benchmark::State& state, const P& policy, const shape& of, order kind, float log_gamma) {
    const stream_of_calls calls;
    const kvp::cuda on{calls.stream};
    const kvp::Sequences sequences{of.batch, of.length};
    const tensors data(of, kind, log_gamma, kvp::build_mask_workspace_bytes(on, policy, sequences, of.heads));
    measure(
        state, calls.stream,
        [&] {
            kvp::build_mask(on, policy,
                            kvp::view_bhs<const float>(data.scores, of.batch, of.heads, of.length), sequences,
                            kvp::view_bhs(data.expiry, of.batch, of.heads, of.length),
                            {data.workspace, data.workspace_bytes});
        },
        data.workspace_bytes);
}

/// The block sort alone, in sizes that tuning may choose from.
template <int Threads, int Items, int Bits>
void sort_variant(benchmark::State& state, const shape& of, float log_gamma) {
    using namespace kvp::cuda_backend;
    const stream_of_calls calls;
    const kvp::cuda on{calls.stream};
    const tensors data(of, order::random, log_gamma, 0);
    mask_problem<kvp::detail::no_gate, kvp::detail::keep_set<>> problem{};
    problem.scores = kvp::view_bhs<const float>(data.scores, of.batch, of.heads, of.length);
    problem.batch = of.batch;
    problem.heads = of.heads;
    problem.length = of.length;
    problem.slots = (of.length + mask_chunk - 1) / mask_chunk;
    problem.rules.common = {4, 256, 3836, 1, log_gamma, 0.0f};
    const std::int64_t planes = std::int64_t{of.batch} * of.heads;
    const ranking<std::uint16_t> ranks{device<std::uint16_t>(of.count()), device<std::uint16_t>(of.count()),
                                       device<cutoff_anchor>(planes * problem.slots),
                                       device<std::int32_t>(planes)};
    measure(
        state, calls.stream, [&] { launch_rank_block<Threads, Items, Bits>(on, problem, ranks, false); }, 0);
    ok(cudaFree(ranks.rank));
    ok(cudaFree(ranks.order));
    ok(cudaFree(ranks.anchors));
    ok(cudaFree(ranks.competitors));
}

template <class Body>
void add(const std::string& name, const Body& body) {
    benchmark::RegisterBenchmark(name.c_str(), body)
        ->UseManualTime()
        ->Iterations(40)
        ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) {
    using Budget = kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::TopKBudget<>, kvp::Decay<1>>;
    using Capped =
        kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::ThresholdGate<kvp::above>, kvp::TopKBudget<>>;
    using Gated = kvp::Policy<kvp::Window<256>, kvp::ThresholdGate<kvp::at_least>>;
    const auto budget = [](std::int32_t k, float log_gamma) {
        return Budget(kvp::Sink<4>{}, kvp::Window<256>{}, kvp::TopKBudget<>{k}, kvp::Decay<1>(log_gamma));
    };
    const struct {
        const char* name;
        shape of;
    } shapes[] = {{"16k x 8", {1, 8, 16384}}, {"16k x 1024", {128, 8, 16384}}, {"1M x 8", {1, 8, 1 << 20}}};
    for (const auto& [name, of] : shapes) {
        const shape s = of;
        const std::string prefix = std::string("mask/") + name + "/";
        add(prefix + "random",
            [=](benchmark::State& state) { mask(state, budget(3836, 0.0f), s, order::random, 0.0f); });
        add(prefix + "random, decay",
            [=](benchmark::State& state) { mask(state, budget(3836, -1e-3f), s, order::random, -1e-3f); });
        const struct {
            const char* text;
            order kind;
            std::int32_t k;
            float log_gamma;
        } hard[] = {{"equal", order::equal, 3836, 0.0f},
                    {"improving", order::improving, 3836, 0.0f},
                    {"worsening", order::worsening, 3836, 0.0f},
                    {"jump", order::jump, 3836, 0.0f},
                    {"improving, k 100", order::improving, 100, 0.0f},
                    {"jump, k 100", order::jump, 100, 0.0f},
                    {"equal, decay", order::equal, 3836, -1e-3f},
                    {"priorities level beyond fp32, decay", order::level, 3836, -1e-3f}};
        for (const auto& [text, kind, k, log_gamma] : hard) {
            const auto policy = budget(k, log_gamma);
            const order which = kind;
            const float decay = log_gamma;
            add(prefix + text, [=](benchmark::State& state) { mask(state, policy, s, which, decay); });
        }
        add(prefix + "capped gate", [=](benchmark::State& state) {
            mask(state,
                 Capped(kvp::Sink<4>{}, kvp::Window<256>{}, kvp::ThresholdGate<kvp::above>(2.0f),
                        kvp::TopKBudget<>{512}),
                 s, order::random, 0.0f);
        });
        add(prefix + "gate", [=](benchmark::State& state) {
            mask(state, Gated(kvp::Window<256>{}, kvp::ThresholdGate<kvp::at_least>(2.0f)), s, order::random,
                 0.0f);
        });
    }
    // How time grows with tokens and with heads.
    const struct {
        const char* name;
        shape of;
    } sizes[] = {{"16k x 64", {8, 8, 1 << 14}},     {"16k x 256", {32, 8, 1 << 14}},
                 {"16k x 4096", {512, 8, 1 << 14}}, {"64k x 8", {1, 8, 1 << 16}},
                 {"256k x 8", {1, 8, 1 << 18}},     {"4M x 8", {1, 8, 1 << 22}},
                 {"1M x 1", {1, 1, 1 << 20}},       {"1M x 32", {4, 8, 1 << 20}}};
    for (const auto& [name, of] : sizes) {
        const shape s = of;
        add(std::string("growth/") + name,
            [=](benchmark::State& state) { mask(state, budget(3836, 0.0f), s, order::random, 0.0f); });
    }
    add("mask/16k x 1/decay step 64", [=](benchmark::State& state) {
        mask(state,
             kvp::Policy<kvp::Window<256>, kvp::TopKBudget<>, kvp::Decay<64>>(
                 kvp::Window<256>{}, kvp::TopKBudget<>{3836}, kvp::Decay<64>(-1e-2f)),
             shape{1, 1, 16384}, order::random, 0.0f);
    });
    for (const std::int32_t batch : {1, 128}) {
        const shape s{batch, 8, 16384};
        const std::string prefix = "block sort/16k x " + std::to_string(8 * batch) + "/";
        for (const float g : {0.0f, -1e-3f}) {
            const std::string end = g == 0.0f ? "" : ", decay";
            add(prefix + "1024 x 16, 4 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 4>(state, s, g); });
            add(prefix + "1024 x 16, 5 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 5>(state, s, g); });
            add(prefix + "1024 x 16, 6 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 6>(state, s, g); });
            add(prefix + "512 x 32, 4 bits" + end,
                [=](benchmark::State& state) { sort_variant<512, 32, 4>(state, s, g); });
            add(prefix + "512 x 32, 6 bits" + end,
                [=](benchmark::State& state) { sort_variant<512, 32, 6>(state, s, g); });
        }
    }
    benchmark::Initialize(&argc, argv);
    benchmark::AddCustomContext("caches", "cold: 256 MB are written before every timed call");
    cudaDeviceProp card{};
    if (cudaGetDeviceProperties(&card, 0) == cudaSuccess) {
        benchmark::AddCustomContext("card", card.name);
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
