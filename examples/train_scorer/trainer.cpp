#include "trainer.hpp"

#include <kvpolicy/core/random.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "interrupt.hpp"
#include "support/safetensors_writer.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace train {
namespace {

constexpr std::uint64_t order_stream = 0x6f72646572000000u;
constexpr float alpha_start = 3.0f;  // near gamma_max: little decay until it is learned

template <class T>
kvpolicy::plane_view<T> plane(std::vector<std::remove_const_t<T>>& data, std::int32_t heads,
                              std::int32_t length) {
    return kvpolicy::view_bhs<T>(data.data(), 1, heads, length);
}

}  // namespace

double HeldOutNumbers::mean_recall() const {
    double sum = 0.0;
    for (const auto& r : recall) {
        sum += r.mean;
    }
    return sum / static_cast<double>(recall.size());
}

double HeldOutNumbers::mean_chance() const {
    double sum = 0.0;
    for (const auto& r : recall) {
        sum += r.chance_mean;
    }
    return sum / static_cast<double>(recall.size());
}

void HeldOutNumbers::add(std::size_t head, const kvpolicy::Recall& one, double sequences) {
    kvpolicy::Recall& sum = recall[head];
    sum.queries += one.queries;
    sum.mean += one.mean / sequences;
    sum.chance_mean += one.chance_mean / sequences;
    sum.last += one.last / sequences;
    sum.chance_last += one.chance_last / sequences;
}

kvpolicy::BoundaryLoss loss_of(const Options& options) {
    kvpolicy::BoundaryLoss loss;
    loss.temperature = options.temperature;
    loss.margin = {options.omega_min, options.margin_temperature};
    loss.balance.enabled = options.balance;
    return loss;
}

template <class S>
Trainer<S>::Trainer(const kvpolicy::host& ctx, const Options& options, QkvSource& source, QkvSource* held_out)
    : ctx_(ctx),
      options_(options),
      source_(source),
      held_out_(held_out),
      stack_(options.spec),
      optimizer_({.weight_decay = options.weight_decay, .clip = options.clip}),
      schedule_{options.rate, options.last_rate, options.warm_up, options.steps} {
    const QkvShape& shape = source.shape();
    if (held_out != nullptr) {
        QkvShape of = held_out->shape();
        of.query_heads = shape.query_heads;  // says nothing where only targets are stored
        if (of != shape) {
            llama::fail("held-out sequences have {}; the training sequences have {}", of.text(),
                        shape.text());
        }
    }
    stack_.initialize(options.seed);
    standardize_inputs();
    if (options.decay) {
        alpha_.assign(static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads),
                      alpha_start);
    }
    std::size_t next = 0;
    for (std::size_t l = 0; l < stack_.scorers.size(); ++l) {
        auto& gradients = gradients_.emplace_back();
        auto& parameters = stack_.parameters[l];
        std::vector<float*> pointers;
        for_each_parameter(stack_.scorers[l], parameters, [&](const char*, float*& array, std::size_t, bool) {
            if (array == nullptr) {
                pointers.push_back(nullptr);
                return;
            }
            auto& of = stack_.arrays[next++];
            pointers.push_back(optimizer_.add(of.name, of.data.data(), of.data.size(), of.decays));
        });
        std::size_t i = 0;
        for_each_parameter(stack_.scorers[l], gradients,
                           [&](const char*, float*& array, std::size_t, bool) { array = pointers[i++]; });
    }
    if (!alpha_.empty()) {
        alpha_gradient_.push_back(
            optimizer_.add("alpha", alpha_.data(), alpha_.size(), false, options.decay_rate));
    }
}

/// The same network on inputs with variance 1 (and mean 0, for an MLP), written into the matrices that read
/// them: keys and values differ in size by layer and dimension, and one rate has to do for all; and an
/// mLSTM's features, a softmax, start soft. The first sequence says what the sizes are.
template <class S>
void Trainer<S>::standardize_inputs() {
    const Example& example = source_.get(0);
    length_ = example.length;
    const QkvShape& shape = source_.shape();
    const std::int32_t inputs = shape.head_dim_qk + shape.head_dim_vo;
    for (std::int32_t l = 0; l < shape.layers; ++l) {
        const S& scorer = stack_.scorers[static_cast<std::size_t>(l)];
        auto& parameters = stack_.parameters[static_cast<std::size_t>(l)];
        for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
            for (std::int32_t i = 0; i < inputs; ++i) {
                const bool key = i < shape.head_dim_qk;
                const auto rows = key ? example.keys(shape, l) : example.values(shape, l);
                double sum = 0.0, squares = 0.0;
                for (std::int32_t t = 0; t < example.length; ++t) {
                    const auto x = static_cast<double>(rows.row(0, h, t)[key ? i : i - shape.head_dim_qk]);
                    sum += x;
                    squares += x * x;
                }
                const double mean = sum / example.length;
                const double deviation =
                    std::sqrt(std::max(squares / example.length - mean * mean, 0.0)) + 1e-3;
                for_each_parameter(
                    scorer, parameters, [&](const char* name, float*& array, std::size_t count, bool) {
                        if (array == nullptr || !examples::reads_inputs(name)) {
                            return;
                        }
                        const std::size_t width = static_cast<std::size_t>(inputs);
                        const std::size_t lines = count / width / static_cast<std::size_t>(shape.kv_heads);
                        for (std::size_t j = 0; j < lines; ++j) {
                            const std::size_t line = static_cast<std::size_t>(h) * lines + j;
                            float& w = array[line * width + static_cast<std::size_t>(i)];
                            w = static_cast<float>(static_cast<double>(w) / deviation);
                            if constexpr (std::is_same_v<S, examples::Mlp>) {
                                parameters.b1[line] -= static_cast<float>(static_cast<double>(w) * mean);
                            }
                        }
                    });
            }
        }
    }
}

template <class S>
typename Trainer<S>::Policy Trainer<S>::policy(std::int32_t budget,
                                               const std::vector<float>& log_gamma) const {
    const examples::ScorerSpec& spec = options_.spec;
    return Policy{kvpolicy::Sink<>{spec.sinks}, kvpolicy::Window<>{spec.window},
                  kvpolicy::TopKBudget<>{kvpolicy::budget_for_total(budget, spec.sinks, spec.window)},
                  kvpolicy::Decay<1>{kvpolicy::per_head(log_gamma.data(), spec.layers, spec.heads)}};
}

template <class S>
kvpolicy::workspace_view Trainer<S>::workspace(std::size_t bytes) {
    if (memory_.size() < bytes) {
        memory_.resize(bytes);
    }
    return {memory_.data(), memory_.size()};
}

template <class S>
void Trainer<S>::score(const Example& example, std::int32_t layer, std::vector<float>& scores) {
    const QkvShape& shape = source_.shape();
    const kvpolicy::Sequences sequences{.batch = 1, .length = example.length};
    const auto k = example.keys(shape, layer), v = example.values(shape, layer);
    const S& scorer = stack_.scorers[static_cast<std::size_t>(layer)];
    scores.assign(static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(example.length), 0.0f);
    kvpolicy::score_sequence(
        ctx_, scorer, k, v, sequences, options_.spec.delay,
        plane<float>(scores, shape.kv_heads, example.length),
        workspace(kvpolicy::score_sequence_workspace_bytes(ctx_, scorer, k, v, sequences)));
}

/// Every sequence once in each epoch, in an order of its own.
template <class S>
std::size_t Trainer<S>::sequence_at(std::int64_t visit) {
    const auto count = static_cast<std::int64_t>(source_.count());
    if (visit / count != epoch_) {
        epoch_ = visit / count;
        order_.resize(source_.count());
        std::iota(order_.begin(), order_.end(), 0u);
        for (std::uint32_t i = 0; i + 1 < order_.size(); ++i) {
            const auto rest = static_cast<std::uint32_t>(order_.size()) - i;
            std::swap(
                order_[i],
                order_[i + kvpolicy::random_below(rest, options_.seed,
                                                  order_stream + static_cast<std::uint64_t>(epoch_), i)]);
        }
    }
    return order_[static_cast<std::size_t>(visit % count)];
}

template <class S>
std::uint64_t Trainer<S>::seed_at(std::int64_t visit) const {
    return kvpolicy::random_bits(options_.seed, 1, static_cast<std::uint64_t>(visit));
}

template <class S>
void Trainer<S>::refuse_gradient(std::int64_t step) {
    throw Diverged(
        fmt::format("step {}: the gradient is not finite; training has diverged at {}; a smaller "
                    "--rate or a --softcap may help",
                    step, worst_head()));
}

template <class S>
void Trainer<S>::check_converges(const LossSums& sums) {
    const double loss = sums.loss / static_cast<double>(std::max<std::int64_t>(sums.steps, 1));
    if (!(loss * static_cast<double>(options_.temperature) <= diverged_margin)) {
        throw Diverged(
            fmt::format("step {}: the loss is {:.3g}; training has diverged at {}; a smaller --rate "
                        "or a --softcap may help",
                        step_, loss, worst_head()));
    }
}

template <class S>
std::string Trainer<S>::worst_head() {
    const auto heads = static_cast<std::size_t>(source_.shape().kv_heads);
    const auto not_finite = [](float x) { return !std::isfinite(x); };
    for (const AdamW::Array& array : optimizer_.arrays) {  // layers.{l}.{name}: [heads, ...]
        const auto bad = std::ranges::find_if(array.gradient, not_finite);
        if (bad != array.gradient.end() && array.name.starts_with("layers.")) {
            const std::size_t at = static_cast<std::size_t>(bad - array.gradient.begin());
            return fmt::format("layer {}, head {}, where the gradient of {} is {}",
                               std::string_view(array.name).substr(7, array.name.find('.', 7) - 7),
                               at / (array.gradient.size() / heads), array.name, *bad);
        }
    }
    std::size_t layer = 0, head = 0;
    float largest = -1.0f;
    const std::vector<std::vector<float>> scores = scores_of(0);
    for (std::size_t l = 0; l < scores.size(); ++l) {
        const std::size_t length = scores[l].size() / heads;
        for (std::size_t i = 0; i < scores[l].size(); ++i) {
            const float size = std::fabs(scores[l][i]);
            if (size > largest || (not_finite(size) && !not_finite(largest))) {
                largest = size, layer = l, head = i / length;
            }
        }
    }
    return fmt::format("layer {}, head {}, whose scores reach {:.3g}", layer, head, largest);
}

template <class S>
LossSums Trainer<S>::take() {
    return std::exchange(sums_, {});
}

template <class S>
void Trainer<S>::step() {
    const QkvShape& shape = source_.shape();
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    const std::vector<float> log_gamma = examples::log_gammas(options_.spec, alpha_);
    const Policy all_params = policy(next_budget(), log_gamma);
    const double share = 1.0 / (shape.layers * options_.batch);

    kvpolicy::BoundaryLoss loss = loss_of(options_);
    if (options_.positions > 0) {
        loss.sampler.count = options_.positions;
    }
    loss.sampler.late = options_.late;
    loss.scale = static_cast<float>(share);

    LossSums sums;
    optimizer_.zero_gradients();
    std::vector<float> scores, d_scores;
    for (std::int32_t b = 0; b < options_.batch; ++b) {
        const std::int64_t visit = step_ * options_.batch + b;
        const Example& example = source_.get(sequence_at(visit));
        const kvpolicy::Sequences sequences{.batch = 1, .length = example.length};
        loss.sampler.seed = seed_at(visit);
        for (std::int32_t l = 0; l < shape.layers; ++l) {
            const auto at = static_cast<std::size_t>(l);
            score(example, l, scores);
            const auto bad = std::ranges::find_if(scores, [](float x) { return !std::isfinite(x); });
            if (bad != scores.end()) {
                throw Diverged(
                    fmt::format("step {}: a score of layer {}, head {} is {}; training has diverged; "
                                "a smaller --rate or a --softcap may help",
                                step_ + 1, l, (bad - scores.begin()) / example.length, *bad));
            }
            d_scores.assign(scores.size(), 0.0f);
            loss.layer = l;
            std::vector<double> d_log_gamma(heads, 0.0);
            kvpolicy::BoundaryValue value;
            loss(ctx_, all_params, plane<const float>(scores, shape.kv_heads, example.length),
                 example.targets(shape, l), sequences, plane<float>(d_scores, shape.kv_heads, example.length),
                 alpha_.empty() ? nullptr : d_log_gamma.data(), &value,
                 workspace(loss.workspace_bytes(ctx_, all_params, sequences, shape.kv_heads)));
            sums.add(value, 1.0);  // scaled already
            const kvpolicy::ScoreBackward<float> call{
                example.keys(shape, l), example.values(shape, l), sequences, options_.spec.delay,
                plane<const float>(d_scores, shape.kv_heads, example.length)};
            kvpolicy::score_sequence_backward(
                ctx_, stack_.scorers[at], call, gradients_[at],
                workspace(kvpolicy::score_sequence_backward_workspace_bytes(ctx_, stack_.scorers[at], call)));
            for (std::size_t h = 0; h < heads && !alpha_.empty(); ++h) {
                const std::size_t i = at * heads + h;
                alpha_gradient_[0][i] += static_cast<float>(
                    d_log_gamma[h] * kvpolicy::log_gamma_slope(static_cast<double>(alpha_[i]),
                                                               options_.spec.gamma_min,
                                                               options_.spec.gamma_max));
            }
        }
    }
    if (sums.count == 0) {  // nothing was learned, so nothing decays either
        gradient_norm_ = 0.0;
        sums.first_empty = step_ + 1;
    } else {
        gradient_norm_ = optimizer_.step(schedule_.at(step_));
        if (!std::isfinite(gradient_norm_)) {
            refuse_gradient(step_ + 1);
        }
    }
    sums.steps = 1;
    sums_.add(sums);
    ++step_;
}

template <class S>
std::vector<HeldOutNumbers> Trainer<S>::evaluate() {
    std::vector<HeldOutNumbers> all;
    if (held_out_ == nullptr) {
        return all;
    }
    const QkvShape& shape = source_.shape();
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    const std::vector<float> log_gamma = examples::log_gammas(options_.spec, alpha_);
    for (const std::int32_t budget : options_.budgets) {
        all.push_back({budget,
                       {},
                       std::vector<kvpolicy::Recall>(heads * static_cast<std::size_t>(shape.layers),
                                                     {0, 0.0, 0.0, 0.0, 0.0})});
    }
    const auto sequences_count = static_cast<double>(held_out_->count());
    std::vector<float> scores, unused;
    std::vector<kvpolicy::Recall> recall(heads);
    for (std::size_t i = 0; i < held_out_->count(); ++i) {
        if (Interrupts::signal() != 0) {
            return {};
        }
        const Example& example = held_out_->get(i);
        const std::int32_t n = example.length;
        const kvpolicy::Sequences sequences{.batch = 1, .length = n};
        std::vector<kvpolicy::expiry_t> teacher(heads * static_cast<std::size_t>(n)), student(teacher.size());
        for (std::int32_t l = 0; l < shape.layers; ++l) {
            score(example, l, scores);
            unused.resize(scores.size());
            for (HeldOutNumbers& numbers : all) {
                const Policy all_params = policy(numbers.budget, log_gamma);
                kvpolicy::BoundaryLoss loss = loss_of(options_);
                loss.layer = l;
                kvpolicy::BoundaryValue value;
                loss(ctx_, all_params, plane<const float>(scores, shape.kv_heads, n),
                     example.targets(shape, l), sequences, plane<float>(unused, shape.kv_heads, n), nullptr,
                     &value, workspace(loss.workspace_bytes(ctx_, all_params, sequences, shape.kv_heads)));
                numbers.loss.add(value, 1.0 / (shape.layers * sequences_count));
                const kvpolicy::MaskOptions mask{.layer = l};
                const auto build = [&](kvpolicy::plane_view<const float> from,
                                       std::vector<kvpolicy::expiry_t>& into) {
                    kvpolicy::build_mask(ctx_, all_params, from, sequences,
                                         plane<kvpolicy::expiry_t>(into, shape.kv_heads, n),
                                         workspace(kvpolicy::build_mask_workspace_bytes(
                                             ctx_, all_params, sequences, shape.kv_heads, mask)),
                                         mask);
                };
                build(example.targets(shape, l), teacher);
                build(plane<const float>(scores, shape.kv_heads, n), student);
                const auto of_teacher = plane<const kvpolicy::expiry_t>(teacher, shape.kv_heads, n);
                kvpolicy::oracle_recall(
                    ctx_, all_params, of_teacher, plane<const kvpolicy::expiry_t>(student, shape.kv_heads, n),
                    sequences, recall.data(),
                    workspace(kvpolicy::oracle_recall_workspace_bytes(ctx_, of_teacher, sequences)),
                    {.layer = l});
                for (std::size_t h = 0; h < heads; ++h) {
                    numbers.add(static_cast<std::size_t>(l) * heads + h, recall[h], sequences_count);
                }
            }
        }
    }
    return all;
}

template <class S>
std::vector<std::vector<float>> Trainer<S>::scores_of(std::size_t index) {
    const Example& example = source_.get(index);
    std::vector<std::vector<float>> scores(static_cast<std::size_t>(source_.shape().layers));
    for (std::size_t l = 0; l < scores.size(); ++l) {
        score(example, static_cast<std::int32_t>(l), scores[l]);
    }
    return scores;
}

/// Quantiles of the scores of keys that leave the window, over some training sequences: what a
/// threshold is set by.
template <class S>
std::vector<float> Trainer<S>::score_quantiles() {
    const QkvShape& shape = source_.shape();
    const std::size_t some = std::min<std::size_t>(8, source_.count());
    constexpr std::int32_t count = examples::TrainedScorers::quantile_count;
    const auto heads = static_cast<std::size_t>(std::int64_t{shape.kv_heads} * shape.layers);
    std::vector<std::vector<float>> pools(heads);
    for (std::size_t i = 0; i < some; ++i) {
        const std::vector<std::vector<float>> scores = scores_of(i);
        for (std::int32_t l = 0; l < shape.layers; ++l) {
            const std::vector<float>& of_layer = scores[static_cast<std::size_t>(l)];
            const auto length = static_cast<std::int32_t>(std::ssize(of_layer) / shape.kv_heads);
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto row = of_layer.begin() + std::ptrdiff_t{h} * length;
                auto& pool = pools[static_cast<std::size_t>(std::int64_t{l} * shape.kv_heads + h)];
                const std::int32_t end = std::max(options_.spec.sinks, length - options_.spec.window);
                pool.insert(pool.end(), row + options_.spec.sinks, row + end);
            }
        }
    }
    std::vector<float> quantiles;
    for (auto& pool : pools) {
        if (pool.empty()) {
            return {};
        }
        std::ranges::sort(pool);
        for (std::int32_t i = 0; i < count; ++i) {
            quantiles.push_back(pool[(pool.size() - 1) * static_cast<std::size_t>(i) / (count - 1)]);
        }
    }
    return quantiles;
}

template <class S>
void Trainer<S>::round_weights() {
    pull();
    unrounded_.clear();
    for (auto& array : stack_.arrays) {
        unrounded_.push_back(array.data);
        if (!options_.fp32 && array.shape.size() == 3) {
            std::transform(array.data.begin(), array.data.end(), array.data.begin(),
                           examples::rounded_to_bf16);
        }
    }
    push();
}

template <class S>
void Trainer<S>::restore_weights() {
    for (std::size_t i = 0; i < unrounded_.size(); ++i) {
        std::ranges::copy(unrounded_[i], stack_.arrays[i].data.begin());  // pointers to it stay
    }
    push();
}

template <class S>
void Trainer<S>::finish(const std::map<std::string, std::string>& notes) {
    pull();
    examples::ScorerSpec spec = options_.spec;
    spec.training = run_settings();
    spec.training.insert(notes.begin(), notes.end());
    examples::save_scorers(options_.out, spec, stack_, alpha_, score_quantiles(), !options_.fp32);
}

template class Trainer<examples::Mlp>;
template class Trainer<examples::Mlstm>;

}  // namespace train
