// What a step of scorer training costs beside the model's attention: target + boundary loss + scorer backward
// over 4096 tokens of one layer of SmolLM2 (9 query heads, 3 KV heads, head_dim 64), against the dense
// attention forward of that layer on the same threads. Prints the ratios of one run after the times.
//
// Target: at most 1.5x. The boundary loss takes 1024 queries a head, as train_scorer does; the target's
// normalizer is the one that the attention pass leaves behind.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "run.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace kvpolicy;

constexpr std::int32_t length = 4096, query_heads = 9, kv_heads = 3, dim = 64, window = 64;
using Rules = Policy<Sink<4>, Window<window>, TopKBudget<444>, Decay<1>>;

std::vector<float> normal(std::int64_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> draw;
    std::vector<float> rows(static_cast<std::size_t>(count));
    for (float& x : rows) {
        x = draw(generator);
    }
    return rows;
}

/// One layer, and all that a step of training needs of it.
struct Layer {
    const host ctx{1};
    std::vector<float> q = normal(std::int64_t{query_heads} * length * dim, 1);
    std::vector<float> k = normal(std::int64_t{kv_heads} * length * dim, 2);
    std::vector<float> v = normal(std::int64_t{kv_heads} * length * dim, 3);
    std::vector<float> out = std::vector<float>(q.size());
    std::vector<float> lse = std::vector<float>(std::size_t{query_heads} * length);
    std::vector<float> target = std::vector<float>(std::size_t{kv_heads} * length);
    std::vector<float> scores = target, d_scores = target;
    Sequences sequences{.batch = 1, .length = length};
    Rules all_params{Sink<4>{}, Window<window>{}, TopKBudget<444>{}, Decay<1>{-1e-5f}};
    Buffer workspace;
    std::size_t max_room = 0;

    rows_view<const float> queries() const { return view_bhsd(q.data(), 1, query_heads, length, dim); }
    rows_view<const float> keys_view() const { return view_bhsd(k.data(), 1, kv_heads, length, dim); }
    rows_view<const float> values() const { return view_bhsd(v.data(), 1, kv_heads, length, dim); }
    static plane_view<const float> read(const std::vector<float>& plane, std::int32_t heads = kv_heads) {
        return view_bhs(plane.data(), 1, heads, length);
    }
    static plane_view<float> write(std::vector<float>& plane, std::int32_t heads = kv_heads) {
        return view_bhs(plane.data(), 1, heads, length);
    }
    workspace_view need(std::size_t bytes) {
        max_room = std::max(max_room, bytes);
        workspace.grow(bytes);
        return workspace;
    }

    void dense() {
        const kv_view<float> all{keys_view(), values()};
        attend<float>(ctx, {}, queries(), all, sequences, view_bhsd(out.data(), 1, query_heads, length, dim),
                      write(lse, query_heads),
                      need(attend_workspace_bytes<float>(ctx, {}, queries(), all, sequences)));
    }
    void make_target() {
        FutureMassOptions options;
        options.window = window;
        future_mass<float>(ctx, {}, queries(), keys_view(), read(lse, query_heads), sequences, write(target),
                           need(future_mass_workspace_bytes<float>(ctx, queries(), keys_view())), options);
    }
    void loss() {
        BoundaryLoss boundary;
        boundary.sampler.count = 1024;
        double d_log_gamma[kv_heads] = {};
        BoundaryValue value;
        boundary(ctx, all_params, read(scores), read(target), sequences, write(d_scores), d_log_gamma, &value,
                 need(boundary.workspace_bytes(ctx, all_params, sequences, kv_heads)));
    }
};

/// A scorer with weights and their gradients.
template <class S>
struct Trained {
    S scorer;
    typename S::template parameters<float> weights, gradients;
    std::vector<std::vector<float>> memory;

    explicit Trained(const S& sizes) : scorer(sizes) {
        memory.reserve(64);
        const auto fill = [&](auto& into) {
            for_each_parameter(scorer, into, [&](const char* name, float*& array, std::size_t count, bool) {
                if (std::string(name) != "skip" && count > 0) {
                    array = memory.emplace_back(count).data();
                }
            });
        };
        fill(weights), fill(gradients);
        initialize(scorer, weights, 1);
        std::vector<const float*> pointers;
        for_each_parameter(scorer, weights,
                           [&](const char*, float*& array, std::size_t, bool) { pointers.push_back(array); });
        std::size_t i = 0;
        for_each_parameter(scorer, scorer.weights, [&](const char*, const float*& array, std::size_t, bool) {
            array = pointers[i++];
        });
    }
    void score(Layer& layer, std::int32_t delay) {
        score_sequence(layer.ctx, scorer, layer.keys_view(), layer.values(), layer.sequences, delay,
                       Layer::write(layer.scores),
                       layer.need(score_sequence_workspace_bytes(layer.ctx, scorer, layer.keys_view(),
                                                                 layer.values(), layer.sequences)));
    }
    void backward(Layer& layer, std::int32_t delay) {
        const ScoreBackward<float> call{layer.keys_view(), layer.values(), layer.sequences, delay,
                                        Layer::read(layer.d_scores)};
        score_sequence_backward(layer.ctx, scorer, call, gradients,
                                layer.need(score_sequence_backward_workspace_bytes(layer.ctx, scorer, call)));
    }
};

MlpScorer<> mlp() {
    MlpScorer<> scorer;
    scorer.heads = kv_heads, scorer.head_dim_qk = scorer.head_dim_vo = dim, scorer.hidden = 128;
    return scorer;
}
mLSTMScorer<> mlstm() {
    mLSTMScorer<> scorer;
    scorer.heads = kv_heads, scorer.head_dim_qk = scorer.head_dim_vo = dim;
    return scorer;
}

void dense_forward(benchmark::State& state) {
    Layer layer;
    for ([[maybe_unused]] auto _ : state) {
        layer.dense();
    }
}

void target(benchmark::State& state) {
    Layer layer;
    layer.dense();
    for ([[maybe_unused]] auto _ : state) {
        layer.make_target();
    }
}

void boundary_loss(benchmark::State& state) {
    Layer layer;
    layer.dense(), layer.make_target();
    for ([[maybe_unused]] auto _ : state) {
        layer.loss();
    }
}

/// Target, scores, loss, gradients of the scorer.
template <class S>
void training_pass(benchmark::State& state, const S& sizes, std::int32_t delay) {
    Layer layer;
    layer.dense();
    const std::size_t of_attention = layer.max_room;
    Trained<S> trained(sizes);
    for ([[maybe_unused]] auto _ : state) {
        layer.make_target();
        trained.score(layer, delay);
        layer.loss();
        trained.backward(layer, delay);
    }
    state.counters["workspace MiB"] = static_cast<double>(std::max(layer.max_room, of_attention)) / (1 << 20);
}
void training_pass_mlp(benchmark::State& state) { training_pass(state, mlp(), 0); }
void training_pass_mlstm(benchmark::State& state) { training_pass(state, mlstm(), window); }

BENCHMARK(dense_forward)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(target)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(boundary_loss)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(training_pass_mlp)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(training_pass_mlstm)->Unit(benchmark::kMillisecond)->UseRealTime();

/// Remembers times: processor time, which other programs on the machine do not lengthen.
class Ratios : public benchmark::ConsoleReporter {
  public:
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            if (run.run_type == Run::RT_Iteration && !run.error_occurred) {
                times_[run.run_name.function_name] = run.GetAdjustedCPUTime();
            }
        }
        ConsoleReporter::ReportRuns(runs);
    }
    void print() const {
        for (const char* name : {"target", "boundary_loss", "training_pass_mlp", "training_pass_mlstm"}) {
            if (times_.contains(name) && times_.contains("dense_forward")) {
                fmt::print("{:<40} {:>6.2f}x{}\n", std::string(name) + " / dense_forward",
                           times_.at(name) / times_.at("dense_forward"),
                           std::string(name).starts_with("training") ? "   (target: at most 1.5x)" : "");
            }
        }
    }

  private:
    std::map<std::string, double> times_;
};

}  // namespace

int main(int argc, char** argv) {
    Ratios ratios;
    if (!run_benchmarks(argc, argv, ratios)) {
        return 1;
    }
    fmt::print("\nRatios of this run (processor time, one thread):\n");
    ratios.print();
    return 0;
}
