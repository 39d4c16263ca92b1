#include "score_dump.hpp"

#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "safetensors_writer.hpp"

#include <fmt/format.h>
#include <llama/dense_attention.hpp>
#include <llama/engine.hpp>
#include <llama/error.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <variant>

namespace examples {
namespace {

/// Fills in the defaults.
DumpOptions checked(DumpOptions o, const llama::Config& config, const TrainedScorers& trained,
                    std::size_t text) {
    check_fits(trained, config, "scorers");
    if (trained.spec.kind == "none") {
        llama::fail("scorers: a file without scorers, of {}, is not allowed; it must have some",
                    trained.system());
    }
    const std::int32_t delay = trained.spec.delay;
    if (o.tokens < 1 || static_cast<std::size_t>(o.tokens) + static_cast<std::size_t>(delay) > text) {
        llama::fail(
            "tokens: {} is not allowed; the text has {} tokens and a score needs {} after its own, so it "
            "must be 1 to {}",
            o.tokens, text, delay, static_cast<std::int64_t>(text) - delay);
    }
    o.segment = o.segment == 0 ? config.max_positions : o.segment;
    o.overlap = o.overlap < 0 ? o.segment / 2 : o.overlap;
    if (o.segment <= delay || o.segment > config.max_positions) {
        llama::fail(
            "segment: {} is not allowed; it must be {}, one more than the scorer's delay, to {}, the "
            "model's context",
            o.segment, delay + 1, config.max_positions);
    }
    if (o.overlap >= o.segment - delay) {
        llama::fail(
            "overlap: {} is not allowed; it must be 0 to {}, so that a segment of {} gives scores after a "
            "delay of {}",
            o.overlap, o.segment - delay - 1, o.segment, delay);
    }
    if (o.layers.empty()) {
        o.layers.resize(static_cast<std::size_t>(config.layers));
        std::iota(o.layers.begin(), o.layers.end(), 0);
    }
    for (std::size_t i = 0; i < o.layers.size(); ++i) {
        const std::int32_t least = i == 0 ? 0 : o.layers[i - 1] + 1;
        if (o.layers[i] < least || o.layers[i] >= config.layers) {
            llama::fail("layers: {} is not allowed; layers must ascend, so it must be {} to {}", o.layers[i],
                        least, config.layers - 1);
        }
    }
    if (!(o.share > 0.0 && o.share < 1.0)) {
        llama::fail("share: {} is not allowed; it must be above 0 and below 1", o.share);
    }
    return o;
}

std::vector<kvpolicy::bf16> stored(std::span<const float> rows) {
    std::vector<kvpolicy::bf16> out(rows.size());
    std::ranges::transform(rows, out.begin(), [](float x) { return kvpolicy::bf16(x); });
    return out;
}

/// The model's keys and values of a segment, and its hidden states by layer, [length, hidden_size].
struct Segment {
    llama::DenseAttention attention;
    std::vector<std::vector<float>> hidden;
};

void read_segment(llama::Engine& engine, std::span<const std::int32_t> tokens, Segment& segment) {
    constexpr std::size_t chunk = 512;
    segment.attention.clear();
    for (std::vector<float>& states : segment.hidden) {
        states.clear();
    }
    const auto attention = [&](int layer, std::span<const std::int64_t> positions,
                               std::span<const float> hidden, std::span<const float> q,
                               std::span<const float> k, std::span<const float> v, std::span<float> out) {
        std::vector<float>& states = segment.hidden[static_cast<std::size_t>(layer)];
        states.insert(states.end(), hidden.begin(), hidden.end());
        segment.attention(layer, positions, hidden, q, k, v, out);
    };
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - at);
        engine.forward(tokens.subspan(at, count), std::span(positions).subspan(at, count), attention,
                       llama::Logits::none);
    }
}

/// [heads, length] of one layer; entries of the last `delay` tokens are zeros.
std::vector<float> layer_scores(const kvpolicy::host& ctx, const TrainedScorers& trained, std::int32_t layer,
                                const Segment& segment) {
    const ScorerSpec& spec = trained.spec;
    const auto length = static_cast<std::int32_t>(segment.attention.length());
    const auto keys = stored(segment.attention.keys(layer)), values = stored(segment.attention.values(layer));
    const auto dim = static_cast<std::int32_t>(keys.size() / static_cast<std::size_t>(spec.heads * length));
    const auto k = kvpolicy::view_bshd(keys.data(), 1, length, spec.heads, dim);
    const auto v = kvpolicy::view_bshd(values.data(), 1, length, spec.heads, dim);
    const auto hidden =
        kvpolicy::view_bhsd(segment.hidden[static_cast<std::size_t>(layer)].data(), 1, 1, length, spec.width);
    const kvpolicy::Sequences sequences{.batch = 1, .length = length};
    std::vector<float> scores(static_cast<std::size_t>(spec.heads) * static_cast<std::size_t>(length));
    const auto into = kvpolicy::view_bhs(scores.data(), 1, spec.heads, length);
    std::visit(
        [&]<class S>(const ScorerStack<S>& stack) {
            const S& scorer = stack.scorers[static_cast<std::size_t>(layer)];
            if constexpr (kvpolicy::HiddenScorer<S>) {
                std::vector<unsigned char> memory(
                    kvpolicy::score_hidden_workspace_bytes(ctx, scorer, hidden, sequences));
                kvpolicy::score_hidden(ctx, scorer, hidden, sequences, into, {memory.data(), memory.size()});
            } else {
                std::vector<unsigned char> memory(
                    kvpolicy::score_sequence_workspace_bytes(ctx, scorer, k, v, sequences));
                kvpolicy::score_sequence(ctx, scorer, k, v, sequences, spec.delay, into,
                                         {memory.data(), memory.size()});
            }
        },
        trained.stack);
    return scores;
}

/// [all layers, heads] to [layers, heads].
std::vector<float> of_layers(const std::vector<float>& all, const std::vector<std::int32_t>& layers,
                             std::int32_t heads) {
    std::vector<float> out;
    for (const std::int32_t layer : layers) {
        const auto first = all.begin() + std::ptrdiff_t{layer} * heads;
        out.insert(out.end(), first, first + heads);
    }
    return out;
}

}  // namespace

std::vector<DumpSegment> dump_segments(std::int32_t tokens, std::int32_t segment, std::int32_t overlap,
                                       std::int32_t delay) {
    std::vector<DumpSegment> all;
    for (std::int32_t from = 0; from < tokens;) {
        const std::int32_t begin = std::max(0, from - overlap);
        const std::int32_t end = begin + std::min(segment, tokens + delay - begin);
        all.push_back({begin, end, from, end - delay});
        from = end - delay;
    }
    return all;
}

ScoreDump dump_scores(const kvpolicy::host& ctx, const llama::Model& model, const TrainedScorers& trained,
                      std::span<const std::int32_t> text, const DumpOptions& options) {
    const std::int32_t heads = trained.spec.heads, delay = trained.spec.delay;
    ScoreDump dump{checked(options, model.config, trained, text.size()), heads, 0, {}, {}, {}};
    const std::vector<std::int32_t>& layers = dump.options.layers;
    const auto tokens = static_cast<std::size_t>(dump.options.tokens);
    dump.scores.resize(layers.size() * static_cast<std::size_t>(heads) * tokens);
    dump.log_gamma = of_layers(trained.log_gamma, layers, heads);
    if (!trained.quantiles.empty()) {
        dump.thresholds = of_layers(trained.thresholds(dump.options.share), layers, heads);
    }
    llama::Engine engine(model);
    Segment segment{llama::DenseAttention(model.config),
                    std::vector<std::vector<float>>(static_cast<std::size_t>(model.config.layers))};
    const auto segments =
        dump_segments(dump.options.tokens, dump.options.segment, dump.options.overlap, delay);
    for (const auto& [begin, end, from, to] : segments) {
        const auto length = static_cast<std::size_t>(end) - static_cast<std::size_t>(begin);
        read_segment(engine, text.subspan(static_cast<std::size_t>(begin), length), segment);
        float* into = dump.scores.data() + from;
        for (const std::int32_t layer : layers) {
            const std::vector<float> scores = layer_scores(ctx, trained, layer, segment);
            for (auto head = scores.begin(); head != scores.end();
                 head += static_cast<std::ptrdiff_t>(length)) {
                std::copy(head + (from - begin), head + (to - begin), into);
                into += tokens;
            }
        }
    }
    dump.segments = static_cast<std::int32_t>(segments.size());
    const auto bad = std::ranges::find_if(dump.scores, [](float x) { return !std::isfinite(x); });
    if (bad != dump.scores.end()) {
        llama::fail("scores: {} is not allowed; scores must be finite", *bad);
    }
    return dump;
}

void save_dump(const std::filesystem::path& file, const ScoreDump& dump, const ScorerSpec& spec,
               const std::map<std::string, std::string>& sources) {
    const DumpOptions& o = dump.options;
    const auto layers = static_cast<std::int64_t>(o.layers.size());
    std::map<std::string, std::string> metadata = sources;
    for (const auto& [key, value] : to_metadata(spec)) {
        metadata["scorer." + key] = value;
    }
    metadata["format"] = "kvpolicy-scores-1";
    metadata["layers"] = fmt::format("{}", fmt::join(o.layers, ","));
    metadata["segment"] = std::to_string(o.segment);
    metadata["overlap"] = std::to_string(o.overlap);
    std::vector<TensorPlan> plan{{"scores", llama::DType::f32, {layers, dump.heads, o.tokens}},
                                 {"log_gamma", llama::DType::f32, {layers, dump.heads}}};
    if (!dump.thresholds.empty()) {
        metadata["share"] = fmt::format("{}", o.share);
        plan.push_back({"thresholds", llama::DType::f32, {layers, dump.heads}});
    }
    SafetensorsWriter writer(file, std::move(plan), metadata);
    writer.write(dump.scores);
    writer.write(dump.log_gamma);
    if (!dump.thresholds.empty()) {
        writer.write(dump.thresholds);
    }
    writer.finish();
}

}  // namespace examples
