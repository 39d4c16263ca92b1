// What a cache costs a model: bits per byte, retrieval accuracy, memory, speed.
#pragma once

#include "held_out.hpp"

#include <llama/cache_attention.hpp>
#include <llama/engine.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace examples {

/// Feeds one held-out sequence through `attention` in chunks and scores the predictions; with a `prompt`
/// its tokens come in one call instead, and those after it one by one. The attention must be empty:
/// fresh, or cleared.
template <llama::AttentionFunction AttentionParams>
void run_sequence(llama::Engine& engine, AttentionParams&& attention, const HeldOut& data,
                  std::size_t sequence, std::int32_t chunk, SequenceScorer& scorer, std::int32_t prompt = 0) {
    const std::vector<std::int32_t>& tokens = data.tokens[sequence];
    std::vector<std::int64_t> positions(static_cast<std::size_t>(data.length));
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    for (std::int32_t begin = 0, size = 0; begin < data.length; begin += size) {
        size = std::min(prompt == 0 ? chunk : begin == 0 ? prompt : 1, data.length - begin);
        const auto count = static_cast<std::size_t>(size);
        const auto at = static_cast<std::size_t>(begin);
        const auto logits =
            engine.forward(std::span(tokens).subspan(at, count), std::span(positions).subspan(at, count),
                           attention, llama::Logits::all);
        scorer.take(logits, begin, size, engine.model().config.vocab_size);
    }
}

/// Decode speed with the cache as it is: `steps` greedy tokens after what was fed. Tokens a second.
double decode_speed(llama::Engine& engine, llama::KvAttention& attention, std::int32_t first_token,
                    std::int32_t steps);

}  // namespace examples
