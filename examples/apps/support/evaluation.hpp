// What a cache costs a model: bits per byte, retrieval accuracy, memory, speed.
#pragma once

#include <llama/cache_attention.hpp>
#include <llama/engine.hpp>
#include <llama/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// Held-out sequences with retrieval queries, in tokens of some model. Those of the byte model are eval.bin
/// and eval.json (examples/models/byte-llama/README.md says how they are made); tokenize() makes those of
/// other models of them.
struct HeldOut {
    std::int32_t length = 0;
    std::int32_t digits = 4;
    std::vector<std::vector<std::int32_t>> tokens;                          // [sequences][length]
    std::vector<std::vector<std::int32_t>> answers;                         // first digits of asked values
    std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>> lines;  // synthetic lines, [begin, end)
    std::vector<std::vector<std::int32_t>> bytes;                           // of each token; empty: 1 each
};

/// Reads both files of a model's folder. Throws llama::Error for missing or inconsistent ones.
HeldOut read_held_out(const std::filesystem::path& folder);

/// The same text in the tokens of another model: every `joined` sequences of bytes become one, cut to the
/// length of the shortest, and at least `least` tokens long. An answer counts where each of its digits is a
/// token of its own; the rest of a line's tokens, and those that reach over its edge, are no text. Throws
/// llama::Error where fewer tokens than `least` come out.
HeldOut tokenize(const HeldOut& bytes, const llama::Tokenizer& tokenizer, std::size_t joined,
                 std::int32_t least);

/// Sums over sequences.
struct Score {
    double text_bits = 0.0;  // over bytes that are no part of a synthetic line
    std::int64_t text_bytes = 0, text_tokens = 0;
    std::int64_t digits_right = 0, digits = 0;    // of answers, each predicted from the text before it
    std::int64_t answers_right = 0, answers = 0;  // all four digits
    std::int64_t first_right = 0;  // of answers: the first digit, which only the retrieved pair tells
    double rows = 0.0;             // entries per head at the end
    std::int64_t sequences = 0;

    double bits_per_byte() const { return text_bits / static_cast<double>(text_bytes); }
    /// Natural log.
    double nll_per_token() const { return text_bits / static_cast<double>(text_tokens) * 0.6931471805599453; }
    double first_digit() const { return static_cast<double>(first_right) / static_cast<double>(answers); }
    double digit_accuracy() const { return static_cast<double>(digits_right) / static_cast<double>(digits); }
    double recall() const { return static_cast<double>(answers_right) / static_cast<double>(answers); }
    double rows_per_head() const { return rows / static_cast<double>(sequences); }
};

/// Adds one sequence, given the logits of `tokens[begin]` and the tokens after it.
class SequenceScorer {
  public:
    SequenceScorer(const HeldOut& data, std::size_t sequence);
    /// logits [count, vocab] predict tokens begin + 1 ... begin + count.
    void take(std::span<const float> logits, std::int32_t begin, std::int32_t count, std::int32_t vocab);
    void add_to(Score& score) const;

  private:
    const HeldOut& data_;
    std::size_t sequence_;
    std::vector<bool> text_;   // is this byte text?
    std::vector<bool> right_;  // was it the likeliest?
    double bits_ = 0.0;
    std::int64_t bytes_ = 0, count_ = 0;
};

/// Feeds one held-out sequence through `attention` in chunks and scores the predictions; with a `prompt`
/// its tokens come in one call instead, and those after it one by one. The attention must be empty:
/// fresh, or cleared.
template <llama::AttentionFunction AttentionParams>
void run_sequence(llama::Engine& engine, AttentionParams&& attention, const HeldOut& data,
                  std::size_t sequence, std::int32_t chunk, SequenceScorer& scorer, std::int32_t prompt = 0) {
    const std::vector<std::int32_t>& tokens = data.tokens[sequence];
    std::vector<std::int64_t> positions(static_cast<std::size_t>(data.length));
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    for (std::int32_t begin = 0, size = 0; begin < data.length; begin += size) {
        size = std::min(prompt == 0 ? chunk : begin == 0 ? prompt : 1, data.length - begin);
        const auto count = static_cast<std::size_t>(size);
        const auto at = static_cast<std::size_t>(begin);
        const auto logits =
            engine.forward(std::span(tokens).subspan(at, count), std::span(positions).subspan(at, count),
                           attention, llama::Logits::all);
        scorer.take(logits, begin, size, engine.model().config.vocab_size);
    }
}

/// Decode speed with the cache as it is: `steps` greedy tokens after what was fed. Tokens a second.
double decode_speed(llama::Engine& engine, llama::KvAttention& attention, std::int32_t first_token,
                    std::int32_t steps);

}  // namespace examples
