// The bounded cache on the host: a decode step against plain attention over as many rows, and over all rows;
// prefill with a budget against dense prefill. Prints the ratios of one run after the times.
//
// Targets: a step at B = 2048 after 32k tokens within 1.3x of attention over 2048 rows, and 12x faster than
// over 32k rows; prefill of 16k tokens with a budget of 2048 at the rate per visible pair of dense prefill,
// which has 4.27 times as many pairs; on two threads twice as fast.
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/streaming_llm.hpp>

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
using Storage = bf16;

// Decode reads more than any cache of the processor holds; prefill is sized to take seconds.
struct Model {
    std::int32_t kv_heads, group, dim;
};
constexpr Model decode_model{4, 4, 128}, prefill_model{2, 2, 64};
constexpr std::int32_t sinks = 4, window = 256, budget = 2048;

template <class T>
std::vector<T> random_rows(std::size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<T> rows(count);
    for (T& x : rows) {
        x = T(uniform(generator));
    }
    return rows;
}

/// A cache of one sequence, filled with random tokens.
template <class P>
struct Filled {
    Model model;
    host ctx;
    FixedBudgetCache<P, Storage> cache;
    std::vector<unsigned char> memory, workspace;
    std::vector<Storage> q, k, v, out;
    std::vector<float> scores;
    std::int32_t chunk;

    Filled(const Model& sizes, const P& policy, std::int64_t tokens, std::int32_t prefill_tokens,
           int threads = 0)
        : model(sizes),
          ctx(threads),
          cache({.layers = 1,
                 .max_sequences = 1,
                 .query_heads = sizes.kv_heads * sizes.group,
                 .kv_heads = sizes.kv_heads,
                 .head_dim = sizes.dim},
                policy),
          memory(cache.bytes().total()),
          chunk(prefill_tokens) {
        cache.bind(ctx, memory.data(), memory.size());
        const auto heads = static_cast<std::size_t>(model.kv_heads);
        const std::size_t elements =
            static_cast<std::size_t>(chunk) * static_cast<std::size_t>(model.dim) * heads;
        q = random_rows<Storage>(elements * static_cast<std::size_t>(model.group), 1);
        k = random_rows<Storage>(elements, 2);
        v = random_rows<Storage>(elements, 3);
        scores = random_rows<float>(static_cast<std::size_t>(chunk) * heads, 4);
        out.resize(q.size());
        workspace.resize(cache.workspace_bytes(ctx, {.batch = 1, .tokens = chunk}));
        for (std::int64_t at = 0; at < tokens; at += chunk) {
            feed(chunk);
        }
    }

    void feed(std::int32_t tokens) {
        const Batch batch{.count = 1, .length = tokens};
        StepIO<Storage> io =
            cache.nhd(q.data(), k.data(), v.data(), out.data(), {.batch = 1, .tokens = tokens});
        if constexpr (P::ranked) {
            io.scores = view_bhs<const float>(scores.data(), 1, model.kv_heads, tokens);
        }
        const auto ref = cache.layer(0);
        const workspace_view scratch{workspace.data(), workspace.size()};
        if (tokens == 1) {
            step(ctx, ref, io, scratch);
        } else {
            prefill(ctx, ref, io, scratch);
        }
        cache.advance(ctx, batch);
    }
};

KVpop<> bounded() {
    return KVpop<>{Sink<>{sinks}, Window<>{window}, TopKBudget<>{budget - sinks - window}, Decay<1>{-1e-4f},
                   GivenScores{}};
}

/// Attention over `rows` rows that are there already: what a dense cache of that length costs.
void attention_over(benchmark::State& state) {
    const auto rows = static_cast<std::int32_t>(state.range(0));
    using Dense = Policy<Window<>>;
    Filled<Dense> filled(decode_model, Dense{Window<>{rows}}, rows, 256);
    constexpr std::int32_t query_heads = decode_model.kv_heads * decode_model.group;
    for ([[maybe_unused]] auto _ : state) {
        attend(filled.ctx, filled.cache.layer(0),
               {.q = view_bshd<const Storage>(filled.q.data(), 1, 1, query_heads, decode_model.dim),
                .out = view_bshd(filled.out.data(), 1, 1, query_heads, decode_model.dim),
                .batch = Batch{.count = 1}},
               {filled.workspace.data(), filled.workspace.size()});
    }
    state.SetBytesProcessed(state.iterations() * rows * decode_model.kv_heads * decode_model.dim * 2 *
                            std::int64_t{sizeof(Storage)});
}
BENCHMARK(attention_over)->Arg(budget)->Arg(32768)->Unit(benchmark::kMicrosecond)->UseRealTime();

void step_after_32k(benchmark::State& state) {
    Filled<KVpop<>> filled(decode_model, bounded(), 32768, 256);
    std::mt19937 generator(9);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for ([[maybe_unused]] auto _ : state) {
        for (std::int32_t h = 0; h < decode_model.kv_heads; ++h) {
            filled.scores[static_cast<std::size_t>(h)] = uniform(generator);
        }
        filled.feed(1);
    }
    state.SetBytesProcessed(state.iterations() * budget * decode_model.kv_heads * decode_model.dim * 2 *
                            std::int64_t{sizeof(Storage)});
}
BENCHMARK(step_after_32k)->Unit(benchmark::kMicrosecond)->UseRealTime();

/// The orders in which scores may come. Rising: every key that leaves the window evicts another.
enum Order : std::int64_t { random_order, rising_order };

/// 16k tokens in chunks of `chunk` tokens, into a cache that is empty, on state.range(0) threads.
constexpr std::int32_t prompt = 16384;
template <class P>
void prefill_16k(benchmark::State& state, const P& policy, Order order = random_order,
                 std::int32_t chunk = prompt) {
    Filled<P> filled(prefill_model, policy, 0, chunk, static_cast<int>(state.range(0)));
    for (std::size_t i = 0; order == rising_order && i < filled.scores.size(); ++i) {
        filled.scores[i] = static_cast<float>(i % static_cast<std::size_t>(chunk));
    }
    for ([[maybe_unused]] auto _ : state) {
        filled.cache.clear(filled.ctx, 0);
        for (std::int32_t at = 0; at < prompt; at += chunk) {
            filled.feed(chunk);
        }
    }
}
auto decayed_by_threes() {
    return Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>{
        Sink<>{sinks}, Window<>{window}, TopKBudget<>{budget - sinks - window}, Decay<dynamic>{-1e-4f, 3}};
}
void prefill_16k_bounded(benchmark::State& state) { prefill_16k(state, bounded()); }
void prefill_16k_rising(benchmark::State& state) { prefill_16k(state, bounded(), rising_order); }
void prefill_16k_decay_step_3(benchmark::State& state) { prefill_16k(state, decayed_by_threes()); }
void prefill_16k_in_chunks_of_2k(benchmark::State& state) {
    prefill_16k(state, bounded(), random_order, 2048);
}
void prefill_16k_dense(benchmark::State& state) { prefill_16k(state, Policy<Window<>>{Window<>{prompt}}); }
void prefill_row(benchmark::internal::Benchmark* row) {
    row->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(1);
}
BENCHMARK(prefill_16k_bounded)->Apply(prefill_row);
BENCHMARK(prefill_16k_rising)->Apply(prefill_row);
BENCHMARK(prefill_16k_decay_step_3)->Apply(prefill_row);
BENCHMARK(prefill_16k_in_chunks_of_2k)->Apply(prefill_row);
BENCHMARK(prefill_16k_dense)->Apply(prefill_row);

/// Remembers the times, so that ratios of one run can be printed.
class Ratios : public benchmark::ConsoleReporter {
  public:
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            if (run.run_type == Run::RT_Iteration) {
                // Of repeated runs the fastest: others use the machine, too.
                const double seconds = run.real_accumulated_time / static_cast<double>(run.iterations);
                double& best = seconds_[run.run_name.function_name + run.run_name.args];
                best = best == 0.0 ? seconds : std::min(best, seconds);
            }
        }
        ConsoleReporter::ReportRuns(runs);
    }
    void print(const std::string& what, const std::string& slow, const std::string& fast,
               const std::string& target) const {
        const auto a = seconds_.find(slow), b = seconds_.find(fast);
        if (a == seconds_.end() || b == seconds_.end()) {
            return;
        }
        fmt::print("{:<78} {:>6.2f}x   (target: {})\n", what, a->second / b->second, target);
    }

  private:
    std::map<std::string, double> seconds_;
};

}  // namespace

int main(int argc, char** argv) {
    Ratios ratios;
    if (!run_benchmarks(argc, argv, ratios)) {
        return 1;
    }
    fmt::print("\nRatios of this run (bf16; decode: {} KV heads x {}, head_dim {}; prefill: {} x {}, {}):\n",
               decode_model.kv_heads, decode_model.group, decode_model.dim, prefill_model.kv_heads,
               prefill_model.group, prefill_model.dim);
    ratios.print("step at B = 2048 after 32k tokens / attention over 2048 rows", "step_after_32k",
                 "attention_over2048", "at most 1.3");
    ratios.print("attention over 32k rows / step at B = 2048", "attention_over32768", "step_after_32k",
                 "at least 12");
    for (const std::string threads : {"1", "2"}) {
        const auto row = [&](const std::string& how, const std::string& name) {
            std::string what = "dense prefill of 16k tokens / with a budget of 2048";
            what.append(how).append(", threads: ").append(threads);
            ratios.print(what, "prefill_16k_dense" + threads, name + threads, "4.27, the visible pairs");
        };
        row("", "prefill_16k_bounded");
        row(", rising scores", "prefill_16k_rising");
        row(", decay step 3", "prefill_16k_decay_step_3");
        row(", chunks of 2k", "prefill_16k_in_chunks_of_2k");
    }
    ratios.print("prefill of 16k tokens with a budget of 2048: 1 thread / 2", "prefill_16k_bounded1",
                 "prefill_16k_bounded2", "2");
    return 0;
}
