// Held-out sequences with retrieval queries, and what a model's logits are worth on them: bits per byte and
// retrieval accuracy.
#pragma once

#include <llama/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
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

}  // namespace examples
