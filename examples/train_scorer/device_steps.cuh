// Bodies of device_steps.hpp for one kind of scorer and one storage type of keys and values.
#pragma once

#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/cuda/dispatch_metrics.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "device_calls.cuh"
#include "device_steps.hpp"
#include "train/adamw.cuh"
#include "train/device.cuh"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>

namespace train {

/// One sequence on the GPU: keys and values [layers * heads, length, dim], targets [layers * heads, length].
template <class T>
struct HeldSequence {
    std::int32_t length = 0;
    DeviceArray<T> rows;  // keys, then values
    DeviceArray<float> target;
};

/// Work space for sequences up to `length`.
struct DeviceBuffers {
    std::int32_t length = 0;
    DeviceArray<unsigned char> workspace;
    DeviceArray<float> scores, d_scores;
    DeviceArray<kvpolicy::expiry_t> teacher, student;
};

template <class S, class T, class Widths>
class ScorerSteps final : public DeviceSteps {
  public:
    ScorerSteps(const DeviceJob& job, ExampleGetter training, ExampleGetter held_out)
        : job_(job),
          heads_(job.spec.layers * job.spec.heads),
          get_{std::move(training), std::move(held_out)},
          stream_(),
          optimizer_(job.optimizer, arrays_of(job)) {
        scorer_ = all_layers(job.spec);
        S& scorer = scorer_;
        point_at(optimizer_.gradients.data(), gradients_);
        typename S::template parameters<float> weights;
        point_at(optimizer_.parameters.data(), weights);
        std::vector<const float*> pointers;
        for_each_parameter(scorer, weights,
                           [&](const char*, float*& array, std::size_t, bool) { pointers.push_back(array); });
        std::size_t i = 0;
        for_each_parameter(scorer, scorer.weights, [&](const char*, const float*& array, std::size_t, bool) {
            array = pointers[i++];
        });
        sums_ = DeviceArray<DeviceSums>(1);
        sums_.clear(stream_.get());
        value_ = DeviceArray<kvpolicy::BoundaryValue>(1);
        log_gamma_ = DeviceArray<float>(static_cast<std::size_t>(heads_));
        d_log_gamma_ = DeviceArray<double>(static_cast<std::size_t>(heads_));
        log_gamma_.clear(stream_.get());
        d_log_gamma_.clear(stream_.get());
    }

    void push(const AdamW& from) override {
        for_each_piece(from.arrays, [&](const AdamW::Array& array, std::size_t at) {
            optimizer_.parameters.put(array.parameters, at, array.gradient.size(), stream_.get());
            optimizer_.first.put(array.first.data(), at, array.first.size(), stream_.get());
            optimizer_.second.put(array.second.data(), at, array.second.size(), stream_.get());
        });
        optimizer_.set_steps_taken(from.steps_taken, stream_.get());
        update_decay();
        stream_.wait();  // the arrays are the caller's
    }
    void pull(AdamW& to) override {
        for_each_piece(to.arrays, [&](AdamW::Array& array, std::size_t at) {
            optimizer_.parameters.get(array.parameters, at, array.gradient.size(), stream_.get());
            optimizer_.first.get(array.first.data(), at, array.first.size(), stream_.get());
            optimizer_.second.get(array.second.data(), at, array.second.size(), stream_.get());
        });
        AdamWState state;
        optimizer_.state.get(&state, 0, 1, stream_.get());
        to.steps_taken = state.steps_taken;
    }

    void hold(std::size_t index) override { static_cast<void>(sequence(0, index)); }

    void step(std::span<const DeviceVisit> visits, std::int32_t budget, double rate,
              std::int64_t number) override {
        optimizer_.gradients.clear(stream_.get());
        const DevicePolicy all_params = policy(budget, nullptr);
        kvpolicy::BoundaryOptions options;
        options.layers = job_.spec.layers;
        options.log_gamma = job_.decay ? log_gamma_.data() : nullptr;
        for (const DeviceVisit& visit : visits) {
            const HeldSequence<T>& held = sequence(0, visit.index);
            const DeviceBuffers& scratch = this->scratch(held.length);
            score(held, scratch);
            kvpolicy::BoundaryLoss loss = job_.loss;
            loss.sampler.seed = visit.seed;
            const kvpolicy::Sequences sequences{.batch = 1, .length = held.length};
            loss(ctx(), all_params, plane<const float>(scratch.scores, held.length),
                 plane<const float>(held.target, held.length), sequences,
                 plane<float>(scratch.d_scores, held.length), job_.decay ? d_log_gamma_.data() : nullptr,
                 value_.data(), scratch.workspace, options);
            kvpolicy::score_sequence_backward<Widths>(ctx(), scorer_, backward_call(held, &scratch),
                                                      gradients_, scratch.workspace);
            enqueue_visit(stream_.get(), sums_.data(), value_.data(), job_.decay ? heads_ : 0, range(),
                          alpha(optimizer_.parameters), d_log_gamma_.data(), alpha(optimizer_.gradients));
        }
        optimizer_.step(rate, number, &sums_.data()->step_count, stream_.get());
        enqueue_step_end(stream_.get(), sums_.data(), number);
        update_decay();
    }

    LossSums take(double& norm, std::int64_t& refused) override {
        DeviceSums sums;
        AdamWState state;
        sums_.get(&sums, 0, 1, stream_.get());
        optimizer_.state.get(&state, 0, 1, stream_.get());
        sums_.clear(stream_.get());
        norm = state.norm;
        refused = state.refused > 0 ? state.first_refused : 0;
        LossSums out;
        out.loss = sums.loss;
        out.count = sums.count, out.kept = sums.kept, out.agreed = sums.agreed;
        out.steps = sums.steps;
        out.first_empty = sums.first_empty;
        return out;
    }

    std::vector<HeldOutNumbers> evaluate(std::size_t count, std::span<const std::int32_t> budgets) override {
        std::vector<float> log_gamma(static_cast<std::size_t>(heads_));
        log_gamma_.get(log_gamma.data(), 0, log_gamma.size(), stream_.get());
        const auto heads = static_cast<std::size_t>(heads_);
        const DeviceArray<kvpolicy::BoundaryValue> values(count * budgets.size());
        const DeviceArray<kvpolicy::Recall> recalls(count * budgets.size() * heads);
        kvpolicy::BoundaryOptions options;
        options.layers = job_.spec.layers;
        kvpolicy::BoundaryLoss loss = job_.loss;
        loss.sampler = {};
        loss.scale = 1.0f;
        for (std::size_t i = 0; i < count; ++i) {
            const HeldSequence<T>& held = sequence(1, i);
            const DeviceBuffers& scratch = this->scratch(held.length);
            score(held, scratch);
            const kvpolicy::Sequences sequences{.batch = 1, .length = held.length};
            const auto target = plane<const float>(held.target, held.length);
            for (std::size_t b = 0; b < budgets.size(); ++b) {
                const DevicePolicy all_params = policy(budgets[b], log_gamma.data());
                const std::size_t at = i * budgets.size() + b;
                loss(ctx(), all_params, plane<const float>(scratch.scores, held.length), target, sequences,
                     plane<float>(scratch.d_scores, held.length), nullptr, values.data() + at,
                     scratch.workspace, options);
                kvpolicy::build_mask(ctx(), all_params, target, sequences,
                                     plane<kvpolicy::expiry_t>(scratch.teacher, held.length),
                                     scratch.workspace);
                kvpolicy::build_mask(ctx(), all_params, plane<const float>(scratch.scores, held.length),
                                     sequences, plane<kvpolicy::expiry_t>(scratch.student, held.length),
                                     scratch.workspace);
                kvpolicy::oracle_recall(ctx(), all_params,
                                        plane<const kvpolicy::expiry_t>(scratch.teacher, held.length),
                                        plane<const kvpolicy::expiry_t>(scratch.student, held.length),
                                        sequences, recalls.data() + at * heads, scratch.workspace);
            }
        }
        std::vector<kvpolicy::BoundaryValue> value(values.size());
        std::vector<kvpolicy::Recall> recall(recalls.size());
        values.get(value.data(), 0, value.size(), stream_.get());
        recalls.get(recall.data(), 0, recall.size(), stream_.get());
        std::vector<HeldOutNumbers> all;
        for (std::size_t b = 0; b < budgets.size(); ++b) {
            HeldOutNumbers& numbers = all.emplace_back();
            numbers.budget = budgets[b];
            numbers.recall.assign(heads, {0, 0.0, 0.0, 0.0, 0.0});
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t at = i * budgets.size() + b;
                numbers.loss.add(value[at], 1.0 / (job_.spec.layers * static_cast<double>(count)));
                for (std::size_t h = 0; h < heads; ++h) {
                    numbers.add(h, recall[at * heads + h], static_cast<double>(count));
                }
            }
        }
        return all;
    }

    std::vector<std::vector<float>> scores(std::size_t index) override {
        const HeldSequence<T>& held = sequence(0, index);
        const DeviceBuffers& scratch = this->scratch(held.length);
        score(held, scratch);
        const std::size_t each =
            static_cast<std::size_t>(job_.spec.heads) * static_cast<std::size_t>(held.length);
        std::vector<std::vector<float>> all(static_cast<std::size_t>(job_.spec.layers));
        for (std::size_t l = 0; l < all.size(); ++l) {
            all[l].resize(each);
            scratch.scores.get(all[l].data(), l * each, each, stream_.get());
        }
        return all;
    }

  private:
    // ---- the scorer of all layers -------------------------------------------------------------------------

    /// The scorer of a layer without weights, for the heads of all layers.
    static S all_layers(const examples::ScorerSpec& spec) {
        S scorer = examples::ScorerStack<S>(spec).scorers.at(0);
        scorer.heads = spec.layers * spec.heads;
        return scorer;
    }

    /// A layer's arrays, as ScorerStack has them, of all layers in one; alpha last.
    static std::vector<DeviceAdamW::Array> arrays_of(const DeviceJob& job) {
        examples::ScorerSpec one = job.spec;
        one.layers = 1;
        std::vector<DeviceAdamW::Array> all;
        for (const auto& array : examples::ScorerStack<S>(one).arrays) {
            all.push_back({array.data.size() * static_cast<std::size_t>(job.spec.layers), array.decays});
        }
        if (job.decay) {
            all.push_back(
                {static_cast<std::size_t>(job.spec.layers) * static_cast<std::size_t>(job.spec.heads), false,
                 job.decay_rate});
        }
        return all;
    }

    /// Points `into` at the arrays that this architecture has: those whose pointer in a layer's
    /// scorer is not null.
    void point_at(float* memory, typename S::template parameters<float>& into) {
        examples::ScorerSpec one = job_.spec;
        one.layers = 1;
        examples::ScorerStack<S> stack(one);
        std::vector<bool> there;
        for_each_parameter(
            stack.scorers[0], stack.parameters[0],
            [&](const char*, float*& array, std::size_t, bool) { there.push_back(array != nullptr); });
        std::size_t i = 0, next = 0;
        for_each_parameter(scorer_, into, [&](const char*, float*& array, std::size_t, bool) {
            array = there[i++] ? memory + optimizer_.begin(next++) : nullptr;
        });
    }

    /// visit(array, place) for the host's arrays, layer by layer, and their places on the GPU.
    template <class Arrays, class Visit>
    void for_each_piece(Arrays& arrays, Visit&& visit) {
        const std::size_t tail = job_.decay ? 1 : 0;
        const auto layers = static_cast<std::size_t>(job_.spec.layers);
        const std::size_t each = (arrays.size() - tail) / layers;
        for (std::size_t l = 0; l < layers; ++l) {
            for (std::size_t i = 0; i < each; ++i) {
                auto& array = arrays[l * each + i];
                visit(array, optimizer_.begin(i) + l * array.gradient.size());
            }
        }
        if (tail > 0) {
            visit(arrays.back(), optimizer_.begin(each));
        }
    }

    float* alpha(const DeviceArray<float>& memory) const {
        return memory.data() + optimizer_.count() - (job_.decay ? static_cast<std::size_t>(heads_) : 0);
    }
    DecayRange range() const { return {std::log(job_.spec.gamma_min), std::log(job_.spec.gamma_max)}; }
    /// log gamma from alpha, where decay is learned.
    void update_decay() {
        if (job_.decay) {
            enqueue_log_gamma(stream_.get(), range(), alpha(optimizer_.parameters), heads_,
                              log_gamma_.data());
        }
    }

    // ---- sequences ----------------------------------------------------------------------------------------

    kvpolicy::cuda ctx() const { return kvpolicy::cuda{stream_.get()}; }

    /// The policy of all layers' heads; where no log gammas are given, the GPU's own count.
    DevicePolicy policy(std::int32_t budget, const float* log_gamma) const {
        const examples::ScorerSpec& spec = job_.spec;
        const kvpolicy::Decay<1> decay = log_gamma == nullptr
                                             ? kvpolicy::Decay<1>{}
                                             : kvpolicy::Decay<1>{kvpolicy::per_head(log_gamma, 1, heads_)};
        return DevicePolicy{
            kvpolicy::Sink<>{spec.sinks}, kvpolicy::Window<>{spec.window},
            kvpolicy::TopKBudget<>{kvpolicy::budget_for_total(budget, spec.sinks, spec.window)}, decay};
    }

    template <class To, class From>
    kvpolicy::plane_view<To> plane(const DeviceArray<From>& data, std::int32_t length) const {
        return kvpolicy::view_bhs<To>(data.data(), 1, heads_, length);
    }
    kvpolicy::rows_view<const T> keys(const HeldSequence<T>& held) const {
        return kvpolicy::view_bhsd<const T>(held.rows.data(), 1, heads_, held.length, job_.spec.head_dim_qk);
    }
    kvpolicy::rows_view<const T> values(const HeldSequence<T>& held) const {
        const std::int64_t at = std::int64_t{heads_} * held.length * job_.spec.head_dim_qk;
        return kvpolicy::view_bhsd<const T>(held.rows.data() + at, 1, heads_, held.length,
                                            job_.spec.head_dim_vo);
    }
    kvpolicy::ScoreBackward<T> backward_call(const HeldSequence<T>& held,
                                             const DeviceBuffers* scratch) const {
        return {keys(held), values(held), kvpolicy::Sequences{.batch = 1, .length = held.length},
                job_.spec.delay,
                scratch == nullptr ? kvpolicy::plane_view<const float>{}
                                   : plane<const float>(scratch->d_scores, held.length)};
    }

    void score(const HeldSequence<T>& held, const DeviceBuffers& scratch) {
        kvpolicy::score_sequence<Widths>(
            ctx(), scorer_, keys(held), values(held), kvpolicy::Sequences{.batch = 1, .length = held.length},
            job_.spec.delay, plane<float>(scratch.scores, held.length), scratch.workspace);
    }

    /// Calls make(), and again without the sequences that are held where the GPU's memory does not suffice.
    template <class Make>
    auto with_memory(Make&& make) {
        try {
            return make();
        } catch (const OutOfDeviceMemory&) {
            if (held_.empty()) {
                throw;
            }
            held_.clear();
            return make();
        }
    }

    const DeviceBuffers& scratch(std::int32_t length) {
        if (length > buffers_.length) {
            HeldSequence<T> shape;  // its length is all that is looked at
            shape.length = length;
            const kvpolicy::Sequences sequences{.batch = 1, .length = length};
            const DevicePolicy all_params = policy(job_.spec.sinks + job_.spec.window + 1, nullptr);
            const auto expiry = kvpolicy::view_bhs<const kvpolicy::expiry_t>(nullptr, 1, heads_, length);
            const std::size_t bytes =
                std::max({kvpolicy::score_sequence_workspace_bytes<Widths>(ctx(), scorer_, keys(shape),
                                                                           values(shape), sequences),
                          kvpolicy::score_sequence_backward_workspace_bytes<Widths>(
                              ctx(), scorer_, backward_call(shape, nullptr)),
                          job_.loss.workspace_bytes(ctx(), all_params, sequences, heads_),
                          kvpolicy::build_mask_workspace_bytes(ctx(), all_params, sequences, heads_),
                          kvpolicy::oracle_recall_workspace_bytes(ctx(), expiry, sequences)});
            const std::size_t count = static_cast<std::size_t>(heads_) * static_cast<std::size_t>(length);
            buffers_ = {};
            buffers_.workspace = DeviceArray<unsigned char>(bytes);
            buffers_.scores = DeviceArray<float>(count);
            buffers_.scores.clear(stream_.get());
            buffers_.d_scores = DeviceArray<float>(count);
            buffers_.d_scores.clear(stream_.get());
            buffers_.teacher = DeviceArray<kvpolicy::expiry_t>(count);
            buffers_.student = DeviceArray<kvpolicy::expiry_t>(count);
            buffers_.length = length;
        }
        return buffers_;
    }

    /// Rows [layers][length, heads, dim] as [layers * heads, length, dim] in T.
    static void append(const std::vector<std::vector<float>>& layers, std::int32_t length, std::int32_t dim,
                       std::vector<T>& to) {
        const auto tokens = static_cast<std::size_t>(length), row_length = static_cast<std::size_t>(dim);
        std::size_t at = to.size(), more = 0;
        for (const std::vector<float>& rows : layers) {
            more += rows.size();
        }
        to.resize(at + more);
        for (const std::vector<float>& rows : layers) {
            const std::size_t width = rows.size() / tokens;
            for (std::size_t head = 0; head < width; head += row_length) {
                for (std::size_t t = 0; t < tokens; ++t, at += row_length) {
                    const float* const row = rows.data() + t * width + head;
                    std::transform(row, row + row_length, to.data() + at,
                                   [](float x) { return static_cast<T>(x); });
                }
            }
        }
    }

    /// A sequence of kind 0 (training) or 1 (held out), on the GPU; valid until the next call.
    const HeldSequence<T>& sequence(std::size_t kind, std::size_t index) {
        const auto found = held_.find({kind, index});
        if (found != held_.end()) {
            return found->second;
        }
        const Example& example = get_[kind](index);
        static_cast<void>(with_memory([&] { return &scratch(example.length); }));
        HeldSequence<T> made = with_memory([&] { return upload(example); });
        return held_.emplace(std::pair{kind, index}, std::move(made)).first->second;
    }

    HeldSequence<T> upload(const Example& example) {
        HeldSequence<T> held;
        held.length = example.length;
        const std::size_t tokens =
            static_cast<std::size_t>(heads_) * static_cast<std::size_t>(example.length);
        std::vector<T> rows;
        rows.reserve(tokens * static_cast<std::size_t>(job_.spec.head_dim_qk + job_.spec.head_dim_vo));
        append(example.k, example.length, job_.spec.head_dim_qk, rows);
        append(example.v, example.length, job_.spec.head_dim_vo, rows);
        held.rows = DeviceArray<T>(rows.size());
        held.rows.put(rows.data(), 0, rows.size(), stream_.get());
        held.target = DeviceArray<float>(tokens);
        if (example.q.empty()) {
            const std::size_t each = tokens / static_cast<std::size_t>(job_.spec.layers);
            for (std::size_t l = 0; l < example.target.size(); ++l) {
                held.target.put(example.target[l].data(), l * each, each, stream_.get());
            }
        } else {
            compute_target(example, held);
        }
        stream_.wait();  // the vectors go
        return held;
    }

    void compute_target(const Example& example, const HeldSequence<T>& held) {
        std::vector<T> rows;
        append(example.q, example.length, job_.spec.head_dim_qk, rows);
        const std::int64_t per_head = std::int64_t{example.length} * job_.spec.head_dim_qk;
        const auto heads = static_cast<std::int32_t>(static_cast<std::int64_t>(rows.size()) / per_head);
        const DeviceArray<T> queries(rows.size());
        queries.put(rows.data(), 0, rows.size(), stream_.get());
        const DeviceArray<float> lse(static_cast<std::size_t>(heads) *
                                     static_cast<std::size_t>(example.length));
        const auto q =
            kvpolicy::view_bhsd<const T>(queries.data(), 1, heads, held.length, job_.spec.head_dim_qk);
        const auto of_lse = kvpolicy::view_bhs<float>(lse.data(), 1, heads, held.length);
        const DeviceArray<unsigned char> memory(
            kvpolicy::future_mass_workspace_bytes<T>(ctx(), q, keys(held)));
        const kvpolicy::Sequences sequences{.batch = 1, .length = held.length};
        kvpolicy::causal_lse<T, TargetDims>(ctx(), {}, q, keys(held), sequences, of_lse, memory);
        kvpolicy::future_mass<T, TargetDims>(ctx(), {}, q, keys(held), of_lse, sequences,
                                             plane<float>(held.target, held.length), memory,
                                             mass_options(job_.target));
        stream_.wait();
    }

    DeviceJob job_;
    std::int32_t heads_;  // of all layers
    ExampleGetter get_[2];
    DeviceStream stream_;
    DeviceAdamW optimizer_;
    S scorer_{};
    typename S::template parameters<float> gradients_{};
    DeviceArray<DeviceSums> sums_;
    DeviceArray<kvpolicy::BoundaryValue> value_;
    DeviceArray<float> log_gamma_;
    DeviceArray<double> d_log_gamma_;
    DeviceBuffers buffers_;
    std::map<std::pair<std::size_t, std::size_t>, HeldSequence<T>> held_;
};

}  // namespace train
