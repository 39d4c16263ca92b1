// Trains the scorers of all layers and KV heads on a frozen model's k, v and targets, with the library's loss and gradients.
#pragma once

#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>

#include "options.hpp"
#include "qkv.hpp"
#include "support/scorers.hpp"
#include "train/adamw.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace train {

/// Sums over layers, heads and sequences.
struct LossSums {
    double loss = 0.0;  ///< of each layer and head, averaged
    std::int64_t count = 0, kept = 0, agreed = 0;

    void add(const kvpolicy::BoundaryValue& value, double share) {
        loss += value.value * share;
        count += value.count;
        kept += value.kept;
        agreed += value.agreed;
    }
    double keep_share() const { return count == 0 ? 0.0 : double(kept) / double(count); }
    double agreement() const { return count == 0 ? 0.0 : double(agreed) / double(count); }
};

/// On held-out sequences, at one budget.
struct HeldOutNumbers {
    std::int32_t budget = 0;  ///< rows a head
    LossSums loss;
    std::vector<kvpolicy::Recall> recall;  ///< [layers, heads], means over sequences

    double mean_recall() const;
    double mean_chance() const;
};

template <class S>
class Trainer {
  public:
    using Policy =
        kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>, kvpolicy::Decay<1>>;

    /// `source` has the shape that options.spec says; `held_out` may be null.
    Trainer(const kvpolicy::host& on, const Options& options, QkvSource& source, QkvSource* held_out);

    /// From where a checkpoint left off. Refuses a checkpoint of another architecture or run.
    void resume(const std::string& file);
    void save_checkpoint(const std::string& file) const;

    /// One step of the optimiser. Throws llama::Error where the gradient is not finite.
    LossSums step();
    std::int64_t steps_done() const { return step_; }
    double last_gradient_norm() const { return gradient_norm_; }
    double next_rate() const { return schedule_.at(step_); }

    /// Held-out numbers at each budget; empty without held-out sequences.
    std::vector<HeldOutNumbers> evaluate();

    /// Rounds matrices as they will be stored; after the last step.
    void round_weights();
    /// Writes the file. `notes` go to its metadata.
    void finish(const std::map<std::string, std::string>& notes);
    const std::vector<float>& alpha() const { return alpha_; }
    const examples::ScorerStack<S>& stack() const { return stack_; }

  private:
    Policy policy(std::int32_t budget, const std::vector<float>& log_gamma) const;
    /// Scores [heads, length] of one layer.
    void score(const Example& example, std::int32_t layer, std::vector<float>& scores);
    std::size_t sequence_at(std::int64_t visit);
    void standardize_inputs();
    std::vector<float> score_quantiles();
    std::map<std::string, std::string> run_settings() const;
    kvpolicy::workspace_view room(std::size_t bytes);

    const kvpolicy::host& on_;
    const Options& options_;
    QkvSource& source_;
    QkvSource* held_out_;
    examples::ScorerStack<S> stack_;
    std::vector<float> alpha_;  // [layers, heads]; empty without decay
    AdamW optimizer_;
    Schedule schedule_;
    std::vector<typename S::template parameters<float>> gradients_;  // [layers]
    std::vector<float*> alpha_gradient_;                             // one array, or none
    std::int64_t step_ = 0;
    double gradient_norm_ = 0.0;
    std::int64_t epoch_ = -1;
    std::vector<std::uint32_t> order_;  // of the sequences in this epoch
    std::vector<unsigned char> memory_;
};

}  // namespace train
