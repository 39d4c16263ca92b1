// Scorers of a file with their weights in device memory.
#pragma once

#include "scorers.hpp"

#include <llama/cuda/device.hpp>

#include <span>
#include <vector>

namespace examples {

/// The scorers of all layers; `memory` gets the arrays that they point to.
template <class S>
std::vector<S> on_device(const ScorerStack<S>& stack, std::vector<llama::DeviceArray<float>>& memory) {
    std::vector<S> scorers = stack.scorers;
    for (S& scorer : scorers) {
        for_each_parameter(scorer, scorer.weights,
                           [&](const char*, const float*& array, std::size_t count, bool) {
                               if (array != nullptr && count > 0) {
                                   array = memory.emplace_back(std::span<const float>(array, count)).data();
                               }
                           });
    }
    return scorers;
}

}  // namespace examples
