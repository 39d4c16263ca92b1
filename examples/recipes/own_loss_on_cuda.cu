// own_loss.cpp on a GPU: a loss of your own is a kernel that writes d_scores, between the
// library's two calls.
//
// Sixty training steps are enqueued without waiting once: scores, the loss, gradients of the weights,
// and their update.
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace kvp = kvpolicy;

constexpr int tokens = 200, dim = 8, window = 8, steps = 60;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// The mean squared distance of scores [tokens] to a target, over the keys that leave the window: value [1]
// and d_scores [tokens], both overwritten. A key that never leaves is never ranked, so its score has no
// gradient. One block; sums in one order, the same bits in every run.
__global__ void squared_distance(const float* scores, const float* target, float* d_scores, double* value) {
    __shared__ double parts[256];
    double sum = 0.0;
    for (unsigned t = threadIdx.x; t < tokens; t += blockDim.x) {
        const float off = t < tokens - window ? scores[t] - target[t] : 0.0f;
        sum += static_cast<double>(off) * off;
        d_scores[t] = 2.0f * off / (tokens - window);
    }
    parts[threadIdx.x] = sum;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            parts[threadIdx.x] += parts[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        *value = parts[0] / (tokens - window);
    }
}

// weight -= rate * gradient; the gradient begins at 0 again, since the library adds to
// gradients of parameters.
__global__ void descend(float* weight, float* gradient, float rate) {
    weight[threadIdx.x] -= rate * gradient[threadIdx.x];
    gradient[threadIdx.x] = 0.0f;
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> host_k(tokens * dim), host_v(tokens * dim), host_target(tokens);
    for (auto* rows : {&host_k, &host_v}) {
        for (float& x : *rows) {
            x = normal(generator);
        }
    }
    for (int t = 0; t < tokens; ++t) {
        host_target[t] = 2.0f * host_k[t * dim] - host_v[t * dim + 1];
    }  // what the scorer has to find
    thrust::device_vector<float> k(host_k), v(host_v), target(host_target), scores(tokens), d_scores(tokens),
        weight(2 * dim), gradient(2 * dim);
    thrust::device_vector<double> values(steps);

    const kvp::cuda ctx{};
    const kvp::Sequences sequences{.batch = 1, .length = tokens};
    const auto keys = kvp::view_bhsd<const float>(raw(k), 1, 1, tokens, dim);
    const auto rows = kvp::view_bhsd<const float>(raw(v), 1, 1, tokens, dim);
    const kvp::LinearScorer<dim> scorer{.heads = 1, .weights = {.weight = raw(weight)}};
    const kvp::ScoreBackward<float> call{keys, rows, sequences, 0,
                                         kvp::view_bhs<const float>(raw(d_scores), 1, 1, tokens)};
    thrust::device_vector<unsigned char> scratch(
        std::max(kvp::score_sequence_workspace_bytes(ctx, scorer, keys, rows, sequences),
                 kvp::score_sequence_backward_workspace_bytes(ctx, scorer, call)));
    const kvp::workspace_view workspace{raw(scratch), scratch.size()};
    for (int step = 0; step < steps; ++step) {
        kvp::score_sequence(ctx, scorer, keys, rows, sequences, 0, kvp::view_bhs(raw(scores), 1, 1, tokens),
                            workspace);
        squared_distance<<<1, 256, 0, ctx.stream>>>(raw(scores), raw(target), raw(d_scores),
                                                    raw(values) + step);
        kvp::score_sequence_backward(ctx, scorer, call, {.weight = raw(gradient)}, workspace);
        descend<<<1, 2 * dim, 0, ctx.stream>>>(raw(weight), raw(gradient), 0.2f);
    }
    const double first = values[0], last = values[steps - 1];  // these wait
    std::printf("the loss fell below a thousandth: %s\n", last < 1e-3 * first ? "yes" : "no");
    std::printf("weights of k[0] and v[1]: %.2f %.2f\n", static_cast<double>(weight[0]),
                static_cast<double>(weight[dim + 1]));
}

// Prints:
// the loss fell below a thousandth: yes
// weights of k[0] and v[1]: 2.00 -1.00
