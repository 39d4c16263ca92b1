// Results as a table, as CSV and as JSON.
#pragma once

#include "measure.hpp"

#include <filesystem>
#include <span>
#include <string>

namespace evaluate {

/// What all results have in common.
struct Run {
    std::string model;
    std::int32_t sequences = 0, length = 0, sinks = 0, window = 0, layers = 0, kv_heads = 0, head_dim = 0;
    /// 0.75 for a quarter of the dense rows, by the budget or as gates have it; 0 without either.
    double compression(const Result& result) const {
        if (result.policy->gates != nullptr) {
            return 1.0 - result.score.rows_per_head() / length;
        }
        return result.budget == 0 ? 0.0 : 1.0 - static_cast<double>(result.budget) / length;
    }
};

std::string table(const Run& run, std::span<const Result> results);
void write_csv(const std::filesystem::path& file, const Run& run, std::span<const Result> results);
/// Also rows by layer and head, what is kept by position, and oracle recall.
void write_json(const std::filesystem::path& file, const Run& run, std::span<const Result> results);

}  // namespace evaluate
