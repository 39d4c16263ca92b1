// What training and evaluation count.
#pragma once

#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/metrics/recall.hpp>

#include <cstdint>
#include <vector>

namespace train {

/// Sums over layers, heads and sequences, and over steps.
struct LossSums {
    double loss = 0.0;  ///< of each layer and head, averaged
    std::int64_t count = 0, kept = 0, agreed = 0;
    std::int64_t steps = 0;
    std::int64_t first_empty = 0;  ///< the first step without a decision to learn from; 0: none

    void add(const kvpolicy::BoundaryValue& value, double share) {
        loss += value.value * share;
        count += value.count;
        kept += value.kept;
        agreed += value.agreed;
    }
    void add(const LossSums& other) {
        loss += other.loss;
        count += other.count, kept += other.kept, agreed += other.agreed;
        steps += other.steps;
        first_empty = first_empty == 0 ? other.first_empty : first_empty;
    }
    double keep_share() const { return count == 0 ? 0.0 : double(kept) / double(count); }
    double agreement() const { return count == 0 ? 0.0 : double(agreed) / double(count); }
};

/// On held-out sequences, at one budget.
struct HeldOutNumbers {
    std::int32_t budget = 0;  ///< entries per head
    LossSums loss;
    std::vector<kvpolicy::Recall> recall;  ///< [layers, heads], means over sequences

    double mean_recall() const;
    double mean_chance() const;
    /// Adds the recall of one head of one sequence, of `sequences`.
    void add(std::size_t head, const kvpolicy::Recall& one, double sequences);
};

}  // namespace train
