#include "sampler.hpp"

#include "error.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace llama {

Sampler::Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {
    if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
        fail("temperature is {}, it must be finite and at least 0", options.temperature);
    if (options.top_k < 0) fail("top_k is {}, it must be at least 0 (0 is no limit)", options.top_k);
    if (!(options.top_p > 0 && options.top_p <= 1))
        fail("top_p is {}, it must be above 0 and at most 1", options.top_p);
}

std::int32_t Sampler::operator()(std::span<const float> logits) {
    if (logits.empty()) fail("the sampler got no logits, it needs at least one");
    for (std::size_t i = 0; i < logits.size(); ++i)
        if (std::isnan(logits[i])) fail("logits[{}] is NaN, it must be a number", i);
    if (options_.temperature == 0)
        return static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());

    order_.resize(logits.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
    const auto likelier = [&](std::int32_t a, std::int32_t b) {
        return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
    };
    if (options_.top_k > 0 && static_cast<std::size_t>(options_.top_k) < order_.size()) {
        std::ranges::nth_element(order_, order_.begin() + options_.top_k, likelier);
        order_.resize(static_cast<std::size_t>(options_.top_k));
    }
    std::ranges::sort(order_, likelier);

    double total = 0;
    weights_.clear();
    for (const std::int32_t id : order_) {
        // Of equal infinities each weighs 1, where their difference would be NaN.
        const double below =
            logit(id) == logit(order_[0]) ? 0.0 : double{logit(id)} - double{logit(order_[0])};
        total += weights_.emplace_back(std::exp(below / options_.temperature));
    }
    if (options_.top_p < 1) {
        const double enough = options_.top_p * total;
        std::size_t kept = 0;
        for (total = 0; kept < weights_.size() && total < enough; ++kept) total += weights_[kept];
        weights_.resize(kept);
    }

    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
    for (std::size_t i = 0; i + 1 < weights_.size(); ++i) {
        left -= weights_[i];
        if (left < 0) return order_[i];
    }
    return order_[weights_.size() - 1];  // rounding may leave a little over
}

}  // namespace llama
