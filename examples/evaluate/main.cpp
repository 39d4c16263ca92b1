// What KV-cache policies cost a model: bits per byte, retrieval accuracy, memory and speed, for each policy
// and budget.
//
//   evaluate [--model FOLDER] [--scorers FILE]... [--policies LIST] [--budgets LIST] [--sequences N] [--out
//       NAME] ...
#include "measure.hpp"
#include "policies.hpp"
#include "report.hpp"
#include "support/arguments.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/whole_file.hpp"

#if KVPOLICY_EXAMPLES_CUDA
#include <llama/cuda/engine.hpp>
#endif
#include <llama/error.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace evaluate {
namespace {

using examples::list;
using examples::number;

constexpr const char* usage = R"(usage: evaluate [OPTION...]
  --model FOLDER     (default: the byte model of this repository)
  --held-out FOLDER  eval.bin and eval.json (default: those of the byte model, in the model's own tokens)
  --scorers FILE     trained scorers, named by the file; may be repeated
  --policies LIST    some of them, as in dense,streaming,oracle-* (default: all; an unknown name lists them)
  --budgets LIST     entries per head, or percent of a sequence that is compressed away: 1024,512 or
                     75%,88%,94% (the default)
  --sequences N      at most N (default: all 16, as tokens of other models fewer)
  --joined N         held-out sequences put together for a model that does not read bytes (2)
  --sinks N (4)  --window N (64)  --threads N (all)
  --chunk N          of prefill on the host (1024)
  --speed N          tokens that are decoded after the first sequence to measure the speed, 0 for none (48)
  --backend NAME     host (the default), or cuda: the first GPU, with fp32 weights; policies that it does not
                     have are left out unless they are named, and so are the host's own measures: scorers
                     beside the oracle
  --out NAME         writes NAME.csv, NAME.json and NAME.txt, the table, after every line of it

An option that a run would not look at is refused.
)";

struct Options {
    std::string model = KVPOLICY_BYTE_MODEL, held_out = KVPOLICY_BYTE_MODEL, out;
    std::vector<std::string> scorers, policies, budgets{"75%", "88%", "94%"};
    std::int32_t sequences = 1 << 20, joined = 2, sinks = 4, window = 64, chunk = 1024, threads = 0,
                 speed = 48;
    bool on_gpu = false, joins = false;  ///< joins: --joined was given
};

Options parse(int argc, char** argv) {
    Options o;
    bool chunks = false;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            fmt::print("{}", usage);
            std::exit(0);
        }
        const std::string value = examples::next_value(argc, argv, i, usage);
        if (name == "--model") {
            o.model = value;
        } else if (name == "--held-out") {
            o.held_out = value;
        } else if (name == "--scorers") {
            o.scorers.push_back(value);
        } else if (name == "--policies") {
            o.policies = list(value);
        } else if (name == "--budgets") {
            o.budgets = list(value);
        } else if (name == "--sequences") {
            o.sequences = number(name, value, 1, 1 << 20);
        } else if (name == "--joined") {
            o.joined = number(name, value, 1, 1 << 10);
            o.joins = true;
        } else if (name == "--sinks") {
            o.sinks = number(name, value, 0, 1 << 20);
        } else if (name == "--window") {
            o.window = number(name, value, 1, 1 << 20);
        } else if (name == "--chunk") {
            o.chunk = number(name, value, 1, 1 << 20);
            chunks = true;
        } else if (name == "--threads") {
            o.threads = number(name, value, 0, 4096);
        } else if (name == "--speed") {
            o.speed = number(name, value, 0, 1 << 20);
        } else if (name == "--backend") {
            if (value != "host" && value != "cuda") {
                llama::fail("--backend: {} is not allowed; it must be host or cuda", llama::printable(value));
            }
            o.on_gpu = value == "cuda";
        } else if (name == "--out") {
            o.out = value;
        } else {
            llama::fail("{}: not understood\n{}", llama::clipped(name), usage);
        }
    }
    if (chunks && o.on_gpu) {
        llama::fail("--chunk: needs --backend host; a GPU has a chunk of its own");
    }
    return o;
}

/// Rows of a budget that is a number or a percentage: 75% of 4096 leaves 1024, 94% (15/16) 256. Percentages
/// are rounded to sixteenths: the paper's 88% is 7/8.
std::int32_t rows_of(const std::string& text, std::int32_t length) {
    if (!text.ends_with('%')) {
        return number("--budgets", text, 1, 1 << 30);
    }
    const std::int32_t percent =
        number("--budgets", std::string_view(text).substr(0, text.size() - 1), 0, 99);
    const std::int32_t sixteenths = (percent * 16 + 50) / 100;
    return std::max(1, length * (16 - sixteenths) / 16);
}

/// "oracle-*" stands for all names that begin so.
bool matches(const std::string& pattern, const std::string& name) {
    return pattern.ends_with('*') ? name.starts_with(std::string_view(pattern).substr(0, pattern.size() - 1))
                                  : name == pattern;
}

/// Refuses files of scorers that would share a name, or that no policy takes, and those that read keys
/// after another window.
void check_scorers(const Options& o, std::span<const examples::TrainedScorers> trained,
                   std::span<const std::string> names, std::span<const std::string> known_names,
                   std::span<const EvaluatedPolicy* const> chosen) {
    for (const std::string& name : known_names) {
        if (std::ranges::count(known_names, name) > 1) {
            llama::fail("--scorers: two policies would be called {}; rename a file", name);
        }
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
        const std::string own[] = {names[i], names[i] + "-shared", names[i] + "-gated",
                                   names[i] + "-matched"};
        if (std::ranges::none_of(chosen, [&](const EvaluatedPolicy* policy) {
                return std::ranges::find(own, policy->name) != std::end(own);
            })) {
            llama::fail("--scorers: {} is taken by none of --policies {}", o.scorers[i],
                        fmt::join(o.policies, ","));
        }
        examples::check_window(trained[i], o.window);
    }
}

/// Leaves out policies that a GPU does not have, and refuses those that were named.
void keep_those_of_a_gpu(const Options& o, std::vector<const EvaluatedPolicy*>& chosen) {
    if (!KVPOLICY_EXAMPLES_CUDA) {
        llama::fail(
            "--backend: cuda is not allowed; this program was built without it (KVPOLICY_ENABLE_CUDA)");
    }
    for (const EvaluatedPolicy* policy : chosen) {
        if (!policy->make_on_device && std::ranges::find(o.policies, policy->name) != o.policies.end()) {
            llama::fail("--policies: {} is not allowed with --backend cuda; a GPU does not have it",
                        policy->name);
        }
    }
    std::erase_if(chosen, [](const EvaluatedPolicy* policy) { return !policy->make_on_device; });
    if (chosen.empty()) {
        llama::fail("--backend: cuda is not allowed; a GPU has none of these policies");
    }
}

/// Writes what is done so far, and returns the table.
std::string report(const Options& o, const Run& of, std::span<const Result> done) {
    std::string text = fmt::format(
        "{}: {} held-out sequences of {} tokens, {} retrieval queries; {} sinks, a window of {}; cache in "
        "bf16\n\n{}",
        of.model, of.sequences, of.length, done.front().score.answers, o.sinks, o.window, table(of, done));
    if (!o.out.empty()) {
        write_csv(o.out + ".csv", of, done);
        write_json(o.out + ".json", of, done);
        examples::write_whole(o.out + ".txt", text);
    }
    return text;
}

int run(int argc, char** argv) {
    const Options o = parse(argc, argv);
    const auto start = std::chrono::steady_clock::now();
    std::vector<examples::OutputLock> locks;
    for (const char* kind : {".csv", ".json", ".txt"}) {
        if (!o.out.empty()) {
            locks.emplace_back("--out", o.out + kind);
        }
    }
    const kvpolicy::host ctx(o.threads);
    const llama::Model model = llama::load_model(o.model);
    const llama::Config& config = model.config;
    examples::HeldOut data = examples::read_held_out(o.held_out);
    if (config.vocab_size == 256 && o.joins) {
        llama::fail(
            "--joined: needs a model that does not read bytes, as the held-out text does; {} reads them",
            o.model);
    }
    if (config.vocab_size != 256) {
        const llama::Tokenizer tokenizer = llama::read_tokenizer(o.model, config.vocab_size);
        data = examples::tokenize(data, tokenizer, static_cast<std::size_t>(o.joined), 2);
    }
    const std::size_t sequences = std::min(static_cast<std::size_t>(o.sequences), data.tokens.size());

    std::vector<examples::TrainedScorers> trained;
    std::vector<std::string> names;
    for (const std::string& file : o.scorers) {
        trained.push_back(examples::load_scorers(file));
        examples::check_fits(trained.back(), config, file);
        names.push_back(std::filesystem::path(file).stem().string());
    }
    const std::vector<EvaluatedPolicy> known = all_policies(trained, names);
    std::vector<const EvaluatedPolicy*> chosen;
    std::vector<std::string> known_names;
    for (const EvaluatedPolicy& policy : known) {
        known_names.push_back(policy.name);
        if (o.policies.empty() || std::ranges::any_of(o.policies, [&](const std::string& pattern) {
                return matches(pattern, policy.name);
            })) {
            chosen.push_back(&policy);
        }
    }
    for (const std::string& name : o.policies) {
        if (std::ranges::none_of(known_names,
                                 [&](const std::string& known_name) { return matches(name, known_name); })) {
            llama::fail("--policies: {} is not allowed; it must be one of {}", llama::clipped(name),
                        fmt::join(known_names, ", "));
        }
    }
    check_scorers(o, trained, names, known_names, chosen);
    if (o.on_gpu) {
        keep_those_of_a_gpu(o, chosen);
    }
    std::vector<Result> results;
    std::vector<float> betas;
    const auto wants = [&](float beta) {
        if (std::ranges::find(betas, beta) == betas.end()) {
            betas.push_back(beta);
        }
    };
    for (const EvaluatedPolicy* policy : chosen) {
        if (policy->beta != 0.0f) {
            wants(policy->beta);
        }
        if (policy->scorers != nullptr && !o.on_gpu) {  // its recall is measured against these
            wants(1.0f);
            wants(2.0f);
        }
        if (!policy->bounded) {
            results.push_back({policy, 0, {}, 0.0, 0.0, {}, {}, {}});
        }
    }
    for (const std::string& budget : o.budgets) {
        const std::int32_t rows = rows_of(budget, data.length);
        if (rows <= o.sinks + o.window) {
            llama::fail("--budgets: {} leaves {} rows of {}; sinks and window take {}", budget, rows,
                        data.length, o.sinks + o.window);
        }
        for (const EvaluatedPolicy* policy : chosen) {
            if (policy->bounded) {
                results.push_back({policy, rows, {}, 0.0, 0.0, {}, {}, {}});
            }
        }
    }

    examples::Progress progress;
    llama::Engine engine(model);
    llama::DeviceEngine* gpu = nullptr;
#if KVPOLICY_EXAMPLES_CUDA
    std::unique_ptr<llama::DeviceEngine> made_gpu;
    if (o.on_gpu) {
        made_gpu = std::make_unique<llama::DeviceEngine>(model, llama::DType::f32);
        gpu = made_gpu.get();
    }
#endif
    Bench bench(ctx, engine, data, o.chunk, o.sinks, o.window, o.speed, gpu);
    const Run of{std::filesystem::path(o.model).lexically_normal().filename().string(),
                 static_cast<std::int32_t>(sequences),
                 data.length,
                 o.sinks,
                 o.window,
                 config.layers,
                 config.kv_heads,
                 config.head_dim};
    std::vector<std::map<float, std::vector<float>>> targets(sequences);  // by beta
    for (std::size_t s = 0; s < sequences && !betas.empty(); ++s) {
        progress.show(fmt::format("sequence {} of {}: future attention", s + 1, sequences));
        examples::Oracle oracle = bench.observe(s);
        for (const float beta : betas) {
            targets[s][beta] = bench.targets(oracle, beta);
        }
        for (Result& result : results) {
            if (result.policy->scorers != nullptr && !o.on_gpu) {
                bench.oracle_recall(oracle, targets[s], result);
            }
        }
    }
    std::string text;
    for (std::size_t i = 0; i < results.size(); ++i) {
        Result& result = results[i];
        const std::string rows = result.budget == 0 ? "" : fmt::format(" at {} rows", result.budget);
        for (std::size_t s = 0; s < sequences; ++s) {
            progress.show(fmt::format("{} of {}: {}{}, sequence {} of {}", i + 1, results.size(),
                                      result.policy->label, rows, s + 1, sequences));
            bench.run(s, targets[s], result);
        }
        // After every line, so that a run that is cut off leaves what it has.
        text = report(o, of, std::span(results).first(i + 1));
    }
    progress.done();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("{}({:.0f} s)\n", text, time.count());
    return 0;
}

}  // namespace
}  // namespace evaluate

int main(int argc, char** argv) { return examples::run_program("evaluate", evaluate::run, argc, argv); }
