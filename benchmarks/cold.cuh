// What the CUDA benchmarks share: calls timed with cold caches, device memory, and numbers that a baseline in
// another language makes bit for bit the same.
//
// Every timed call finds cold caches: a buffer of several times the L2 cache is overwritten before it,
// outside of the timing. Times are CUDA events on the stream; median_ms is the number to read.
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

/// A call as a graph, so that what the host needs to enqueue it is not in the time. It must have been made
/// once before, which loads its kernels.
class captured {
  public:
    template <class Call>
    captured(cudaStream_t stream, const Call& call) : stream_(stream) {
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        call();
        ok(cudaStreamEndCapture(stream, &graph_));
        ok(cudaGraphInstantiate(&ready_, graph_, 0));
    }
    captured(const captured&) = delete;
    captured& operator=(const captured&) = delete;
    ~captured() {
        ok(cudaGraphExecDestroy(ready_));
        ok(cudaGraphDestroy(graph_));
    }
    void operator()() const { ok(cudaGraphLaunch(ready_, stream_)); }

  private:
    cudaStream_t stream_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t ready_ = nullptr;
};

/// Milliseconds of what is enqueued on a stream.
class stopwatch {
  public:
    explicit stopwatch(cudaStream_t stream) : stream_(stream) {
        ok(cudaEventCreate(&begin_));
        ok(cudaEventCreate(&end_));
    }
    stopwatch(const stopwatch&) = delete;
    stopwatch& operator=(const stopwatch&) = delete;
    ~stopwatch() {
        ok(cudaEventDestroy(begin_));
        ok(cudaEventDestroy(end_));
    }
    template <class Call>
    [[nodiscard]] double time(const Call& call) const {
        ok(cudaEventRecord(begin_, stream_));
        call();
        ok(cudaEventRecord(end_, stream_));
        ok(cudaEventSynchronize(end_));
        float ms = 0.0f;
        ok(cudaEventElapsedTime(&ms, begin_, end_));
        return static_cast<double>(ms);
    }

  private:
    cudaStream_t stream_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

inline double median_of(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                     times.end());
    return times[times.size() / 2];
}

inline constexpr std::size_t flushed_bytes = std::size_t{256} << 20;

/// Times `call`; `state` gets the median, the least, and the workspace. `before` runs before every call,
/// outside of the timing.
template <class Call, class Before>
void measure(benchmark::State& state, cudaStream_t stream, const Call& call, std::size_t workspace_bytes,
             const Before& before) {
    if (std::getenv("KVPOLICY_BENCH_PROFILE") != nullptr) {  // one call, for a profiler to look at
        before();
        call();
        ok(cudaStreamSynchronize(stream));
        for (auto _ : state) {
            state.SetIterationTime(1e-9);
        }
        return;
    }
    static void* const flushed = device<unsigned char>(flushed_bytes);
    for (int i = 0; i < 3; ++i) {
        before();
        call();
    }
    ok(cudaStreamSynchronize(stream));
    const captured graph(stream, call);
    const stopwatch watch(stream);
    std::vector<double> times, direct;
    const auto cold = [&](const auto& made) {
        before();
        ok(cudaMemsetAsync(flushed, 1, flushed_bytes, stream));
        return watch.time(made);
    };
    for (auto _ : state) {
        times.push_back(cold(graph));
        direct.push_back(cold(call));
        state.SetIterationTime(times.back() * 1e-3);
    }
    state.counters["median_ms"] = median_of(times);
    state.counters["min_ms"] = *std::min_element(times.begin(), times.end());
    state.counters["median_ms_without_graph"] = median_of(direct);
    state.counters["workspace_bytes"] = static_cast<double>(workspace_bytes);
}
template <class Call>
void measure(benchmark::State& state, cudaStream_t stream, const Call& call, std::size_t workspace_bytes) {
    measure(state, stream, call, workspace_bytes, [] {});
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
    cudaDeviceProp gpu{};
    if (cudaGetDeviceProperties(&gpu, 0) == cudaSuccess) {
        benchmark::AddCustomContext("card", gpu.name);
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}

}  // namespace bench
