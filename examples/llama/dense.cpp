// Writes text with the full KV cache: the engine with nothing of kvpolicy in it.
//   llama_dense MODEL_FOLDER "prompt" [tokens]
#include <llama/dense_attention.hpp>
#include <llama/engine.hpp>
#include <llama/error.hpp>
#include <llama/sampler.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace {

int run(int argc, char** argv) {
    if (argc < 3) llama::fail("usage: llama_dense MODEL_FOLDER \"prompt\" [tokens]");
    const llama::Model model = llama::load_model(argv[1]);
    const llama::Tokenizer tokenizer = llama::read_tokenizer(argv[1], model.config.vocab_size);
    const int limit = argc > 3 ? std::atoi(argv[3]) : 128;

    std::vector<std::int32_t> tokens;
    if (tokenizer.special("<|im_start|>")) {
        const llama::Message question{"user", argv[2]};
        tokens = llama::chat_prompt(tokenizer, {&question, 1});
    } else {
        tokens = tokenizer.encode(argv[2]);
    }
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);

    llama::Engine engine(model);
    llama::DenseAttention attention(model.config);
    llama::Sampler sample;
    llama::Utf8Stream text;
    auto logits = engine.forward(tokens, positions, attention);  // the prompt in one call

    const auto start = std::chrono::steady_clock::now();
    int count = 0;
    while (!logits.empty() && count < limit) {
        const std::int32_t token = sample(logits);
        if (std::ranges::find(model.config.eos, token) != model.config.eos.end()) break;
        fmt::print("{}", text.push(tokenizer.piece(token)));
        std::fflush(stdout);
        const std::int64_t position = attention.length();
        logits = engine.forward({&token, 1}, {&position, 1}, attention);
        ++count;
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fmt::print("{}\n", text.flush());
    if (count > 0)
        fmt::print(stderr, "{} tokens, {:.1f} tokens/s, {:.1f} GB/s of weights\n", count,
                   count / time.count(), count / time.count() * static_cast<double>(model.bytes()) * 1e-9);
    return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "llama_dense: {}\n", error.what());
    return 1;
}
