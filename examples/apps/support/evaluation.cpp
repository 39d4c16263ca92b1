#include "evaluation.hpp"

#include <llama/sampler.hpp>

#include <chrono>

namespace examples {

double decode_speed(llama::Engine& engine, llama::KvAttention& attention, std::int32_t first_token,
                    std::int32_t steps) {
    llama::Sampler sample;
    std::int32_t token = first_token;
    const auto start = std::chrono::steady_clock::now();
    for (std::int32_t i = 0; i < steps; ++i) {
        const std::int64_t position = attention.length();
        token = sample(engine.forward({&token, 1}, {&position, 1}, attention));
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    return steps / time.count();
}

}  // namespace examples
