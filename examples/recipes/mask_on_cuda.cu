// mask_for_training.cpp's first step on a GPU: the same call with another context gives the same integers.
//
// Tensors are device memory, the policy is host memory. Nothing is allocated and nothing waited for inside
// the call, so it can be captured in a graph.
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include <cuda_runtime.h>

#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

using Policy = kvp::Policy<kvp::Sink<4>, kvp::Window<32>, kvp::ThresholdGate<kvp::at_least>>;

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    constexpr int heads = 8, tokens = 4096;
    const Policy policy{{}, {}, kvp::ThresholdGate<kvp::at_least>::probability(0.9)};
    const kvp::Sequences sequences{1, tokens};
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> scores(heads * tokens);
    for (float& score : scores) {
        score = 2.0f * normal(generator);
    }

    // On the host.
    std::vector<kvp::expiry_t> expected(scores.size()), expiry(scores.size());
    const kvp::host host_ctx{2};
    kvp::Buffer scratch{host_ctx, kvp::build_mask_workspace_bytes(host_ctx, policy, sequences, heads)};
    kvp::build_mask(host_ctx, policy, kvp::view_bhs<const float>(scores.data(), 1, heads, tokens), sequences,
                    kvp::view_bhs(expected.data(), 1, heads, tokens), scratch);

    // On the device.
    const kvp::cuda ctx{};  // the default stream; kvp::cuda{stream} is another
    const std::size_t bytes = kvp::build_mask_workspace_bytes(ctx, policy, sequences, heads);
    float* device_scores = nullptr;
    kvp::expiry_t* device_expiry = nullptr;
    void* workspace = nullptr;
    cudaMalloc(&device_scores, sizeof(float) * scores.size());
    cudaMalloc(&device_expiry, sizeof(kvp::expiry_t) * expiry.size());
    cudaMalloc(&workspace, bytes);
    cudaMemcpy(device_scores, scores.data(), sizeof(float) * scores.size(), cudaMemcpyHostToDevice);
    kvp::build_mask(ctx, policy, kvp::view_bhs<const float>(device_scores, 1, heads, tokens), sequences,
                    kvp::view_bhs(device_expiry, 1, heads, tokens), {workspace, bytes});
    cudaMemcpy(expiry.data(), device_expiry, sizeof(kvp::expiry_t) * expiry.size(), cudaMemcpyDeviceToHost);
    std::printf("%s\n", expiry == expected ? "the same integers" : "other integers");
    cudaFree(workspace), cudaFree(device_expiry), cudaFree(device_scores);
    return expiry == expected ? 0 : 1;
}

// Prints:
// the same integers
