// What the CUDA benchmarks share: calls timed with cold caches, device memory, and numbers that a baseline in another
// language makes bit for bit the same.
//
// Every timed call finds cold caches: a buffer of several times the L2 cache is overwritten before it, outside of the
// timing. Times are CUDA events on the stream; median_ms is the number to read.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace bench {

inline void ok(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
        std::exit(1);
    }
}

/// A number in [-4, 4) from its index: the same integers in C++ and in a baseline.
__device__ inline float hashed(std::uint32_t i) {
    std::uint32_t x = i * 2654435761u + 12345u;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
    return static_cast<float>(x >> 8) * 0x1p-21f - 4.0f;
}

/// Device memory for as long as the program runs.
template <class T>
T* device(std::int64_t count) {
    void* memory = nullptr;
    ok(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)));
    return static_cast<T*>(memory);
}

/// Device memory for as long as this lives.
template <class T>
class buffer {
  public:
    explicit buffer(std::int64_t count) : data_(device<T>(count == 0 ? 1 : count)), count_(count) {}
    buffer(const buffer&) = delete;
    buffer& operator=(const buffer&) = delete;
    ~buffer() { ok(cudaFree(data_)); }
    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::int64_t count() const { return count_; }

  private:
    T* data_;
    std::int64_t count_;
};

class stream_of_calls {
  public:
    stream_of_calls() { ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    stream_of_calls(const stream_of_calls&) = delete;
    stream_of_calls& operator=(const stream_of_calls&) = delete;
    ~stream_of_calls() { ok(cudaStreamDestroy(stream)); }
    cudaStream_t stream = nullptr;
};

inline constexpr std::size_t flushed_bytes = std::size_t{256} << 20;

/// Times `call`; `state` gets the median, the least, and the workspace.
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

template <class Body>
void add(const std::string& name, const Body& body, int iterations = 40) {
    benchmark::RegisterBenchmark(name.c_str(), body)
        ->UseManualTime()
        ->Iterations(iterations)
        ->Unit(benchmark::kMillisecond);
}

inline int run(int argc, char** argv,
               const char* caches = "cold: 256 MB are written before every timed call") {
    benchmark::Initialize(&argc, argv);
    benchmark::AddCustomContext("caches", caches);
    cudaDeviceProp card{};
    if (cudaGetDeviceProperties(&card, 0) == cudaSuccess) {
        benchmark::AddCustomContext("card", card.name);
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}

}  // namespace bench
