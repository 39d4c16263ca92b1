#include "options.hpp"

#include "support/arguments.hpp"

#include <llama/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <system_error>

namespace train {

const char* const usage =
    R"(usage: train_scorer ((--text FILE | --tokens FILE) [--model FOLDER] | --qkv FILE) [OPTION...]

q, k, v of a frozen model:
  --model FOLDER          a model to run (default: the byte model of this repository), with
  --text FILE             any text; the byte model's own training text comes from
                            tools/make_corpus && tar -xJf build/corpus/corpus.tar.xz -C build/corpus train.txt
  --length S              tokens a sequence (4096)
  --sequences N           at most so many sequences, visited again and again (48; of a file of q, k, v all)
  --pairs N               retrieval queries "@AB:1234" woven into each (32 for models that read bytes, else 0)
  --tokens FILE           instead of a text: token ids, a sequence a line, with spaces between
  --qkv FILE              instead of a model: a file of q, k and v (docs/training.md)
  --held-out FILE         sequences to watch, never trained on: text, or q, k, v (default: the model's
                          eval.bin, for models without one the byte model's in their own tokens, two of its
                          sequences as one)
  --held-out-sequences N  at most so many of them (2; of a file of q, k, v all; 0: none)
  --dump FILE             write q, k, v of the sequences to FILE instead of training
  --dump-eval             with --dump: the default sequences to hold out instead of the text's
  --dump-targets LIST     with --dump: targets for these betas instead of q, as in 1,2,4,inf; of --window,
                          --aggregate, --look-ahead
  --dump-tokens FILE      write the tokens of the sequences to FILE instead, for --tokens

the scorer (one a layer and KV head) and its policy:
  --scorer mlp|mlstm      (mlp)
  --hidden N              mlp (128)
  --d-qk N  --d-v N       mlstm: width of the features (64) and of the memory's values (32)
  --softcap C             mlstm: of the gates (15; 0: none)
  --norm  --layer-norm    mlstm: RMS norm, or a LayerNorm per head, before the read-out
  --skip                  mlstm: skip connection
  --immediate             mlstm: scores on arrival, not when a key leaves the window
  --sinks N (4)  --window N (64)  --budgets LIST of entries per head, taken in turn (1024,512,256)
  --beta B (2)            of the target, 1 (the paper's) to inf   --aggregate max|mean (max)
  --look-ahead L          only that many queries after the window count for the target (all)
  --no-decay              no learned decay, which is else from --gamma-min G (0.999) to --gamma-max G
                          (0.999999, the paper's)

the loss and the optimizer:
  --temperature T (1)  --omega-min O (0)  --margin-temperature T (1)  --no-balance
  --positions N           queries drawn a head and step (1024; 0: all)   --late SHARE (0.5)
  --steps N (300)  --batch N (1)  --rate R (1e-3)  --last-rate R (8e-5)  --warm-up N (100)
  --decay-rate F          of the learned decay's alpha, times --rate (30: it may cross the range in a run)
  --weight-decay W (1e-4)  --clip C (1)  --seed N (1)  --threads N (all)

where it runs:
  --backend host|cuda     (host); cuda: targets, steps and held-out numbers on the present GPU, in one stream
  --rows bf16|fp32        of keys and values there (bf16: tensor cores)
  --model-rows bf16|fp32  what the model's own attention reads there (fp32)
  --compare N             with --backend cuda: N steps of both backends from the same start, losses and times;
                          writes nothing

what comes out:
  --out FILE              the scorers (scorers.safetensors); matrices in bf16 unless --fp32
  --metrics FILE          JSON lines: training and held-out numbers
  --evaluate-every N      steps between looks at held-out sequences (100)
  --checkpoint FILE       written after the last step, every so many with --checkpoint-every N, and where an
                          error, SIGINT or SIGTERM ends the run (then without the option, too: OUT.checkpoint)
  --stop-after N          with --checkpoint: leave off after this step
  --resume FILE           go on from a checkpoint

An option that a run would not look at is refused.
)";

namespace {

using examples::number;

template <class Item>
std::vector<Item> list(const std::string& text, Item (*one)(std::string_view)) {
    std::vector<Item> items;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        items.push_back(one(std::string_view(text).substr(at, comma - at)));
        at = comma + 1;
    }
    return items;
}

float beta_of(std::string_view text) {
    return text == "inf" ? std::numeric_limits<float>::infinity() : number("--beta", text, 1.0f, 1e6f);
}

constexpr std::int32_t many = 1 << 30;
std::int32_t rows_of(std::string_view text) { return number("--budgets", text, 1, many); }

using Given = std::set<std::string, std::less<>>;
using Names = std::initializer_list<std::string_view>;

/// The first of these options that was given is refused: it needs `what`, or does not go with it.
void refuse(const Given& given, Names names, std::string_view what) {
    for (const std::string_view name : names) {
        if (given.contains(name)) {
            llama::fail("{}: {}", name, what);
        }
    }
}
void refuse_others(const Given& given, Names allowed, std::string_view what) {
    for (const std::string& name : given) {
        if (std::ranges::find(allowed, name) == allowed.end()) {
            llama::fail("{}: {}", name, what);
        }
    }
}

/// What is done, and with which sequences.
void check_source(const Options& o, const Given& given) {
    const int sources = (o.text.empty() ? 0 : 1) + (o.tokens.empty() ? 0 : 1) + (o.qkv.empty() ? 0 : 1);
    if (o.dump_eval && (o.dump.empty() || sources > 0)) {
        llama::fail("--dump-eval: goes with --dump, and without --text, --tokens and --qkv");
    }
    if (!o.dump_eval && sources != 1) {
        llama::fail(
            "--text FILE, --tokens FILE or --qkv FILE is needed, one of them. Any text will do; the byte "
            "model's own "
            "training "
            "text comes from\n  tools/make_corpus && tar -xJf build/corpus/corpus.tar.xz -C build/corpus "
            "train.txt");
    }
    if (!o.dump.empty() && !o.qkv.empty()) {
        llama::fail("--dump: needs --text or --tokens, since a file of q, k, v is there already");
    }
    if (!o.dump_tokens.empty() && (o.text.empty() || !o.dump.empty())) {
        llama::fail("--dump-tokens: goes with --text, and without --dump");
    }
    if (!o.qkv.empty()) {
        refuse(given, {"--model"}, "needs --text or --tokens; beside q, k, v of a file no model runs");
        if (o.held_out.empty() && o.held_out_sequences > 0) {
            refuse(given, {"--held-out-sequences"}, "needs --held-out, where q, k, v come from a file");
        }
    }
    // A text to hold out is cut as the other is.
    if (o.text.empty() && (!o.qkv.empty() || o.held_out.empty())) {
        refuse(given, {"--length", "--pairs"}, "needs --text, whose sequences are cut so");
    }
}

/// Options of training, where something else is done.
void check_task(const Options& o, const Given& given) {
    if (!o.dump.empty()) {
        refuse_others(given,
                      {"--model", "--text", "--tokens", "--length", "--pairs", "--sequences", "--seed",
                       "--threads", "--backend", "--model-rows", "--dump", "--dump-eval", "--dump-targets",
                       "--window", "--aggregate", "--look-ahead"},
                      "does not go with --dump, which trains nothing");
        if (o.dump_targets.empty()) {
            refuse(given, {"--window", "--aggregate", "--look-ahead"},
                   "with --dump needs --dump-targets; q, k and v do not depend on it");
        }
        if (o.text.empty()) {
            refuse(given, {"--seed"}, "with --dump needs --text, whose sequences are drawn by it");
        }
        return;
    }
    refuse(given, {"--dump-targets"}, "needs --dump");
    if (!o.dump_tokens.empty()) {
        refuse_others(given,
                      {"--model", "--text", "--length", "--pairs", "--sequences", "--seed", "--threads",
                       "--dump-tokens"},
                      "does not go with --dump-tokens, which runs no model and trains nothing");
    }
    if (o.compare > 0) {
        refuse(given,
               {"--held-out", "--held-out-sequences", "--out", "--fp32", "--metrics", "--evaluate-every",
                "--checkpoint", "--checkpoint-every", "--stop-after", "--resume"},
               "does not go with --compare, which writes nothing and holds nothing out");
    }
}

/// Options that need another one.
void check_needs(const Options& o, const Given& given) {
    if (o.spec.kind == "mlp") {
        refuse(given, {"--immediate"}, "is for --scorer mlstm; an mlp always scores on arrival");
        refuse(given, {"--d-qk", "--d-v", "--softcap", "--norm", "--layer-norm", "--skip"},
               "needs --scorer mlstm");
    } else {
        refuse(given, {"--hidden"}, "needs --scorer mlp");
    }
    if (!o.decay) {
        refuse(given, {"--gamma-min", "--gamma-max", "--decay-rate"}, "does not go with --no-decay");
    }
    if (o.spec.layer_norm) {
        refuse(given, {"--norm"}, "does not go with --layer-norm; one norm is enough");
    }
    if (o.positions == 0) {
        refuse(given, {"--late"}, "does not go with --positions 0, which takes all queries");
    }
    if (o.checkpoint.empty()) {
        refuse(given, {"--checkpoint-every"}, "needs --checkpoint");
        refuse(given, {"--stop-after"}, "needs --checkpoint, or what was trained would be lost");
    }
    if (!o.on_device) {
        refuse(given, {"--rows", "--model-rows"}, "needs --backend cuda; the host computes in fp32");
        refuse(given, {"--compare"}, "goes with --backend cuda");
    }
    if (!o.qkv.empty()) {
        refuse(given, {"--model-rows"}, "needs --text or --tokens; beside q, k, v of a file no model runs");
    }
}

bool trains(const Options& o) { return o.dump.empty() && o.dump_tokens.empty() && o.compare == 0; }

}  // namespace

Options parse(int argc, const char* const* argv) {
    Options o;
    const std::int64_t forever = std::int64_t{1} << 40;
    std::string name, value;
    const auto text = [&](std::string& into) { return [&] { into = value; }; };
    const auto count = [&](auto& into, auto least, auto most) {
        return [&into, least, most, &name, &value] {
            using Number = std::remove_reference_t<decltype(into)>;
            into = number<Number>(name, value, static_cast<Number>(least), static_cast<Number>(most));
        };
    };
    const auto one_of = [&](const char* a, const char* b) {
        if (value != a && value != b) {
            llama::fail("{}: {} is not allowed; it must be {} or {}", name, llama::clipped(value), a, b);
        }
        return value == a;
    };
    const std::map<std::string, std::function<void()>, std::less<>> with_value{
        {"--model", text(o.model)},
        {"--text", text(o.text)},
        {"--tokens", text(o.tokens)},
        {"--qkv", text(o.qkv)},
        {"--held-out", text(o.held_out)},
        {"--length", count(o.length, 2, 1 << 24)},
        {"--pairs", count(o.pairs, 0, 676)},
        {"--sequences", count(o.sequences, 1, 1 << 20)},
        {"--held-out-sequences", count(o.held_out_sequences, 0, 1 << 20)},
        {"--scorer", [&] { o.spec.kind = one_of("mlp", "mlstm") ? "mlp" : "mlstm"; }},
        {"--hidden", count(o.spec.hidden, 1, 1 << 16)},
        {"--d-qk", count(o.spec.d_qk, 1, 1 << 16)},
        {"--d-v", count(o.spec.d_v, 1, 1 << 16)},
        {"--softcap", count(o.spec.gate_softcap, 0, 1e6)},
        {"--sinks", count(o.spec.sinks, 0, many)},
        {"--window", count(o.spec.window, 1, 1 << 16)},
        {"--budgets", [&] { o.budgets = list<std::int32_t>(value, rows_of); }},
        {"--beta", [&] { o.target.beta = beta_of(value); }},
        {"--aggregate",
         [&] {
             o.target.aggregate =
                 one_of("max", "mean") ? kvpolicy::group_aggregate::max : kvpolicy::group_aggregate::mean;
         }},
        {"--look-ahead", count(o.target.look_ahead, 0, many)},
        {"--gamma-min", count(o.spec.gamma_min, 1e-6, 1.0)},
        {"--gamma-max", count(o.spec.gamma_max, 1e-6, 1.0)},
        {"--temperature", count(o.temperature, 1e-6, 1e6)},
        {"--omega-min", count(o.omega_min, 0, 1)},
        {"--margin-temperature", count(o.margin_temperature, 1e-6, 1e6)},
        {"--positions", count(o.positions, 0, many)},
        {"--late", count(o.late, 0, 1)},
        {"--steps", count(o.steps, 1, forever)},
        {"--stop-after", count(o.stop_after, 1, forever)},
        {"--batch", count(o.batch, 1, 1 << 16)},
        {"--rate", count(o.rate, 0, 1e3)},
        {"--last-rate", count(o.last_rate, 0, 1e3)},
        {"--warm-up", count(o.warm_up, 0, forever)},
        {"--decay-rate", count(o.decay_rate, 0, 1e6)},
        {"--weight-decay", count(o.weight_decay, 0, 1e3)},
        {"--clip", count(o.clip, 0, 1e9)},
        {"--seed", count(o.seed, 0, 1'000'000'000'000)},
        {"--out", text(o.out)},
        {"--checkpoint", text(o.checkpoint)},
        {"--checkpoint-every", count(o.checkpoint_every, 0, forever)},
        {"--resume", text(o.resume)},
        {"--metrics", text(o.metrics)},
        {"--evaluate-every", count(o.evaluate_every, 1, forever)},
        {"--dump", text(o.dump)},
        {"--dump-tokens", text(o.dump_tokens)},
        {"--dump-targets", [&] { o.dump_targets = list<float>(value, beta_of); }},
        {"--threads", count(o.threads, 0, 4096)},
        {"--backend", [&] { o.on_device = !one_of("host", "cuda"); }},
        {"--rows", [&] { o.fp32_rows = !one_of("bf16", "fp32"); }},
        {"--model-rows", [&] { o.bf16_model = one_of("bf16", "fp32"); }},
        {"--compare", count(o.compare, 1, 1 << 20)},
    };
    const std::map<std::string, std::function<void()>, std::less<>> flags{
        {"--dump-eval", [&] { o.dump_eval = true; }},
        {"--norm", [&] { o.spec.norm = true; }},
        {"--skip", [&] { o.spec.skip = true; }},
        {"--immediate", [&] { o.immediate = true; }},
        {"--layer-norm", [&] { o.spec.layer_norm = true; }},
        {"--no-decay", [&] { o.decay = false; }},
        {"--no-balance", [&] { o.balance = false; }},
        {"--fp32", [&] { o.fp32 = true; }},
    };
    Given given;
    for (int i = 1; i < argc; ++i) {
        name = argv[i];
        if (name == "--help" || name == "-h") {
            fmt::print("{}", usage);
            std::exit(0);
        }
        if (const auto flag = flags.find(name); flag != flags.end()) {
            flag->second();
            given.insert(name);
            continue;
        }
        const auto option = with_value.find(name);
        if (option == with_value.end()) {
            llama::fail("{}: not understood; --help lists what is", llama::clipped(name));
        }
        // A shell's empty variable, or a value that was forgotten.
        if (i + 1 == argc || *argv[i + 1] == '\0' || with_value.contains(argv[i + 1]) ||
            flags.contains(argv[i + 1])) {
            llama::fail("{}: needs a value", name);
        }
        value = argv[++i];
        option->second();
        given.insert(name);
    }
    check_source(o, given);
    check_task(o, given);
    check_needs(o, given);
    if (o.spec.gamma_min > o.spec.gamma_max) {
        llama::fail("--gamma-min: {} is not allowed; it must be at most --gamma-max, {}", o.spec.gamma_min,
                    o.spec.gamma_max);
    }
    for (const std::int32_t rows : o.budgets) {
        if (o.dump.empty() && rows <= o.spec.sinks + o.spec.window) {
            llama::fail("--budgets: {} is not allowed; it must be more than sinks and window, {}", rows,
                        o.spec.sinks + o.spec.window);
        }
    }
    if (o.compare > o.steps) {
        llama::fail("--compare: {} is not allowed; it must be at most --steps, {}", o.compare, o.steps);
    }
    if (!o.qkv.empty()) {  // a file's are there; a model would have to run for more
        o.sequences = given.contains("--sequences") ? o.sequences : many;
        o.held_out_sequences = given.contains("--held-out-sequences") ? o.held_out_sequences : many;
    }
    o.target.window = o.spec.window;
    o.target.leave_out = o.on_device && o.compare == 0 && o.dump.empty();
    o.spec.delay = o.spec.kind == "mlstm" && !o.immediate ? o.spec.window : 0;
    return o;
}

std::vector<examples::OutputLock> lock_files(const Options& o) {
    struct File {
        const char* option;
        const std::string& name;
    };
    const bool ends = o.stop_after == 0 || o.stop_after >= o.steps;
    // Where a run is interrupted, its checkpoint is written without an option, too.
    const std::string none, rescue = trains(o) ? o.rescue() : none;
    const File written[] = {{"--dump", o.dump},
                            {"--dump-tokens", o.dump_tokens},
                            {"--out", trains(o) && ends ? o.out : none},
                            {o.checkpoint.empty() ? "--out" : "--checkpoint", rescue}};
    const File others[] = {{"--text", o.text},         {"--tokens", o.tokens},   {"--qkv", o.qkv},
                           {"--held-out", o.held_out}, {"--metrics", o.metrics}, {"--resume", o.resume}};
    const auto refuse_same = [](const File& one, const File& other) {
        const auto place = [](const std::string& name) {
            std::error_code ignored;
            return name.empty() ? std::filesystem::path{} : std::filesystem::weakly_canonical(name, ignored);
        };
        const std::filesystem::path here = place(one.name);
        if (!here.empty() && here == place(other.name)) {
            llama::fail("{}: {} is the file of {}, too; another one is needed", one.option, one.name,
                        other.option);
        }
    };
    std::vector<examples::OutputLock> locks;
    for (const File& file : written) {
        for (const File& other : written) {
            if (&other != &file) {
                refuse_same(file, other);
            }
        }
        for (const File& other : others) {
            // A run may go on in its checkpoint.
            if (&file.name != &rescue || &other.name != &o.resume) {
                refuse_same(file, other);
            }
        }
        if (!file.name.empty()) {
            locks.emplace_back(file.option, file.name);
        }
    }
    for (const File& other : others) {
        if (&other.name != &o.metrics) {
            refuse_same({"--metrics", o.metrics}, other);
        }
    }
    // Metrics may go to a device or a pipe.
    std::error_code ignored;
    const auto status = std::filesystem::status(o.metrics, ignored);
    if (!o.metrics.empty() &&
        (!std::filesystem::exists(status) || std::filesystem::is_regular_file(status))) {
        locks.emplace_back("--metrics", o.metrics);
    }
    return locks;
}

}  // namespace train
