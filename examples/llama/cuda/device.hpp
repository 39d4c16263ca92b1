// What the CUDA backend of this engine owns on a GPU: memory, a stream, a graph. Every failing call throws.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace llama {

/// Throws std::runtime_error with the call's name and CUDA's own text.
inline void ok(cudaError_t error, const char* call) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + ", " +
                                 cudaGetErrorString(error));
    }
}

/// Device memory of so many elements, with whatever was in it.
template <class T>
class DeviceArray {
  public:
    DeviceArray() = default;
    explicit DeviceArray(std::size_t count) : count_(count) {
        if (count > 0) {
            void* data = nullptr;
            ok(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
            data_ = static_cast<T*>(data);
        }
    }
    explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) {
        if (!values.empty()) {
            ok(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
        }
    }
    DeviceArray(DeviceArray&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    DeviceArray& operator=(DeviceArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~DeviceArray() { static_cast<void>(cudaFree(data_)); }

    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }

  private:
    T* data_ = nullptr;
    std::size_t count_ = 0;
};

/// Host memory that a kernel can write to while the host reads it.
template <class T>
class SharedArray {
  public:
    explicit SharedArray(std::size_t count) : count_(count) {
        void* data = nullptr;
        ok(cudaHostAlloc(&data, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable),
           "cudaHostAlloc");
        data_ = static_cast<T*>(data);
    }
    SharedArray(const SharedArray&) = delete;
    SharedArray& operator=(const SharedArray&) = delete;
    ~SharedArray() { static_cast<void>(cudaFreeHost(data_)); }

    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }

  private:
    T* data_ = nullptr;
    std::size_t count_;
};

/// A stream of its own, so that it can be captured.
class Stream {
  public:
    Stream() {
        int devices = 0;
        const cudaError_t error = cudaGetDeviceCount(&devices);
        if (error != cudaSuccess || devices == 0) {
            throw std::runtime_error(std::string("there is no CUDA device: ") + cudaGetErrorString(error));
        }
        ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }

    [[nodiscard]] cudaStream_t get() const { return stream_; }
    void wait() const { ok(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  private:
    cudaStream_t stream_ = nullptr;
};

/// Work that was enqueued once and can be launched any number of times.
class Graph {
  public:
    Graph() = default;
    Graph(Graph&& other) noexcept : ready_(std::exchange(other.ready_, nullptr)) {}
    Graph& operator=(Graph&& other) noexcept {
        std::swap(ready_, other.ready_);
        return *this;
    }
    ~Graph() {
        if (ready_ != nullptr) {
            static_cast<void>(cudaGraphExecDestroy(ready_));
        }
    }

    /// Captures what enqueue() puts on the stream.
    template <class Enqueue>
    static Graph capture(cudaStream_t stream, const Enqueue& enqueue) {
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        cudaGraph_t recorded = nullptr;
        try {
            enqueue();
        } catch (...) {
            static_cast<void>(cudaStreamEndCapture(stream, &recorded));  // the stream is usable again
            static_cast<void>(cudaGraphDestroy(recorded));
            throw;
        }
        ok(cudaStreamEndCapture(stream, &recorded), "cudaStreamEndCapture");
        Graph graph;
        const cudaError_t error = cudaGraphInstantiate(&graph.ready_, recorded, 0);
        static_cast<void>(cudaGraphDestroy(recorded));
        ok(error, "cudaGraphInstantiate");
        return graph;
    }
    void launch(cudaStream_t stream) const { ok(cudaGraphLaunch(ready_, stream), "cudaGraphLaunch"); }
    [[nodiscard]] bool empty() const { return ready_ == nullptr; }

  private:
    cudaGraphExec_t ready_ = nullptr;
};

}  // namespace llama
