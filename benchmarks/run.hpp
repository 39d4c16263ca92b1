// main() of the benchmarks that print ratios of their own after the run.
#pragma once

#include <benchmark/benchmark.h>

/// Runs what the command line asks for; false where it has arguments that nobody knows.
inline bool run_benchmarks(int argc, char** argv, benchmark::BenchmarkReporter& reporter) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return false;
    }
    benchmark::RunSpecifiedBenchmarks(&reporter);
    return true;
}
