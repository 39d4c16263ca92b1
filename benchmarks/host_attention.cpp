// Attention on the host: products against the processor's peak, prefill through a mask against dense prefill,
// and decode against the machine's copy bandwidth. Prints the ratios of one run after the times.
//
// Targets: dense prefill at half of one core's FMA peak or more; 16k tokens with a budget of 2048 at least 3x
// faster than dense; decode (G <= 4, a set larger than 4x the last-level cache) reads at 60% of the copy
// bandwidth or more.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/host/simd_avx2.hpp>
#include <kvpolicy/kvpop.hpp>

#include "run.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace kvpolicy;

template <class T>
std::vector<T> random_rows(std::int64_t count, unsigned seed) {
    std::minstd_rand generator(seed);
    std::vector<T> rows(static_cast<std::size_t>(count));
    for (T& x : rows) {
        x = static_cast<T>(static_cast<float>(static_cast<int>(generator() % 2001) - 1000) * 1e-3f);
    }
    return rows;
}

/// Four times the last-level cache, or 256 MB where the system does not say.
std::int64_t large_set() {
#ifdef _SC_LEVEL3_CACHE_SIZE
    const auto cache = static_cast<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE));
    if (cache > 0) {
        return std::min<std::int64_t>(4 * cache + (std::int64_t{16} << 20), std::int64_t{1} << 31);
    }
#endif
    return std::int64_t{256} << 20;
}

/// Tensors of one call, one sequence.
template <class T>
struct Call {
    std::int32_t kv_heads, group, queries, rows, dim;
    std::vector<T> q, k, v, out;
    std::vector<expiry_t> expiry;
    std::vector<std::int32_t> starts;
    std::vector<unsigned char> memory;

    Call(std::int32_t kv_head_count, std::int32_t group_size, std::int32_t query_count,
         std::int32_t row_count, std::int32_t head_dim)
        : kv_heads(kv_head_count),
          group(group_size),
          queries(query_count),
          rows(row_count),
          dim(head_dim),
          q(random_rows<T>(std::int64_t{kv_heads} * group * queries * dim, 1)),
          k(random_rows<T>(std::int64_t{kv_heads} * rows * dim, 2)),
          v(random_rows<T>(std::int64_t{kv_heads} * rows * dim, 3)),
          out(q.size()),
          starts{rows - queries} {}

    void run(const host& ctx) {
        const auto queries_of = [&](auto* data) {
            return view_bhsd(data, 1, kv_heads * group, queries, dim);
        };
        const auto keys_of = [&](const std::vector<T>& from) {
            return view_bhsd(from.data(), 1, kv_heads, rows, dim);
        };
        kv_view<T> all{keys_of(k), keys_of(v)};
        if (!expiry.empty()) {
            all.mask.expiry = view_bhs<const expiry_t>(expiry.data(), 1, kv_heads, rows);
        }
        Sequences sequences{1, queries};
        sequences.starts = starts.data();
        const rows_view<const T> in = queries_of(q.data());
        memory.resize(attend_workspace_bytes(ctx, {}, in, all, sequences));
        attend(ctx, {}, in, all, sequences, queries_of(out.data()), {}, {memory.data(), memory.size()});
    }

    /// Floating-point operations of the exact live pairs.
    [[nodiscard]] double operations() const {
        double pairs = 0.0;
        for (std::int32_t h = 0; h < kv_heads; ++h) {
            for (std::int32_t t = 0; t < rows; ++t) {
                const expiry_t ends =
                    expiry.empty() ? never : expiry[static_cast<std::size_t>(std::int64_t{h} * rows + t)];
                pairs += std::max(std::min(ends, rows) - std::max(t, rows - queries), 0);
            }
        }
        return 4.0 * pairs * group * dim;
    }
};

// ---- one core: products against its peak ------------------------------------------------------------------

#if KVPOLICY_X86
/// Twelve chains of fused multiply-adds: what a core can do at most.
KVPOLICY_AVX2 float chains(std::int64_t rounds, float factor) {
    __m256 sum[12];
    const __m256 x = _mm256_set1_ps(factor);
    KVPOLICY_UNROLL
    for (int i = 0; i < 12; ++i) {
        sum[i] = _mm256_set1_ps(static_cast<float>(i));
    }
    for (std::int64_t n = 0; n < rounds; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 12; ++i) {
            sum[i] = _mm256_fmadd_ps(sum[i], x, x);
        }
    }
    __m256 all = sum[0];
    KVPOLICY_UNROLL
    for (int i = 1; i < 12; ++i) {
        all = _mm256_add_ps(all, sum[i]);
    }
    return host_backend::avx2::sum_of(all);
}

void fma_peak(benchmark::State& state) {
    if (detected_isa() != isa::avx2) {
        state.SkipWithError("needs AVX2");
        return;
    }
    constexpr std::int64_t rounds = 1 << 20;
    float factor = 0.999f;
    for ([[maybe_unused]] auto _ : state) {
        benchmark::DoNotOptimize(factor);  // so that a round is not taken for a constant
        benchmark::DoNotOptimize(chains(rounds, factor));
    }
    state.counters["GFLOP/s"] = benchmark::Counter(12.0 * 16.0 * static_cast<double>(rounds) * 1e-9,
                                                   benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(fma_peak)->Unit(benchmark::kMillisecond);
#endif

template <class T>
void prefill_one_core(benchmark::State& state) {
    const auto dim = static_cast<std::int32_t>(state.range(0));
    const host ctx(1);
    Call<T> call(1, 4, 4096, 4096, dim);
    for ([[maybe_unused]] auto _ : state) {
        call.run(ctx);
    }
    state.counters["GFLOP/s"] =
        benchmark::Counter(call.operations() * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK_TEMPLATE(prefill_one_core, float)->Arg(64)->Arg(128)->Unit(benchmark::kMillisecond)->MinTime(0.3);
BENCHMARK_TEMPLATE(prefill_one_core, bf16)->Arg(64)->Arg(128)->Unit(benchmark::kMillisecond)->MinTime(0.3);

// ---- prefill of 16k tokens: through a mask, and dense -----------------------------------------------------

void prefill_16k(benchmark::State& state, bool bounded) {
    const host ctx;
    Call<bf16> call(2, 3, 16384, 16384, 64);
    if (bounded) {
        const KVpop<> policy{Sink<>{4}, Window<>{256}, TopKBudget<>{2048 - 4 - 256}, Decay<1>{-1e-4f},
                             GivenScores{}};
        const std::vector<float> scores = random_rows<float>(std::int64_t{call.kv_heads} * call.rows, 4);
        call.expiry.resize(scores.size());
        const Sequences sequences{1, call.rows};
        std::vector<unsigned char> memory(build_mask_workspace_bytes(ctx, policy, sequences, call.kv_heads));
        build_mask(ctx, policy, view_bhs<const float>(scores.data(), 1, call.kv_heads, call.rows), sequences,
                   view_bhs(call.expiry.data(), 1, call.kv_heads, call.rows), {memory.data(), memory.size()});
    }
    for ([[maybe_unused]] auto _ : state) {
        call.run(ctx);
    }
    state.counters["GFLOP/s"] =
        benchmark::Counter(call.operations() * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}
void prefill_16k_bounded(benchmark::State& state) { prefill_16k(state, true); }
void prefill_16k_dense(benchmark::State& state) { prefill_16k(state, false); }
BENCHMARK(prefill_16k_bounded)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(2);
BENCHMARK(prefill_16k_dense)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(1);

// ---- decode against the copy bandwidth, all threads -------------------------------------------------------

/// Copies as many bytes as a decode step reads, in parts, on the same threads.
void copy(benchmark::State& state) {
    const host ctx;
    const std::int64_t bytes = large_set();
    const std::vector<unsigned char> from(static_cast<std::size_t>(bytes), 1);
    std::vector<unsigned char> to(static_cast<std::size_t>(bytes), 2);
    const std::int64_t parts = ctx.threads();
    for ([[maybe_unused]] auto _ : state) {
        ctx.parallel_for(parts, [&](std::int64_t part) {
            const std::int64_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
            std::memcpy(to.data() + begin, from.data() + begin, static_cast<std::size_t>(end - begin));
        });
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * bytes);
}
BENCHMARK(copy)->Unit(benchmark::kMillisecond)->UseRealTime()->MinTime(0.2);

template <class T>
void decode(benchmark::State& state) {
    const host ctx;
    const auto group = static_cast<std::int32_t>(state.range(0));
    const auto dim = static_cast<std::int32_t>(state.range(1));
    constexpr std::int32_t kv_heads = 8;
    const auto row_bytes = static_cast<std::int64_t>(2 * sizeof(T)) * dim * kv_heads;
    Call<T> call(kv_heads, group, 1, static_cast<std::int32_t>(large_set() / row_bytes), dim);
    for ([[maybe_unused]] auto _ : state) {
        call.run(ctx);
    }
    state.SetBytesProcessed(state.iterations() * call.rows * row_bytes);
}
BENCHMARK_TEMPLATE(decode, float)
    ->Args({1, 64})
    ->Args({3, 64})
    ->Args({4, 128})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(0.2);
BENCHMARK_TEMPLATE(decode, bf16)
    ->Args({1, 128})
    ->Args({3, 64})
    ->Args({4, 128})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(0.2);
BENCHMARK_TEMPLATE(decode, fp16)->Args({4, 128})->Unit(benchmark::kMillisecond)->UseRealTime()->MinTime(0.2);

/// Remembers what every run counted, so that ratios of one run can be printed.
class Ratios : public benchmark::ConsoleReporter {
  public:
    void ReportRuns(const std::vector<Run>& runs) override {
        for (const Run& run : runs) {
            if (run.run_type != Run::RT_Iteration || run.error_occurred) {
                continue;
            }
            std::string name = run.run_name.function_name;
            if (!run.run_name.args.empty()) {
                name += "/" + run.run_name.args;
            }
            milliseconds_[name] = run.GetAdjustedRealTime();
            for (const char* counter : {"GFLOP/s", "bytes_per_second"}) {
                const auto found = run.counters.find(counter);
                if (found != run.counters.end()) {
                    rates_[name] = found->second.value;
                }
            }
        }
        ConsoleReporter::ReportRuns(runs);
    }
    void print() const {
        for (const auto& [name, rate] : rates_) {
            if (name.starts_with("prefill_one_core") && rates_.contains("fma_peak")) {
                line(name + " / fma_peak", 100.0 * rate / rates_.at("fma_peak"), "%", "at least 50%");
            }
            if (name.starts_with("decode") && rates_.contains("copy")) {
                line(name + ", bytes read / bytes copied", 100.0 * rate / rates_.at("copy"), "%",
                     "at least 60%");
            }
        }
        if (milliseconds_.contains("prefill_16k_dense") && milliseconds_.contains("prefill_16k_bounded")) {
            line("prefill of 16k tokens: dense / budget of 2048",
                 milliseconds_.at("prefill_16k_dense") / milliseconds_.at("prefill_16k_bounded"), "x",
                 "at least 3x");
        }
    }

  private:
    static void line(const std::string& what, double value, const char* unit, const char* target) {
        fmt::print("{:<56} {:>7.1f}{}   (target: {})\n", what, value, unit, target);
    }
    std::map<std::string, double> milliseconds_, rates_;
};

}  // namespace

int main(int argc, char** argv) {
    Ratios ratios;
    if (!run_benchmarks(argc, argv, ratios)) {
        return 1;
    }
    fmt::print("\nRatios of this run:\n");
    ratios.print();
    return 0;
}
