// Trains the scorers of all layers and KV heads on a frozen model's k, v and targets, with the library's
// loss and gradients.
#pragma once

#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>

#include "checkpoint.hpp"
#include "numbers.hpp"
#include "options.hpp"
#include "qkv.hpp"
#include "support/scorers.hpp"
#include "train/adamw.hpp"

#include <llama/error.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace train {

using TrainingPolicy =
    kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>, kvpolicy::Decay<1>>;

/// Training whose numbers have left all bounds: a checkpoint of it would be of no use.
class Diverged : public llama::Error {
  public:
    using llama::Error::Error;
};

/// A loss from which on training has diverged, in units of a score: the boundary loss of a pair in the wrong
/// order is the margin between its two scores over the temperature, and scores are of the order of 1.
inline constexpr double diverged_margin = 1e3;

/// The loss as options say it, without a seed and for layer 0.
kvpolicy::BoundaryLoss loss_of(const Options& options);

/// On the host; DeviceTrainer does the same on a GPU.
template <class S>
class Trainer {
  public:
    using Policy = TrainingPolicy;

    /// `source` has the shape that options.spec says; `held_out` may be null.
    Trainer(const kvpolicy::host& ctx, const Options& options, QkvSource& source, QkvSource* held_out);

    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;
    virtual ~Trainer() = default;

    /// From where a checkpoint left off. Refuses a checkpoint of another architecture or run.
    void resume(const std::string& file);
    void save_checkpoint(const std::string& file);

    /// One step of the optimizer, which a GPU may still have to do when the call returns.
    virtual void step();
    /// Whether take() waits for nothing.
    virtual bool done() const { return true; }
    /// Sums over the steps since the last call. Throws Diverged where a gradient was not finite; a step
    /// without any decision leaves the weights as they are.
    virtual LossSums take();
    /// Throws Diverged, with layer and head, where the mean loss of these steps is NaN or too large.
    void check_converges(const LossSums& sums);
    std::int64_t steps_done() const { return step_; }
    /// Of the last step that take() has seen.
    double last_gradient_norm() const { return gradient_norm_; }
    double next_rate() const { return schedule_.at(step_); }

    /// Held-out numbers at each budget; empty without held-out sequences, and after an interrupt.
    virtual std::vector<HeldOutNumbers> evaluate();

    /// Rounds matrices as they will be stored; after the last step. restore_weights() takes it back.
    void round_weights();
    void restore_weights();
    /// Writes the file. `notes` go to its metadata.
    void finish(const std::map<std::string, std::string>& notes);
    const std::vector<float>& alpha() const { return alpha_; }
    const examples::ScorerStack<S>& stack() const { return stack_; }

  protected:
    /// Weights and moments from where steps are done to this object's arrays, and back.
    virtual void pull() {}
    virtual void push() {}
    /// The next step's budget, and its sequences and seeds.
    std::int32_t next_budget() const {
        return options_.budgets[static_cast<std::size_t>(step_) % options_.budgets.size()];
    }
    std::size_t sequence_at(std::int64_t visit);
    std::uint64_t seed_at(std::int64_t visit) const;
    /// [layers][heads, length] of a training sequence.
    virtual std::vector<std::vector<float>> scores_of(std::size_t index);
    [[noreturn]] void refuse_gradient(std::int64_t step);

    const kvpolicy::host& ctx_;
    const Options& options_;
    QkvSource& source_;
    QkvSource* held_out_;
    examples::ScorerStack<S> stack_;
    std::vector<float> alpha_;  // [layers, heads]; empty without decay
    AdamW optimizer_;
    Schedule schedule_;
    std::int64_t step_ = 0;
    double gradient_norm_ = 0.0;

  private:
    Policy policy(std::int32_t budget, const std::vector<float>& log_gamma) const;
    /// Scores [heads, length] of one layer.
    void score(const Example& example, std::int32_t layer, std::vector<float>& scores);
    void standardize_inputs();
    std::vector<float> score_quantiles();
    RunSettings run_settings() const;
    /// Where scores or gradients are not finite, or else scores are largest; "layer L, head H".
    std::string worst_head();
    kvpolicy::workspace_view workspace(std::size_t bytes);

    LossSums sums_;                                                  // since the last take()
    std::vector<typename S::template parameters<float>> gradients_;  // [layers]
    std::vector<float*> alpha_gradient_;                             // one array, or none
    std::int64_t epoch_ = -1;
    std::vector<std::uint32_t> order_;  // of the sequences in this epoch
    std::vector<unsigned char> memory_;
    std::vector<std::vector<float>> unrounded_;  // arrays of stack_ before round_weights()
    std::int32_t length_ = 0;                    // of the first sequence, which a model may have to run for
};

}  // namespace train
