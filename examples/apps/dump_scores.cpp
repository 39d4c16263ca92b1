// Writes the scores that a trained scorer gives the tokens of a text: real lifetimes for benchmarks.
//
//   dump_scores --out FILE [OPTION...]       dump_scores --help lists options
//
// benchmarks/data has files of it.
#include "support/arguments.hpp"
#include "support/program.hpp"
#include "support/score_dump.hpp"
#include "support/whole_file.hpp"

#include <fmt/format.h>
#include <llama/error.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace {

using examples::number;

constexpr const char* usage = R"(usage: dump_scores --out FILE [OPTION...]
  Writes the scores that a trained scorer gives a text's tokens: fp32 [layers, KV heads, tokens]

  --out FILE         scores, log_gamma (of the decay) and, if the file of scorers has quantiles, thresholds
  --model FOLDER     (default: the byte model of this repository)
  --scorers FILE     (default: the byte model's kvpop.safetensors)
  --text FILE        may be repeated: one text after another (default: the byte model's eval.bin)
  --tokens N         scores per KV head (16384)
  --segment N        tokens that the model reads at once (default: its context, the most allowed)
  --overlap N        tokens before those that a segment gives scores for (default: half a segment)
  --layers LIST      only these, as in 1,2,3,4 (default: all)
  --share F          of the training text's scores that lie above the thresholds (0.25)
  --threads N        of the scorers (all)
)";

constexpr std::int32_t most = 1 << 30;

struct Options {
    std::string model = KVPOLICY_BYTE_MODEL, scorers = KVPOLICY_BYTE_MODEL "/scorers/kvpop.safetensors", out;
    std::vector<std::string> texts;
    examples::DumpOptions dump;
    std::int32_t threads = 0;
};

Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            fmt::print("{}", usage);
            std::exit(0);
        }
        const std::string value = examples::next_value(argc, argv, i, usage);
        if (name == "--out") {
            o.out = value;
        } else if (name == "--model") {
            o.model = value;
        } else if (name == "--scorers") {
            o.scorers = value;
        } else if (name == "--text") {
            o.texts.push_back(value);
        } else if (name == "--tokens") {
            o.dump.tokens = number(name, value, 1, most);
        } else if (name == "--segment") {
            o.dump.segment = number(name, value, 1, most);
        } else if (name == "--overlap") {
            o.dump.overlap = number(name, value, 0, most);
        } else if (name == "--layers") {
            for (const std::string& layer : examples::list(value)) {
                o.dump.layers.push_back(number(name, layer, 0, most));
            }
        } else if (name == "--share") {
            o.dump.share = number(name, value, 0.0, 1.0);
        } else if (name == "--threads") {
            o.threads = number(name, value, 0, 4096);
        } else {
            llama::fail("{}: not understood\n{}", llama::clipped(name), usage);
        }
    }
    if (o.out.empty()) {
        llama::fail("--out: a file is needed\n{}", usage);
    }
    if (o.texts.empty()) {
        o.texts.emplace_back(KVPOLICY_BYTE_MODEL "/eval.bin");
    }
    return o;
}

std::string read_text(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    if (!in || text.empty()) {
        llama::fail("--text: {} cannot be read, or is empty", file);
    }
    return text;
}

/// A file's or folder's own name: the path is of this machine.
std::string name_of(const std::string& path) {
    const std::filesystem::path whole = std::filesystem::path(path).lexically_normal();
    return (whole.has_filename() ? whole : whole.parent_path()).filename().string();
}

/// By head: mean and standard deviation of the scores, and the share above the threshold.
void print_heads(const examples::ScoreDump& dump) {
    const auto tokens = static_cast<std::size_t>(dump.options.tokens);
    const auto heads = static_cast<std::size_t>(dump.heads);
    fmt::print("layer  head      mean       std  above threshold\n");
    for (std::size_t i = 0; i < dump.options.layers.size() * heads; ++i) {
        const auto scores = std::span(dump.scores).subspan(i * tokens, tokens);
        double sum = 0.0, squares = 0.0;
        std::size_t above = 0;
        for (const float x : scores) {
            sum += static_cast<double>(x);
            squares += static_cast<double>(x) * static_cast<double>(x);
            above += !dump.thresholds.empty() && x >= dump.thresholds[i] ? 1u : 0u;
        }
        const double n = static_cast<double>(tokens), mean = sum / n;
        fmt::print(
            "{:5}  {:4}  {:8.3f}  {:8.3f}  {:>15}\n", dump.options.layers[i / heads], i % heads, mean,
            std::sqrt(std::max(0.0, squares / n - mean * mean)),
            dump.thresholds.empty() ? "-" : fmt::format("{:.1f}%", 100.0 * static_cast<double>(above) / n));
    }
}

int run(int argc, char** argv) {
    const Options o = parse(argc, argv);
    const examples::OutputLock lock("--out", o.out);
    const kvpolicy::host ctx(o.threads);
    const examples::TrainedScorers trained = examples::load_scorers(o.scorers);
    const llama::Model model = llama::load_model(o.model);
    const llama::Tokenizer tokenizer = llama::read_tokenizer(o.model, model.config.vocab_size);
    std::string text, names;
    for (const std::string& file : o.texts) {
        text += read_text(file);
        names += (names.empty() ? "" : ", ") + name_of(file);
    }
    const examples::ScoreDump dump =
        examples::dump_scores(ctx, model, trained, tokenizer.encode(text), o.dump);
    examples::save_dump(o.out, dump, trained.spec,
                        {{"model", name_of(o.model)}, {"scorer", name_of(o.scorers)}, {"text", names}});
    print_heads(dump);
    fmt::print("{}: {} layers x {} KV heads x {} tokens, in {} segments of up to {} tokens\n", o.out,
               dump.options.layers.size(), dump.heads, dump.options.tokens, dump.segments,
               dump.options.segment);
    return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("dump_scores", run, argc, argv); }
