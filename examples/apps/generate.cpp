// Streams text from a model with a KV cache of a chosen policy and budget.
//
//   generate [OPTION...] [PROMPT]            generate --help lists options and policies
//
// PROMPT is a question for a chat model and the beginning of a text for others; without one it is read from
// the standard input. Tokens go to the standard output as they come, a summary to the standard error.
#include "support/generation_policies.hpp"
#include "support/program.hpp"

#include <fmt/format.h>
#if KVPOLICY_EXAMPLES_CUDA
#include <llama/cuda/engine.hpp>
#endif
#include <llama/engine.hpp>
#include <llama/error.hpp>
#include <llama/sampler.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

struct Options {
    std::string model = KVPOLICY_BYTE_MODEL;
    std::string prompt;
    std::string policy;  // empty: by the other options
    examples::PolicyOptions numbers;
    std::int32_t tokens = 512;
    std::int32_t threads = 0;
    bool on_gpu = false;
    llama::DType weights = llama::DType::f32;
    llama::SamplerOptions sampler{.temperature = 0.7, .top_k = 20, .top_p = 0.95, .seed = 1};
};

constexpr const char* usage =
    "usage: generate [OPTION...] [--] [PROMPT]      (without PROMPT: the standard input)\n"
    "\n"
    "  --model FOLDER     a Llama in Hugging Face's format (default: the byte model of this repository)\n"
    "  --policy NAME      which keys the cache keeps, see below (default: streaming)\n"
    "  --budget B         the most entries that a head may hold, sinks and window included (default: 512)\n"
    "  --sinks S          first tokens that stay (default: 4)\n"
    "  --window W         most recent tokens that stay (default: 64)\n"
    "  --density F        fraction of the other keys that stays, from 0 to 1 (default: 0.25)\n"
    "  --gamma G          decay of scores with every token, above 0 to 1 (default: 1, none)\n"
    "  --scorers FILE     trained scorers or gates; chooses the policy kvpop or gates\n"
    "  --tokens N         the most tokens to write (default: 512)\n"
    "  --temperature T    0 takes the likeliest token (default: 0.7)\n"
    "  --seed N           of the sampling, and of the policy random (default: 1)\n"
    "  --threads N        0: all (default)\n"
    "  --rows TYPE        what the cache stores: bf16 (default) or fp32\n"
    "  --backend NAME     host (default), or cuda: the first GPU, one graph a token\n"
    "  --weights TYPE     of the matrices on a GPU: fp32 (default) or bf16\n"
    "\n"
    "policies, and the options that each uses:\n";

/// The options that belong to some policies only.
constexpr std::pair<std::string_view, unsigned> policy_options[] = {
    {"--budget", examples::uses_budget}, {"--sinks", examples::uses_sinks},
    {"--window", examples::uses_window}, {"--density", examples::uses_density},
    {"--gamma", examples::uses_gamma},   {"--scorers", examples::uses_scorers}};

void print_help() {
    fmt::print("{}", usage);
    for (const examples::NamedPolicy& policy : examples::generation_policies()) {
        fmt::print("  {:<12} {}\n", policy.name, policy.summary);
        std::vector<std::string_view> uses;
        for (const auto& [option, flag] : policy_options) {
            if ((policy.uses & flag) != 0) {
                uses.push_back(option);
            }
        }
        if (!uses.empty()) {
            fmt::print("  {:<12} {}\n", "", fmt::join(uses, " "));
        }
    }
    const auto names = examples::device_policy_names();
    fmt::print("\nwith --backend cuda: {}\n", names.empty() ? "none, this program was built without CUDA"
                                                            : fmt::format("{}", fmt::join(names, ", ")));
}

/// A whole text as a number from `least` to `most`; NaN is none.
template <class Number>
void read_number(const std::string& name, const std::string& text, Number& number, Number least,
                 Number most = std::numeric_limits<Number>::max()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size() || !(number >= least && number <= most)) {
        const std::string limit = most == std::numeric_limits<Number>::max() && !std::is_integral_v<Number>
                                      ? fmt::format("{} or more", least)
                                      : fmt::format("from {} to {}", least, most);
        llama::fail("{}: {} is not allowed; it must be a number {}", name, llama::printable(text), limit);
    }
}

void read_type(const std::string& name, const std::string& text, llama::DType& type) {
    if (text != "fp32" && text != "bf16") {
        llama::fail("{}: {} is not allowed; it must be fp32 or bf16", name, llama::printable(text));
    }
    type = text == "fp32" ? llama::DType::f32 : llama::DType::bf16;
}

/// Refuses a backend that this program, or the chosen policy, does not have.
void check_backend(const Options& options, const std::vector<std::string>& given) {
    if (!options.on_gpu) {
        if (std::ranges::find(given, "--weights") != given.end()) {
            llama::fail("--weights: is for --backend cuda; the host computes in fp32");
        }
        return;
    }
    const auto names = examples::device_policy_names();
    if (names.empty()) {
        llama::fail(
            "--backend: cuda is not allowed; this program was built without it (KVPOLICY_ENABLE_CUDA)");
    }
    if (std::ranges::find(names, options.policy) == names.end()) {
        llama::fail("--backend: cuda is not allowed with the policy {}; these run on a GPU: {}",
                    options.policy, fmt::join(names, ", "));
    }
}

/// Refuses an option that the chosen policy would not look at: the text would not be what was asked for.
void check_policy_options(const Options& options, const std::vector<std::string>& given) {
    const examples::NamedPolicy& chosen = examples::generation_policy(options.policy);
    for (const auto& [option, flag] : policy_options) {
        if ((chosen.uses & flag) != 0 || std::ranges::find(given, option) == given.end()) {
            continue;
        }
        std::vector<std::string_view> others;
        for (const examples::NamedPolicy& policy : examples::generation_policies()) {
            if ((policy.uses & flag) != 0) {
                others.push_back(policy.name);
            }
        }
        llama::fail("{}: the policy {} does not use it; these do: {}", option, options.policy,
                    fmt::join(others, ", "));
    }
}

Options parse(int argc, char** argv) {
    Options options;
    std::vector<std::string> given;
    bool has_prompt = false;
    bool only_prompt = false;  // after --
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) {
                llama::fail("{}: needs a value; see generate --help", argument);
            }
            return argv[++i];
        };
        const bool is_option = !only_prompt && argument.starts_with("--");
        if (is_option) {
            given.push_back(argument);
        }
        if (!is_option && !(argument == "-h" && !only_prompt)) {
            if (has_prompt) {
                llama::fail("{}: is a second prompt; put quotes around a prompt of several words",
                            llama::printable(argument));
            }
            has_prompt = true;
            options.prompt = argument;
        } else if (argument == "--") {
            only_prompt = true;
        } else if (argument == "--model") {
            options.model = value();
        } else if (argument == "--policy") {
            options.policy = value();
            examples::generation_policy(options.policy);  // refuses an unknown one
        } else if (argument == "--budget") {
            read_number(argument, value(), options.numbers.budget, 1);
        } else if (argument == "--sinks") {
            read_number(argument, value(), options.numbers.sinks, 0);
        } else if (argument == "--window") {
            read_number(argument, value(), options.numbers.window, 1);
        } else if (argument == "--density") {
            read_number(argument, value(), options.numbers.density, 0.0, 1.0);
        } else if (argument == "--gamma") {
            read_number(argument, value(), options.numbers.gamma, 1e-6, 1.0);
        } else if (argument == "--scorers") {
            options.numbers.scorers = value();
        } else if (argument == "--tokens") {
            read_number(argument, value(), options.tokens, 1);
        } else if (argument == "--threads") {
            read_number(argument, value(), options.threads, 0, 4096);
        } else if (argument == "--rows") {
            read_type(argument, value(), options.numbers.rows);
        } else if (argument == "--weights") {
            read_type(argument, value(), options.weights);
        } else if (argument == "--backend") {
            const std::string name = value();
            if (name != "host" && name != "cuda") {
                llama::fail("--backend: {} is not allowed; it must be host or cuda", llama::printable(name));
            }
            options.on_gpu = name == "cuda";
        } else if (argument == "--temperature") {
            read_number(argument, value(), options.sampler.temperature, 0.0);
        } else if (argument == "--seed") {
            read_number(argument, value(), options.sampler.seed, std::uint64_t{0});
            options.numbers.seed = options.sampler.seed;
        } else if (argument == "--help" || argument == "-h") {
            print_help();
            std::exit(0);
        } else {
            llama::fail("{}: is no option; see generate --help", llama::printable(argument));
        }
    }
    if (options.policy.empty()) {
        options.policy = examples::policy_of_file(options.numbers.scorers);
    }
    check_policy_options(options, given);
    check_backend(options, given);
    if (!has_prompt) {
        options.prompt.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
    }
    if (options.prompt.empty()) {
        llama::fail("the prompt is empty; see generate --help");
    }
    return options;
}

/// What the last line says.
struct Summary {
    double prompt_seconds = 0.0, tokens_per_second = 0.0;
    std::int32_t written = 0;
    std::int64_t seen = 0;
    double rows_per_head = 0.0;
    std::size_t bytes = 0;
};

Summary write_on_host(const Options& options, examples::PolicySetting& setting,
                      const std::function<bool(std::int32_t)>& take) {
    const auto attention = examples::generation_policy(options.policy).make(setting);
    llama::Engine engine(setting.model);
    std::span<const float> logits;
    Summary summary;
    const auto begin = std::chrono::steady_clock::now();
    constexpr std::size_t chunk = 512;
    for (std::size_t at = 0; at < setting.prompt.size(); at += chunk) {
        const std::size_t count = std::min(chunk, setting.prompt.size() - at);
        std::vector<std::int64_t> positions(count);
        for (std::size_t i = 0; i < count; ++i) {
            positions[i] = static_cast<std::int64_t>(at + i);
        }
        logits = engine.forward(setting.prompt.subspan(at, count), positions, *attention);
    }
    summary.prompt_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

    llama::Sampler sample(options.sampler);
    const auto start = std::chrono::steady_clock::now();
    while (summary.written < options.tokens) {
        const std::int32_t token = sample(logits);
        if (!take(token)) {
            break;
        }
        const std::int64_t position = attention->length();
        logits = engine.forward({&token, 1}, {&position, 1}, *attention);
        ++summary.written;
    }
    summary.tokens_per_second =
        summary.written / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    summary.seen = attention->length();
    summary.rows_per_head = attention->rows_per_head();
    summary.bytes = attention->bytes();
    return summary;
}

#if KVPOLICY_EXAMPLES_CUDA
Summary write_on_gpu(const Options& options, examples::PolicySetting& setting,
                     const std::function<bool(std::int32_t)>& take) {
    llama::DeviceEngine engine(setting.model, options.weights);
    const examples::DeviceSetting device{engine.stream(), setting.model.config, options.numbers.rows,
                                         llama::DeviceEngine::chunk};
    const auto attention = examples::generation_policy(options.policy).make_on_device(setting, device);
    Summary summary;
    summary.written = engine.write(setting.prompt, *attention, options.sampler, options.tokens, take);
    summary.prompt_seconds = engine.prompt_seconds();
    summary.tokens_per_second = engine.tokens_per_second();
    summary.seen = attention->length();
    summary.rows_per_head = attention->rows_per_head();
    summary.bytes = attention->bytes();
    return summary;
}
#endif

int run(int argc, char** argv) {
    const Options options = parse(argc, argv);
    const kvpolicy::host ctx(options.threads);
    const llama::Model model = llama::load_model(options.model);
    const llama::Tokenizer tokenizer = llama::read_tokenizer(options.model, model.config.vocab_size);

    std::vector<std::int32_t> tokens;
    if (tokenizer.special("<|im_start|>")) {
        const llama::Message question{"user", options.prompt};
        tokens = llama::chat_prompt(tokenizer, {&question, 1});
    } else {
        tokens = tokenizer.encode(options.prompt);
    }
    constexpr std::size_t most = std::numeric_limits<std::int32_t>::max();
    if (tokens.size() > most - static_cast<std::size_t>(options.tokens)) {
        llama::fail("--tokens: {} is not allowed; with the {} of the prompt it must be {} at most",
                    options.tokens, tokens.size(), most);
    }
    const auto max_seq_len = static_cast<std::int32_t>(tokens.size()) + options.tokens;
    examples::PolicySetting setting{ctx, model, tokens, max_seq_len, options.numbers};

    llama::Utf8Stream text;
    const auto take = [&](std::int32_t token) {
        if (std::ranges::find(model.config.eos, token) != model.config.eos.end()) {
            return false;
        }
        fmt::print("{}", text.push(tokenizer.piece(token)));
        std::fflush(stdout);
        return true;
    };
#if KVPOLICY_EXAMPLES_CUDA
    const Summary summary =
        options.on_gpu ? write_on_gpu(options, setting, take) : write_on_host(options, setting, take);
#else
    const Summary summary = write_on_host(options, setting, take);
#endif
    fmt::print("{}\n", text.flush());
    fmt::print(stderr,
               "\n[prompt {} tokens in {:.1f} s; {} tokens at {:.1f} a second; {}: {} tokens seen, {:.0f} "
               "entries per head held, "
               "cache of {:.1f} MiB]\n",
               tokens.size(), summary.prompt_seconds, summary.written, summary.tokens_per_second,
               options.policy, summary.seen, summary.rows_per_head,
               static_cast<double>(summary.bytes) / (1 << 20));
    return 0;
}

}  // namespace

int main(int argc, char** argv) { return examples::run_program("generate", run, argc, argv); }
