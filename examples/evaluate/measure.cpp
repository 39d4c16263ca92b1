#include "measure.hpp"

#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#if KVPOLICY_EXAMPLES_CUDA
#include <llama/cuda/engine.hpp>
#endif
#include <llama/dense_attention.hpp>

#include <algorithm>
#include <numeric>
#include <variant>

namespace evaluate {
namespace {

/// [layers][heads][from] to [layers][heads][to], with zeros at the end.
std::vector<float> padded(const std::vector<float>& scores, std::size_t from, std::size_t to) {
    std::vector<float> out(scores.size() / from * to, 0.0f);
    for (std::size_t row = 0; row < scores.size() / from; ++row) {
        std::copy_n(scores.begin() + static_cast<std::ptrdiff_t>(row * from), from,
                    out.begin() + static_cast<std::ptrdiff_t>(row * to));
    }
    return out;
}

}  // namespace

examples::Oracle Bench::observe(std::size_t sequence) {
    const std::vector<std::int32_t>& tokens = data_.tokens[sequence];
    examples::Oracle oracle(engine_.model().config);
    llama::DenseAttention attention(engine_.model().config);
    auto watched = llama::observed(attention, oracle);
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    for (std::size_t at = 0; at < tokens.size(); at += 512) {
        const std::size_t n = std::min<std::size_t>(512, tokens.size() - at);
        engine_.forward(std::span(tokens).subspan(at, n), std::span(positions).subspan(at, n), watched,
                        llama::Logits::none);
    }
    return oracle;
}

std::vector<float> Bench::targets(examples::Oracle& oracle, float beta) const {
    kvpolicy::FutureMassOptions mass;
    mass.window = window_;
    mass.beta = beta;
    return oracle.scores(ctx_, mass);
}

void Bench::run(std::size_t sequence, const std::map<float, std::vector<float>>& targets, Result& result) {
    const llama::Config& config = engine_.model().config;
    const EvaluatedPolicy& policy = *result.policy;
    const auto length = static_cast<std::size_t>(data_.length);
    Setting setting{ctx_, config, {}, data_.length + decoded_, {}, data_.length};
    setting.choice.budget = result.budget;
    setting.choice.sinks = sinks_;
    setting.choice.window = window_;
    std::vector<float> given;
    if (policy.beta != 0.0f) {
        given = padded(targets.at(policy.beta), length, length + static_cast<std::size_t>(decoded_));
        setting.oracle = given;
    }
    if (gpu_ != nullptr) {
        run_on_gpu(sequence, setting, result);
        return;
    }
    const auto attention = policy.make(setting);
    examples::SequenceScorer scorer(data_, sequence);
    examples::run_sequence(engine_, *attention, data_, sequence, chunk_, scorer,
                           policy.prompted ? data_.length / 4 * 3 : 0);
    scorer.add_to(result.score);
    add(*attention, result);
    if (result.score.sequences == 1 && decoded_ > 0) {
        const std::int32_t token = data_.tokens[sequence].back();
        result.tokens_per_second = examples::decode_speed(engine_, *attention, token, decoded_);
    }
}

#if KVPOLICY_EXAMPLES_CUDA
void Bench::run_on_gpu(std::size_t sequence, const Setting& setting, Result& result) {
    const std::vector<std::int32_t>& tokens = data_.tokens[sequence];
    const llama::Config& config = engine_.model().config;
    const auto length = static_cast<std::size_t>(data_.length);
    const auto attention = result.policy->make_on_device(
        setting, {gpu_->stream(), config, llama::DType::bf16, llama::DeviceEngine::chunk});
    std::vector<float> logits(length * static_cast<std::size_t>(config.vocab_size));
    gpu_->forward(std::span(tokens).first(length), *attention, logits);
    examples::SequenceScorer scorer(data_, sequence);
    scorer.take(logits, 0, data_.length, config.vocab_size);
    scorer.add_to(result.score);
    add(*attention, result);
    if (result.score.sequences == 1 && decoded_ > 0) {
        const auto take = [](std::int32_t) { return true; };
        gpu_->write(std::span(tokens).last(1), *attention, {}, decoded_, take);
        result.tokens_per_second = gpu_->tokens_per_second();
    }
}
#else
void Bench::run_on_gpu(std::size_t, const Setting&, Result&) {}  // there is no GPU then
#endif

/// What a cache holds after the last token of a sequence.
template <class AttentionParams>
void Bench::add(const AttentionParams& attention, Result& result) const {
    const llama::Config& config = engine_.model().config;
    const auto length = static_cast<std::size_t>(data_.length);
    result.score.rows += attention.rows_per_head();
    const auto kv_heads = static_cast<std::size_t>(config.kv_heads);
    const std::size_t heads = static_cast<std::size_t>(config.layers) * kv_heads;
    result.rows.resize(heads);
    result.kept.resize(static_cast<std::size_t>(config.layers) * position_bins);
    for (std::size_t i = 0; i < heads; ++i) {
        const auto held =
            attention.retained(static_cast<int>(i) / config.kv_heads, static_cast<int>(i) % config.kv_heads);
        result.rows[i] += static_cast<double>(held.size());
        for (const kvpolicy::position_t t : held) {
            const std::size_t bin =
                std::min(position_bins - 1, static_cast<std::size_t>(t) * position_bins / length);
            const std::size_t begin = (bin * length + position_bins - 1) / position_bins,
                              end = ((bin + 1) * length + position_bins - 1) / position_bins;
            result.kept[i / kv_heads * position_bins + bin] +=
                1.0 / static_cast<double>((end - begin) * kv_heads);
        }
    }
    if (result.score.sequences == 1) {
        result.mib = static_cast<double>(attention.bytes()) / (1 << 20);
    }
}

void Bench::oracle_recall(const examples::Oracle& oracle, const std::map<float, std::vector<float>>& targets,
                          Result& result) const {
    using Policy =
        kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>, kvpolicy::Decay<1>>;
    const llama::Config& config = engine_.model().config;
    const examples::TrainedScorers& trained = *result.policy->scorers;
    const std::int32_t n = data_.length, heads = config.kv_heads;
    const auto plane = static_cast<std::size_t>(n) * static_cast<std::size_t>(heads);
    const Policy student{
        kvpolicy::Sink<>{sinks_}, kvpolicy::Window<>{window_},
        kvpolicy::TopKBudget<>{kvpolicy::budget_for_total(result.budget, sinks_, window_)},
        kvpolicy::Decay<1>{kvpolicy::per_head(trained.log_gamma.data(), config.layers, heads)}};
    // The oracle knows; it needs no decay.
    const Policy teacher{kvpolicy::Sink<>{sinks_}, kvpolicy::Window<>{window_},
                         kvpolicy::TopKBudget<>{kvpolicy::budget_for_total(result.budget, sinks_, window_)},
                         kvpolicy::Decay<1>{0.0f}};
    const kvpolicy::Sequences sequences{.batch = 1, .length = n};
    std::vector<unsigned char> memory;
    const auto workspace = [&](std::size_t bytes) {
        memory.resize(std::max(memory.size(), bytes));
        return kvpolicy::workspace_view{memory.data(), memory.size()};
    };
    std::vector<kvpolicy::expiry_t> of_student(plane), of_teacher(plane);
    const auto mask_of = [&](std::vector<kvpolicy::expiry_t>& expiry) {
        return kvpolicy::view_bhs(expiry.data(), 1, heads, n);
    };
    std::vector<kvpolicy::Recall> one(static_cast<std::size_t>(heads));
    for (std::int32_t l = 0; l < config.layers; ++l) {
        const kvpolicy::MaskOptions options{.layer = l};
        const std::size_t bytes =
            kvpolicy::build_mask_workspace_bytes(ctx_, student, sequences, heads, options);
        std::vector<float> scores(plane, 0.0f);
        const auto view = kvpolicy::view_bhs(scores.data(), 1, heads, n);
        const auto rows = [&](std::span<const float> data) {
            // What the cache stores.
            std::vector<kvpolicy::bf16> stored(data.size());
            std::ranges::transform(data, stored.begin(), [](float x) { return kvpolicy::bf16(x); });
            return stored;
        };
        const auto keys = rows(oracle.keys(l)), values = rows(oracle.values(l));
        const auto k = kvpolicy::view_bshd(keys.data(), 1, n, heads, config.head_dim);
        const auto v = kvpolicy::view_bshd(values.data(), 1, n, heads, config.head_dim);
        std::visit(
            [&]<class S>(const examples::ScorerStack<S>& stack) {
                if constexpr (examples::ranks_for_kvpop<S>) {
                    const S& scorer = stack.scorers[static_cast<std::size_t>(l)];
                    kvpolicy::score_sequence(
                        ctx_, scorer, k, v, sequences, trained.spec.delay, view,
                        workspace(kvpolicy::score_sequence_workspace_bytes(ctx_, scorer, k, v, sequences)));
                }
            },
            trained.stack);
        kvpolicy::build_mask(ctx_, student, view, sequences, mask_of(of_student), workspace(bytes), options);
        for (const auto& [beta, target] : targets) {
            auto& sums = result.recall[beta];
            sums.resize(static_cast<std::size_t>(std::int64_t{config.layers} * heads),
                        {0, 0.0, 0.0, 0.0, 0.0});
            kvpolicy::build_mask(
                ctx_, teacher,
                kvpolicy::view_bhs(target.data() + static_cast<std::size_t>(l) * plane, 1, heads, n),
                sequences, mask_of(of_teacher), workspace(bytes), options);
            kvpolicy::oracle_recall(
                ctx_, teacher, mask_of(of_teacher), mask_of(of_student), sequences, one.data(),
                workspace(kvpolicy::oracle_recall_workspace_bytes(ctx_, mask_of(of_teacher), sequences)),
                {.layer = l});
            for (std::int32_t h = 0; h < heads; ++h) {
                auto& sum = sums[static_cast<std::size_t>(std::int64_t{l} * heads + h)];
                const auto& r = one[static_cast<std::size_t>(h)];
                sum.queries += r.queries;
                sum.mean += r.mean, sum.chance_mean += r.chance_mean;
                sum.last += r.last, sum.chance_last += r.chance_last;
            }
        }
    }
}

}  // namespace evaluate
