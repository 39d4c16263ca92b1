// AdamW (train/adamw.hpp) on a CUDA device: the same step, enqueued on a stream. What it finds stays in
// device memory, so that a training loop need not wait for it.
#pragma once

#include "adamw.hpp"
#include "device.cuh"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace train {

/// What a DeviceAdamW has done, in device memory.
struct AdamWState {
    double norm = 0.0;                ///< of the last step's gradient, before clipping
    std::int64_t steps_taken = 0;     ///< steps that changed anything
    std::int64_t refused = 0;         ///< steps whose norm was not finite
    std::int64_t first_refused = -1;  ///< the first of them, by the number that the caller gave it
};

namespace adamw {

inline constexpr int threads = 256;
inline constexpr int max_blocks = 256;
inline constexpr int max_updaters = 1024;
inline constexpr int max_arrays = 24;

/// How elements decay, and their factors of the rate: array i ends at ends[i].
struct Arrays {
    std::int64_t ends[max_arrays];
    double decay[max_arrays];
    double rate[max_arrays];
    int count = 0;
};

struct Step {
    double beta1, beta2, epsilon, clip, rate;
    std::int64_t number;           // for the caller: which step it is
    const std::int64_t* examples;  // where it is given and 0, nothing changes
};

/// The sum of a block's numbers, in every thread, always in the same order. The numbers that a block hands on
/// must not be read by it before its next __syncthreads.
__device__ inline double block_sum(double x) {
    __shared__ double sums[threads / 32];
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = x;
    }
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < threads / 32; ++w) {
        sum += sums[w];
    }
    return sum;
}

/// partial[block]: squares of its elements. One order for any GPU, since the grid depends on the count alone.
static __global__ void __launch_bounds__(threads)
    squares_kernel(const float* const gradients, const std::int64_t count, double* const partial) {
    double sum = 0.0;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * threads) {
        sum += static_cast<double>(gradients[i]) * static_cast<double>(gradients[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

/// Every block adds the `parts` sums of squares up for itself; state->steps_taken is that before the step.
static __global__ void __launch_bounds__(threads)
    update_kernel(const Arrays arrays, const Step step, const std::int64_t count, const int parts,
                  const double* const partial, const AdamWState* const state, float* const parameters,
                  const float* const gradients, float* const first, float* const second) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < parts; i += threads) {
        sum += partial[i];
    }
    const double size = sqrt(block_sum(sum));
    if (!isfinite(size) || (step.examples != nullptr && *step.examples == 0)) {
        return;
    }
    const double shrink = step.clip > 0.0 && size > step.clip ? step.clip / size : 1.0;
    __shared__ double corrections[2];
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
        const double beta = threadIdx.x == 0 ? step.beta1 : step.beta2;
        corrections[threadIdx.x / 32] = 1.0 - pow(beta, static_cast<double>(state->steps_taken + 1));
    }
    __syncthreads();
    const double correct1 = corrections[0], correct2 = corrections[1];
    int array = 0;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * threads) {
        while (i >= arrays.ends[array]) {
            ++array;
        }
        const double g = shrink * static_cast<double>(gradients[i]);
        const double m = step.beta1 * static_cast<double>(first[i]) + (1.0 - step.beta1) * g;
        const double v = step.beta2 * static_cast<double>(second[i]) + (1.0 - step.beta2) * g * g;
        first[i] = static_cast<float>(m);
        second[i] = static_cast<float>(v);
        const auto p = static_cast<double>(parameters[i]);
        const double move = m / correct1 / (sqrt(v / correct2) + step.epsilon);
        parameters[i] =
            static_cast<float>(p - step.rate * arrays.rate[array] * (move + arrays.decay[array] * p));
    }
}

/// After the update, since that reads the number of steps.
static __global__ void __launch_bounds__(threads)
    count_kernel(const Step step, const int blocks, const double* const partial, AdamWState* const state) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < blocks; i += threads) {
        sum += partial[i];
    }
    const double size = sqrt(block_sum(sum));
    if (threadIdx.x != 0) {
        return;
    }
    const bool nothing = step.examples != nullptr && *step.examples == 0;
    state->norm = nothing ? 0.0 : size;
    if (nothing) {
        return;
    }
    if (isfinite(size)) {
        ++state->steps_taken;
    } else if (++state->refused == 1) {
        state->first_refused = step.number;
    }
}

}  // namespace adamw

/// Parameters, gradients and moments in one piece of device memory each, arrays one after another. Steps as
/// train::AdamW's, to the rounding of a norm summed in another order; the same bits in every run.
class DeviceAdamW {
  public:
    struct Array {
        std::size_t count;
        bool decays;
        double rate = 1.0;
    };

    DeviceAdamW(const AdamWOptions& options, const std::vector<Array>& arrays) : options_(options) {
        if (arrays.size() > adamw::max_arrays) {
            throw std::invalid_argument("DeviceAdamW: " + std::to_string(arrays.size()) +
                                        " arrays are not allowed; at most " +
                                        std::to_string(adamw::max_arrays) + " are");
        }
        for (const Array& array : arrays) {
            begins_.push_back(count_);
            count_ += array.count;
            arrays_.ends[arrays_.count] = static_cast<std::int64_t>(count_);
            arrays_.decay[arrays_.count] = array.decays ? options.weight_decay : 0.0;
            arrays_.rate[arrays_.count] = array.rate;
            ++arrays_.count;
        }
        for (DeviceArray<float>* memory : {&parameters, &gradients, &first, &second}) {
            *memory = DeviceArray<float>(count_);
        }
        state = DeviceArray<AdamWState>(1);
        partial_ = DeviceArray<double>(adamw::max_blocks);
        for (const DeviceArray<float>* memory : {&parameters, &gradients, &first, &second}) {
            memory->clear(nullptr);
        }
        set_steps_taken(0, nullptr);
        cuda_ok(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    }

    /// Where an array begins in each of the four.
    [[nodiscard]] std::size_t begin(std::size_t array) const { return begins_.at(array); }
    [[nodiscard]] std::size_t count() const { return count_; }

    void set_steps_taken(std::int64_t steps, cudaStream_t stream) const {
        AdamWState start;
        start.steps_taken = steps;
        state.put(&start, 0, 1, stream);
    }

    /// One step with what stands in `gradients`. A norm that is not finite changes nothing and is counted in
    /// `state`, as is the first such step's `number`. Where `examples`, in device memory, is given and 0 by
    /// then, nothing changes either.
    void step(double rate, std::int64_t number, const std::int64_t* examples, cudaStream_t stream) const {
        const auto count = static_cast<std::int64_t>(count_);
        const auto blocks = static_cast<int>(
            std::min<std::int64_t>((count + adamw::threads - 1) / adamw::threads, adamw::max_blocks));
        if (blocks == 0) {
            return;
        }
        const adamw::Step step{options_.beta1, options_.beta2, options_.epsilon, options_.clip,
                               rate,           number,         examples};
        adamw::squares_kernel<<<blocks, adamw::threads, 0, stream>>>(gradients.data(), count,
                                                                     partial_.data());
        // An element a thread, up to what a GPU has at once: its divisions and roots take
        // longer than its bytes.
        const auto updaters = static_cast<int>(
            std::min<std::int64_t>((count + adamw::threads - 1) / adamw::threads, adamw::max_updaters));
        adamw::update_kernel<<<updaters, adamw::threads, 0, stream>>>(
            arrays_, step, count, blocks, partial_.data(), state.data(), parameters.data(), gradients.data(),
            first.data(), second.data());
        adamw::count_kernel<<<1, adamw::threads, 0, stream>>>(step, blocks, partial_.data(), state.data());
        cuda_ok(cudaGetLastError(), "AdamW");
    }

    DeviceArray<float> parameters, gradients, first, second;
    DeviceArray<AdamWState> state;

  private:
    AdamWOptions options_;
    adamw::Arrays arrays_{};
    std::vector<std::size_t> begins_;
    std::size_t count_ = 0;
    DeviceArray<double> partial_;
};

}  // namespace train
