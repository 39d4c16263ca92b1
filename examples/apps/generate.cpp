// Streams text from a model with a KV cache of a chosen policy and budget.
//
//   generate [--model FOLDER] [--policy NAME] [--budget B] [--sinks S] [--window W] [--tokens N] [--temperature T] [--seed N]
//            [--threads N] [PROMPT]
//
// PROMPT is a question for a chat model and the beginning of a text for others; without one it is read from the standard
// input. Tokens go to the standard output as they come, a summary to the standard error.
#include "support/policies.hpp"

#include <fmt/format.h>
#include <llama/engine.hpp>
#include <llama/error.hpp>
#include <llama/sampler.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

namespace {

struct Options {
    std::string model = KVPOLICY_BYTE_MODEL;
    std::string prompt;
    examples::PolicyChoice policy{.name = "streaming", .budget = 512};
    std::int32_t tokens = 512;
    std::int32_t threads = 0;
    llama::SamplerOptions sampler{.temperature = 0.7, .top_k = 20, .top_p = 0.95, .seed = 1};
};

constexpr const char* usage =
    "usage: generate [--model FOLDER] [--policy NAME] [--budget B] [--sinks S] [--window W] [--tokens N]\n"
    "                [--temperature T] [--seed N] [--threads N] [PROMPT]\n"
    "policies: dense, streaming (StreamingLLM), keynorm (KVpop's rule, small keys first)";

template <class Number>
void read_number(const std::string& name, const std::string& text, Number& number, Number least) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size() || number < least) {
        llama::fail("{}: {} is not allowed; it must be a number, {} or more", name, text, least);
    }
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) {
                llama::fail("{}: needs a value\n{}", argument, usage);
            }
            return argv[++i];
        };
        if (argument == "--model") {
            options.model = value();
        } else if (argument == "--policy") {
            options.policy.name = value();
        } else if (argument == "--budget") {
            read_number(argument, value(), options.policy.budget, 1);
        } else if (argument == "--sinks") {
            read_number(argument, value(), options.policy.sinks, 0);
        } else if (argument == "--window") {
            read_number(argument, value(), options.policy.window, 1);
        } else if (argument == "--tokens") {
            read_number(argument, value(), options.tokens, 1);
        } else if (argument == "--threads") {
            read_number(argument, value(), options.threads, 0);
        } else if (argument == "--temperature") {
            read_number(argument, value(), options.sampler.temperature, 0.0);
        } else if (argument == "--seed") {
            read_number(argument, value(), options.sampler.seed, std::uint64_t{0});
        } else if (argument == "--help" || argument == "-h") {
            fmt::print("{}\n", usage);
            std::exit(0);
        } else if (argument.starts_with("--") || !options.prompt.empty()) {
            llama::fail("{}: not understood\n{}", argument, usage);
        } else {
            options.prompt = argument;
        }
    }
    if (options.prompt.empty()) {
        options.prompt.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
    }
    if (options.prompt.empty()) {
        llama::fail("the prompt is empty\n{}", usage);
    }
    if (options.policy.name == "given") {
        llama::fail("policy: given takes scores from a program; see demo");
    }
    return options;
}

int run(int argc, char** argv) {
    const Options options = parse(argc, argv);
    const kvpolicy::host on(options.threads);
    const llama::Model model = llama::load_model(options.model);
    const llama::Tokenizer tokenizer = llama::read_tokenizer(options.model, model.config.vocab_size);

    std::vector<std::int32_t> tokens;
    if (tokenizer.special("<|im_start|>")) {
        const llama::Message question{"user", options.prompt};
        tokens = llama::chat_prompt(tokenizer, {&question, 1});
    } else {
        tokens = tokenizer.encode(options.prompt);
    }
    const auto longest = static_cast<std::int32_t>(tokens.size()) + options.tokens;
    const auto attention =
        examples::make_attention<kvpolicy::bf16>(on, model.config, options.policy, longest);

    llama::Engine engine(model);
    std::span<const float> logits;
    const auto begin = std::chrono::steady_clock::now();
    constexpr std::size_t chunk = 512;
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - at);
        std::vector<std::int64_t> positions(count);
        for (std::size_t i = 0; i < count; ++i) {
            positions[i] = static_cast<std::int64_t>(at + i);
        }
        logits = engine.forward(std::span(tokens).subspan(at, count), positions, *attention);
    }
    const std::chrono::duration<double> prompt_time = std::chrono::steady_clock::now() - begin;

    llama::Sampler sample(options.sampler);
    llama::Utf8Stream text;
    std::int32_t written = 0;
    const auto start = std::chrono::steady_clock::now();
    while (written < options.tokens) {
        const std::int32_t token = sample(logits);
        if (std::ranges::find(model.config.eos, token) != model.config.eos.end()) {
            break;
        }
        fmt::print("{}", text.push(tokenizer.piece(token)));
        std::fflush(stdout);
        const std::int64_t position = attention->length();
        logits = engine.forward({&token, 1}, {&position, 1}, *attention);
        ++written;
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("{}\n", text.flush());
    fmt::print(stderr,
               "\n[prompt {} tokens in {:.1f} s; {} tokens at {:.1f} a second; {}: {} tokens seen, {:.0f} "
               "rows a head held, "
               "cache of {:.1f} MiB]\n",
               tokens.size(), prompt_time.count(), written, written / time.count(), options.policy.name,
               attention->length(), attention->rows_per_head(),
               static_cast<double>(attention->bytes()) / (1 << 20));
    return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& error) {
    fmt::print(stderr, "generate: {}\n", error.what());
    return 1;
}
