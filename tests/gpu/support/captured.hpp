// A call in a graph: made once to load its kernels, captured, replayed.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>

#include "device.hpp"

#include <cuda_runtime.h>

#include <vector>

namespace test {

class Captured {
  public:
    /// call(context) enqueues what is to be captured.
    template <class Call>
    explicit Captured(const Call& call) {
        ok(cudaStreamCreate(&stream_));
        const kvpolicy::cuda ctx{stream_};
        call(ctx);  // loads the kernels, which a capture may not
        ok(cudaStreamSynchronize(stream_));
        cudaGraph_t graph = nullptr;
        ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
        call(ctx);
        ok(cudaStreamEndCapture(stream_, &graph));
        ok(cudaGraphInstantiate(&graph_, graph, 0));
        ok(cudaGraphDestroy(graph));
    }
    Captured(const Captured&) = delete;
    Captured& operator=(const Captured&) = delete;
    ~Captured() {
        static_cast<void>(cudaGraphExecDestroy(graph_));
        static_cast<void>(cudaStreamDestroy(stream_));
    }
    void replay() const {
        ok(cudaDeviceSynchronize());
        ok(cudaGraphLaunch(graph_, stream_));
        ok(cudaStreamSynchronize(stream_));
    }

  private:
    cudaStream_t stream_ = nullptr;
    cudaGraphExec_t graph_ = nullptr;
};

/// Other contents for device memory of the same size.
template <class T>
void write(const Device<T>& to, const std::vector<T>& values) {
    REQUIRE(values.size() == to.size());
    ok(cudaDeviceSynchronize());
    ok(cudaMemcpy(to.data(), values.data(), to.bytes(), cudaMemcpyHostToDevice));
}

/// Bytes that no call may count on, or keep where it should write.
template <class T>
void poison(const Device<T>& memory) {
    ok(cudaDeviceSynchronize());
    ok(cudaMemset(memory.data(), 0xa5, memory.bytes()));
}

}  // namespace test
