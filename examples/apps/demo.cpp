// The demo: the byte model with its full KV cache beside the same model with bounded ones, in a table; then
// text written with a bounded cache.
//
//   demo [--model FOLDER] [--sequences N] [--check]
//
// --check exits with 1 unless the table shows what it is there to show (a test runs it so). Its table has the
// lines that it looks at.
#include "support/evaluation.hpp"
#include "support/oracle.hpp"
#include "support/policies.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/trained.hpp"

#include <fmt/format.h>
#include <llama/engine.hpp>
#include <llama/error.hpp>
#include <llama/sampler.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace {

using Storage = kvpolicy::bf16;

struct Options {
    std::string model = KVPOLICY_BYTE_MODEL;
    std::size_t sequences = 3;
    bool check = false;
};

constexpr const char* usage = "usage: demo [--model FOLDER] [--sequences N] [--check]";

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) {
                llama::fail("{}: needs a value", argument);
            }
            return argv[++i];
        };
        if (argument == "--model") {
            options.model = value();
        } else if (argument == "--sequences") {
            const std::string text = value();
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), options.sequences);
            if (error != std::errc{} || end != text.data() + text.size() || options.sequences < 1) {
                llama::fail("--sequences: {} is not allowed; it must be a number, 1 or more",
                            llama::printable(text));
            }
        } else if (argument == "--check") {
            options.check = true;
        } else if (argument == "--help" || argument == "-h") {
            fmt::print("{}\n", usage);
            std::exit(0);
        } else {
            llama::fail("{}: is no option; {}", llama::printable(argument), usage);
        }
    }
    return options;
}

struct Row {
    std::string name;
    std::string policy;     // for make_attention; "trained": the scorers of `file`
    float beta = 0.0f;      // of the oracle's scores; 0: none
    std::string file = {};  // beside the model
    bool checked = true;    // --check looks at it
};

const Row all_rows[] = {
    {"StreamingLLM", "streaming"},
    {"KVpop-mlp, trained", "trained", 0.0f, "scorers/kvpop-mlp.safetensors"},
    {"KVpop, trained", "trained", 0.0f, "scorers/kvpop.safetensors"},
    {"KVpop rule, oracle, beta 1", "given", 1.0f, {}, false},
    {"KVpop rule, oracle, beta 2", "given", 2.0f},
};
struct Budget {
    std::string compression;
    std::int32_t entries;
    bool checked = true;
};
const Budget all_budgets[] = {{"75%", 1024}, {"88%", 512, false}, {"94%", 256}};

void write_text(const kvpolicy::host& ctx, const llama::Model& model, const examples::HeldOut& data) {
    constexpr std::int32_t budget = 256, count = 400;
    const std::vector<std::int32_t>& tokens = data.tokens[8 % data.tokens.size()];  // prose
    const std::size_t prompt = std::min<std::size_t>(2000, tokens.size() / 2),
                      shown = std::min<std::size_t>(160, prompt);
    const llama::Tokenizer tokenizer = llama::read_tokenizer({}, model.config.vocab_size);
    auto attention =
        examples::make_attention<Storage>(ctx, model.config, {.name = "streaming", .budget = budget}, 0);
    llama::Engine engine(model);
    std::vector<std::int64_t> positions(prompt);
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    auto logits = engine.forward(std::span(tokens).first(prompt), positions, *attention);
    fmt::print(
        "\nText from the model after a prompt of {} bytes, with a cache of {} entries per head "
        "(StreamingLLM: 4 "
        "sinks, and\n"
        "the most recent keys):\n\n  ...{}[",
        prompt, budget, tokenizer.decode(std::span(tokens).subspan(prompt - shown, shown)));
    llama::Sampler sample({.temperature = 0.8, .top_k = 20, .top_p = 0.95, .seed = 4});
    llama::Utf8Stream text;
    for (int i = 0; i < count; ++i) {
        const std::int32_t token = sample(logits);
        fmt::print("{}", text.push(tokenizer.piece(token)));
        std::fflush(stdout);
        const std::int64_t position = attention->length();
        logits = engine.forward({&token, 1}, {&position, 1}, *attention);
    }
    fmt::print("{}]\n\nThe cache has seen {} tokens and holds {:.0f} entries per head.\n", text.flush(),
               attention->length(), attention->rows_per_head());
}

int run(int argc, char** argv) {
    const Options options = parse(argc, argv);
    const auto start = std::chrono::steady_clock::now();
    const kvpolicy::host ctx;
    const llama::Model model = llama::load_model(options.model);
    const examples::HeldOut data = examples::read_held_out(options.model);
    const std::size_t sequences = std::min(options.sequences, data.tokens.size());
    constexpr std::int32_t decoded = 64;

    // A policy's results and speed, by row and budget; the dense model has neither.
    std::map<std::pair<std::size_t, std::size_t>, examples::Score> scores;
    std::map<std::pair<std::size_t, std::size_t>, std::pair<double, double>> speed_and_mib;
    examples::Score dense_score;
    std::pair<double, double> dense_speed_and_mib;

    // Models of one's own have no scorers until train_scorer has made them.
    std::vector<Row> rows;
    std::map<std::string, examples::TrainedScorers> trained;
    for (const Row& row : all_rows) {
        if (options.check && !row.checked) {
            continue;
        }
        const std::filesystem::path file = std::filesystem::path(options.model) / row.file;
        if (row.policy == "trained") {
            if (!std::filesystem::exists(file)) {
                continue;
            }
            trained.emplace(row.name, examples::load_scorers(file));
        }
        rows.push_back(row);
    }
    std::vector<Budget> budgets;
    for (const Budget& budget : all_budgets) {
        if (!options.check || budget.checked) {
            budgets.push_back(budget);
        }
    }

    examples::Progress progress;
    llama::Engine engine(model);
    const auto mib = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    for (std::size_t s = 0; s < sequences; ++s) {
        const std::string of = fmt::format("sequence {} of {}: ", s + 1, sequences);
        progress.show(of + "dense");
        examples::Oracle oracle(model.config);
        {
            auto attention = examples::make_attention<Storage>(ctx, model.config, {.name = "dense"},
                                                               data.length + decoded);
            auto watched = llama::observed(*attention, oracle);
            examples::SequenceScorer scorer(data, s);
            examples::run_sequence(engine, watched, data, s, 1024, scorer);
            scorer.add_to(dense_score);
            dense_score.rows += attention->rows_per_head();
            if (s == 0) {
                dense_speed_and_mib = {examples::decode_speed(engine, *attention, '\n', decoded),
                                       mib(attention->bytes())};
            }
        }
        std::map<float, std::vector<float>> oracle_scores;
        for (std::size_t r = 0; r < rows.size(); ++r) {
            const Row& row = rows[r];
            if (row.beta != 0.0f && !oracle_scores.contains(row.beta)) {
                progress.show(of + fmt::format("future attention, beta {}", row.beta));
                kvpolicy::FutureMassOptions mass;
                mass.window = examples::PolicyChoice{}.window;
                mass.beta = row.beta;
                oracle_scores[row.beta] = oracle.scores(ctx, mass);
            }
            for (std::size_t b = 0; b < budgets.size(); ++b) {
                progress.show(of + row.name + " at " + budgets[b].compression);
                const examples::PolicyChoice choice{.name = row.policy, .budget = budgets[b].entries};
                auto attention =
                    row.policy == "trained"
                        ? examples::make_trained(ctx, model.config, trained.at(row.name), choice)
                        : examples::make_attention<Storage>(ctx, model.config, choice, data.length);
                if (row.beta != 0.0f) {
                    attention->give_scores(oracle_scores[row.beta], data.length);
                }
                examples::SequenceScorer scorer(data, s);
                examples::run_sequence(engine, *attention, data, s, 1024, scorer);
                scorer.add_to(scores[{r, b}]);
                scores[{r, b}].rows += attention->rows_per_head();
                if (s == 0) {
                    // Speed does not depend on what the scores are.
                    if (row.beta != 0.0f) {
                        const auto heads = static_cast<std::size_t>(std::int64_t{model.config.layers} *
                                                                    model.config.kv_heads);
                        const std::size_t length = static_cast<std::size_t>(data.length) + decoded;
                        attention->give_scores(std::vector<float>(heads * length, 0.0f),
                                               static_cast<std::int64_t>(length));
                    }
                    speed_and_mib[{r, b}] = {examples::decode_speed(engine, *attention, '\n', decoded),
                                             mib(attention->bytes())};
                }
            }
        }
    }
    progress.done();

    fmt::print(
        "{} held-out sequences of {} bytes, {} retrieval queries (exact match, greedy; a few percent by "
        "chance or "
        "less);\n"
        "budgets are {} sinks, a window of {}, and k long-range keys a head; cache in bf16.\n\n",
        sequences, data.length, dense_score.answers, examples::PolicyChoice{}.sinks,
        examples::PolicyChoice{}.window);
    fmt::print("{:<28} {:>11} {:>7} {:>8} {:>7} {:>9} {:>9}\n", "cache", "compression", "rows", "bits/B",
               "recall", "cache MiB", "tokens/s");
    const auto line = [](const std::string& name, const std::string& compression,
                         const examples::Score& score, const std::pair<double, double>& speed) {
        fmt::print("{:<28} {:>11} {:>7.0f} {:>8.3f} {:>7.3f} {:>9.2f} {:>9.0f}\n", name, compression,
                   score.rows_per_head(), score.bits_per_byte(), score.recall(), speed.second, speed.first);
    };
    line("dense", "-", dense_score, dense_speed_and_mib);
    for (std::size_t b = 0; b < budgets.size(); ++b) {
        for (std::size_t r = 0; r < rows.size(); ++r) {
            line(rows[r].name, budgets[b].compression, scores[{r, b}], speed_and_mib[{r, b}]);
        }
    }
    fmt::print(
        "\nThe oracle knows the dense model's future attention: an upper bound for a scorer, not a policy to "
        "run.\n");
    write_text(ctx, model, data);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("({:.0f} s)\n", time.count());
    if (options.check) {
        // At the smallest budget.
        const std::size_t smallest = budgets.size() - 1;
        const auto recall = [&](const std::string& name, std::size_t budget) {
            const auto row = std::ranges::find(rows, name, &Row::name);
            if (row == rows.end()) {
                llama::fail("--check: the table has no row \"{}\"; are the scorers beside the model?", name);
            }
            return scores[{static_cast<std::size_t>(row - rows.begin()), budget}].recall();
        };
        const double dense = dense_score.recall(), streaming = recall("StreamingLLM", smallest),
                     oracle = recall("KVpop rule, oracle, beta 2", smallest);
        if (dense < 0.95 || oracle < 0.9 * dense || streaming > 0.1) {
            llama::fail(
                "the table should show dense recall of 0.95 or more, the oracle (beta 2) at 0.9 of it and "
                "StreamingLLM near chance, but shows {:.3f}, {:.3f} and {:.3f}",
                dense, oracle, streaming);
        }
        for (const char* name : {"KVpop-mlp, trained", "KVpop, trained"}) {
            if (recall(name, 0) < 0.9 * dense || recall(name, smallest) < streaming + 0.3) {
                llama::fail(
                    "the table should show {} at 0.9 of dense recall at {} and 0.3 above StreamingLLM at {}, "
                    "but "
                    "shows {:.3f} and {:.3f}",
                    name, budgets[0].compression, budgets[smallest].compression, recall(name, 0),
                    recall(name, smallest));
            }
        }
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("demo", run, argc, argv); }
