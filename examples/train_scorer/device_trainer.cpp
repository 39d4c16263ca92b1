#include "device_trainer.hpp"

#include <type_traits>

namespace train {

template <class S>
DeviceTrainer<S>::DeviceTrainer(const kvpolicy::host& ctx, const Options& options, QkvSource& source,
                                QkvSource* held_out)
    : Trainer<S>(ctx, options, source, held_out) {
    DeviceJob job;
    job.spec = options.spec;
    job.target = options.target;
    job.loss = loss_of(options);
    if (options.positions > 0) {
        job.loss.sampler.count = options.positions;
    }
    job.loss.sampler.late = options.late;
    job.loss.scale = static_cast<float>(1.0 / (options.spec.layers * options.batch));
    job.optimizer = {.weight_decay = options.weight_decay, .clip = options.clip};
    job.decay = options.decay;
    job.decay_rate = options.decay_rate;
    job.fp32_rows = options.fp32_rows;
    const ExampleGetter training = [&source](std::size_t i) -> const Example& { return source.get(i); };
    const ExampleGetter watched = [held_out](std::size_t i) -> const Example& { return held_out->get(i); };
    if constexpr (std::is_same_v<S, examples::Mlp>) {
        steps_ = device_mlp_steps(job, training, watched);
    } else {
        steps_ = device_mlstm_steps(job, training, watched);
    }
    steps_->push(this->optimizer_);
}

template <class S>
void DeviceTrainer<S>::pull() {
    steps_->pull(this->optimizer_);
}

template <class S>
void DeviceTrainer<S>::push() {
    steps_->push(this->optimizer_);
}

template <class S>
void DeviceTrainer<S>::step() {
    std::vector<DeviceVisit> visits;
    for (std::int32_t b = 0; b < this->options_.batch; ++b) {
        const std::int64_t visit = this->step_ * this->options_.batch + b;
        visits.push_back({this->sequence_at(visit), this->seed_at(visit)});
    }
    steps_->step(visits, this->next_budget(), this->next_rate(), this->step_ + 1);
    ++this->step_;
}

template <class S>
LossSums DeviceTrainer<S>::take() {
    std::int64_t refused = 0;
    const LossSums sums = steps_->take(this->gradient_norm_, refused);
    if (refused > 0) {
        this->refuse_gradient(refused);
    }
    return sums;
}

template <class S>
std::vector<HeldOutNumbers> DeviceTrainer<S>::evaluate() {
    if (this->held_out_ == nullptr) {
        return {};
    }
    return steps_->evaluate(this->held_out_->count(), this->options_.budgets);
}

template <class S>
void DeviceTrainer<S>::hold_all() {
    for (std::size_t i = 0; i < this->source_.count(); ++i) {
        steps_->hold(i);
    }
}

template <class S>
std::vector<std::vector<float>> DeviceTrainer<S>::scores_of(std::size_t index) {
    return steps_->scores(index);
}

template class DeviceTrainer<examples::Mlp>;
template class DeviceTrainer<examples::Mlstm>;

}  // namespace train
